"""Section `engine`: inference servers."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from async_grpo.config.ranges import not_negative, positive


class EngineKind(StrEnum):
    """The inference servers that come with the package, by name."""

    embedded = "embedded"
    sglang = "sglang"


RESERVED_SERVER_ARGS = frozenset(
    {
        "--model-path", "--model", "--host", "--port", "--dtype", "--tp-size", "--tp",
        "--tensor-parallel-size", "--dp-size", "--dp", "--data-parallel-size", "--pp-size", "--pp",
        "--pipeline-parallel-size", "--max-running-requests", "--context-length", "--api-key",
        "--admin-api-key", "--config", "--weight-version", "--base-gpu-id", "--nnodes",
    }
)  # fmt: skip
"""Flags of SGLang that other fields set, or that a started server cannot have: a weight update
reaches the ranks of one data-parallel and one pipeline-parallel replica on one machine."""


LOOPBACK = ("127.", "localhost", "::1")
"""How addresses begin that only this machine reaches."""

RAW_LOGPROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""Variable of SGLang that makes its log-probs those of another distribution."""


_LOOPBACK_NAMES = {"localhost": "127.0.0.1", "ip6-localhost": "::1"}


def _place(url: str) -> tuple[str, str, int | None, str]:
    """Equal for two spellings of one address."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    try:
        port = parts.port
    except ValueError:  # no number: the client says so
        port = None
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, _LOOPBACK_NAMES.get(host, host), port or default, parts.path.rstrip("/")


@dataclass(kw_only=True)
class EngineSection:
    """The inference servers that a generator drives."""

    kind: str = EngineKind.embedded.value
    """embedded: SGLang's HTTP API over transformers, on CPU or one GPU. sglang: SGLang itself, in
    an environment of its own (`python`). Or `package.module:attribute`, which starts a server that
    speaks the same API. Attached engines (`urls`) may be any."""
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
    """Longest prompt + completion; 0: the model's own limit, or in the embedded engine what
    kv_cache_bytes holds if that is less. Models with `dynamic` or `longrope` positions need it."""
    python: str = ""
    """SGLang: the interpreter of the environment that it is installed in."""
    model: str = ""
    """SGLang: directory or Hugging Face name that it loads; empty: policy.model. The architecture
    counts: it serves nothing before it has the trainer's weights."""
    tensor_parallel_size: int = 1
    """SGLang: ranks of one engine, one device each."""
    server_args: list[str] = field(default_factory=list)
    """SGLang: further flags, as one would write them after `sglang.launch_server`."""
    device_ids: list[str] = field(default_factory=list)
    """Cards of each engine, for instance ["4,5", "6,7"]. A number counts among the cards that the
    generator sees (its CUDA_VISIBLE_DEVICES, where that is set); `GPU-...` and `MIG-...` are taken
    as they are. Empty: SGLang servers get `tensor_parallel_size` cards each, in order, without the
    trainer's; other engines see what their generator sees."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further environment variables of engines; no secrets: the configuration is stored."""
    page_size: int = 16
    """Embedded engine: KV cache block, in tokens."""
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
    start_timeout_s: float = 600.0
    """From the start of an engine until it is ready for requests; a large model takes minutes."""
    control_timeout_s: float = 20.0
    """One control call, other than the collective ones."""
    max_restarts: int = 5
    """Restarts per engine slot within an hour of service; older ones no longer count. An engine
    that never served uses them up. One that ends with exit code 2 (its configuration) is not
    started again."""
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
            "tensor_parallel_size",
        )  # fmt: skip
        yield from not_negative(where, self, "context_length", "max_restarts", "port")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                yield f"{where}.urls: {url!r} must start with http:// or https://"
        places = Counter(_place(url) for url in self.urls)
        for url in self.urls:
            if places.pop(_place(url), 1) > 1:
                yield (
                    f"{where}.urls names {url!r} twice: two slots would drive one server, and each "
                    "would undo the other's weight updates"
                )
        if ":" not in self.kind and self.kind not in list(EngineKind):
            yield (
                f"{where}.kind must be embedded, sglang or package.module:attribute, "
                f"got {self.kind!r}"
            )
        if not self.urls:
            yield from self._start_problems(where)

    def _start_problems(self, where: str) -> Iterator[str]:
        if self.device_ids and len(self.device_ids) != self.num_engines:
            yield (
                f"{where}.device_ids must name the devices of each engine: {self.num_engines} "
                f"entries ({where}.num_engines), not {len(self.device_ids)}"
            )
        if self.kind == EngineKind.sglang:
            yield from self._sglang_problems(where)
        elif self.kind == EngineKind.embedded and self.tensor_parallel_size > 1:
            yield (
                f"{where}.tensor_parallel_size ({self.tensor_parallel_size}) needs {where}.kind: "
                "sglang; the embedded engine runs on one device"
            )

    def _sglang_problems(self, where: str) -> Iterator[str]:
        if not self.python:
            yield (
                f"{where}.python must name the interpreter of SGLang's environment (docs/sglang.md "
                f"tells how to make one), or {where}.urls the servers to attach to"
            )
        for argument in self.server_args:
            flag = argument.partition("=")[0]
            if flag in RESERVED_SERVER_ARGS:
                yield f"{where}.server_args: {flag} is set by other fields, or not supported"
        if self.environment.get(RAW_LOGPROBS, "0") != "0":
            yield (
                f"{where}.environment: {RAW_LOGPROBS} makes SGLang return log-probs of temperature "
                "1, whatever it samples at; the trainer needs those that it sampled with"
            )
        for devices in self.device_ids:
            if len(devices.split(",")) < self.tensor_parallel_size:
                yield (
                    f"{where}.device_ids: {devices!r} are fewer devices than "
                    f"{where}.tensor_parallel_size ({self.tensor_parallel_size})"
                )
