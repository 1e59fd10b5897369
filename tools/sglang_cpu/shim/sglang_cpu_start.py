"""Runs at the start of every Python of the SGLang environment, by a `.pth` file.

SGLang imports `torchvision.transforms` whatever it serves. torchvision's wheel is built for CUDA;
on a CPU torch its native library does not load, and its import then fails because it registers
fake kernels for two operators that the library would have defined ("operator torchvision::nms does
not exist"). So their schemas are defined just before torchvision is first imported. Nobody calls
them: no vision model is served here.
"""

import importlib.abc
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DefineOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; notices the import of torchvision."""

    def __init__(self) -> None:
        self._library: object = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Never a spec: the next finder has it."""
        if fullname == "torchvision" and self._library is None:
            import torch  # here: most Pythons of this environment need none

            library = torch.library.Library("torchvision", "DEF")
            self._library = library  # its operators live as long as it does
            for operator in _OPERATORS:
                library.define(operator + _SIGNATURE)
        return None


# SGLang takes its CPU branches only if told so.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
sys.meta_path.insert(0, _DefineOperators())
