"""Section `engine`: inference servers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from async_grpo.config.ranges import not_negative, positive


class EngineKind(StrEnum):
    """Which inference server a generator drives."""

    embedded = "embedded"


@dataclass(kw_only=True)
class EngineSection:
    """The inference servers that a generator drives."""

    kind: EngineKind = EngineKind.embedded
    """embedded: SGLang's HTTP API over transformers, on CPU or one GPU."""
    urls: list[str] = field(default_factory=list)
    """Attach to these running engines instead of starting any."""
    num_engines: int = 1
    """Engines that each generator starts."""
    host: str = "127.0.0.1"
    """Address that engines listen on."""
    port: int = 0
    """Port of `async-grpo engine`; 0: chosen by the system. Engines started by a generator always
    choose theirs."""
    max_running_requests: int = 64
    """Decode slots of one engine."""
    context_length: int = 0
    """Longest prompt + completion; 0: the model's own limit."""
    page_size: int = 16
    """KV cache block, in tokens."""
    max_batch_tokens: int = 256
    """Embedded engine: tokens of one forward pass, new prompts and decode slots together."""
    kv_cache_bytes: int = 1 << 30
    """Embedded engine: upper limit of its KV cache and attention mask; less is allocated when
    max_running_requests sequences of context_length need less."""
    sampling_seed: int | None = None
    """Embedded engine: seed of its sampling; null: fresh entropy at each start, so that engines and
    restarts draw different samples."""
    threads: int = 1
    """CPU threads of one engine."""
    start_timeout_s: float = 180.0
    """From start to the first answer of /server_info."""
    control_timeout_s: float = 20.0
    """One control call, other than the collective ones."""
    max_restarts: int = 5
    """Starts after the first, per engine slot."""
    api_key_file: str = ""
    """File with the key that engines ask for and clients send (`Authorization: Bearer KEY`); empty:
    the environment variable ASYNC_GRPO_ENGINE_API_KEY, or no key."""
    admin_api_key_file: str = ""
    """File with the key of the control calls (pauses, aborts, weight updates), which then refuse
    the other one; empty: ASYNC_GRPO_ENGINE_ADMIN_API_KEY, or the API key."""

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        yield from positive(
            where, self, "num_engines", "max_running_requests", "page_size", "max_batch_tokens",
            "kv_cache_bytes", "threads", "start_timeout_s", "control_timeout_s",
        )  # fmt: skip
        yield from not_negative(where, self, "context_length", "max_restarts", "port")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                yield f"{where}.urls: {url!r} must start with http:// or https://"
