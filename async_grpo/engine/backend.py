"""What the routes need of an engine: the seam between HTTP and the one that samples."""

from typing import Protocol

from async_grpo.engine.admission import Limits
from async_grpo.engine_api import (
    Checksums,
    DestroyGroupRequest,
    GenerateReply,
    GenerateRequest,
    InitGroupRequest,
    Load,
    ModelInfo,
    PauseMode,
    ServerInfo,
    UpdateFromDiskRequest,
    UpdateFromDistributedRequest,
    UpdateVersionRequest,
)


class EngineBackend(Protocol):
    """An engine behind the routes. Event-loop thread only.

    Every method may raise RequestRefused, which becomes the HTTP answer.
    """

    @property
    def limits(self) -> Limits:
        """What one request may ask for."""
        ...

    @property
    def paused(self) -> bool:
        """Decoding is stopped by /pause_generation."""
        ...

    @property
    def failure(self) -> str:
        """Why this engine will never decode again; empty while it can."""
        ...

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """One completion; cancelling the call aborts it."""
        ...

    async def abort(self, rid: str) -> None:
        """End one request; its `generate` returns the partial output. Unknown ids: nothing."""
        ...

    async def abort_all(self) -> None:
        """End all requests."""
        ...

    def model_info(self) -> ModelInfo:
        """Model and weight_version."""
        ...

    def server_info(self) -> ServerInfo:
        """Sizes."""
        ...

    def load(self) -> Load:
        """How busy it is; answers even while an update is stuck."""
        ...

    def metrics(self) -> str:
        """Prometheus text."""
        ...

    async def flush_cache(self) -> None:
        """Drop cached prefixes; refused while requests are unfinished."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; `mode` says what becomes of running requests."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    async def init_group(self, request: InitGroupRequest) -> None:
        """Join an update group; returns when all ranks have met."""
        ...

    async def destroy_group(self, request: DestroyGroupRequest) -> None:
        """Leave it."""
        ...

    async def begin_update(self) -> None:
        """Open an update session."""
        ...

    async def update(self, request: UpdateFromDistributedRequest) -> None:
        """Receive and load one bucket."""
        ...

    async def update_from_disk(self, request: UpdateFromDiskRequest) -> int:
        """Load a directory of safetensors; the number of requests that are paused."""
        ...

    async def update_version(self, request: UpdateVersionRequest) -> None:
        """Name the present weights anew."""
        ...

    async def end_update(self) -> None:
        """Close the session."""
        ...

    async def checksums(self) -> Checksums:
        """Of all weights and of each tensor, computed now."""
        ...
