"""Names of quantized number formats, which SGLang lists when it is imported."""


class _ScalarType:
    def __init__(self, name: str) -> None:
        self.id = name
        self.size_bits = 4


class _ScalarTypes:
    """Any format that is asked for; none is ever computed with."""

    def __getattr__(self, name: str) -> _ScalarType:
        if name.startswith("__"):
            raise AttributeError(name)
        scalar_type = _ScalarType(name)
        setattr(self, name, scalar_type)  # the same object each time
        return scalar_type


scalar_types = _ScalarTypes()
