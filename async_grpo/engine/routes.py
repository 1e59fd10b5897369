"""SGLang's HTTP routes over any engine backend. Knows HTTP and JSON; nothing of models.

Status codes and bodies are SGLang's 0.5.23 (`engine_api`). A client that disconnects cancels its
handler, and with it the backend's `generate`.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from async_grpo.engine.admission import Limits, RequestRefused, parse_generate
from async_grpo.engine_api import (
    AbortRequest,
    ControlReply,
    DestroyGroupRequest,
    GenerateReply,
    GenerateRequest,
    InitGroupRequest,
    ModelInfo,
    Path,
    PauseMode,
    PauseRequest,
    ServerInfo,
    UpdateFromDistributedRequest,
    WeightsCheckerReply,
    WeightsCheckerRequest,
)

MAX_BODY_BYTES = 64 << 20

Body = TypeVar("Body")
Handler = Callable[[web.Request], Awaitable[web.Response]]


class EngineBackend(Protocol):
    """What the routes need of an engine. Event-loop thread only.

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

    async def flush_cache(self) -> None:
        """Drop cached prefixes; refused while requests are unfinished."""
        ...

    async def pause(self) -> None:
        """Stop decoding in place."""
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

    async def end_update(self) -> None:
        """Close the session."""
        ...

    async def checksum(self) -> str:
        """Hash over all weights, computed now."""
        ...


def make_app(backend: EngineBackend) -> web.Application:
    """The application that serves `backend`."""
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    inference = _InferenceRoutes(backend)
    control = _ControlRoutes(backend)
    routes: list[tuple[str, Path, Handler]] = [
        ("POST", Path.GENERATE, inference.generate),
        ("PUT", Path.GENERATE, inference.generate),
        ("POST", Path.ABORT, inference.abort),
        ("GET", Path.MODEL_INFO, inference.model_info),
        ("GET", Path.SERVER_INFO, inference.server_info),
        ("GET", Path.READY, inference.ready),
        ("GET", Path.HEALTH, inference.health),
        ("GET", Path.FLUSH_CACHE, control.flush_cache),
        ("POST", Path.FLUSH_CACHE, control.flush_cache),
        ("POST", Path.PAUSE, control.pause),
        ("POST", Path.CONTINUE, control.resume),
        ("POST", Path.INIT_GROUP, control.init_group),
        ("POST", Path.DESTROY_GROUP, control.destroy_group),
        ("POST", Path.BEGIN_UPDATE, control.begin_update),
        ("POST", Path.UPDATE_FROM_DISTRIBUTED, control.update),
        ("POST", Path.END_UPDATE, control.end_update),
        ("GET", Path.WEIGHTS_CHECKER, control.weights_checker),
        ("POST", Path.WEIGHTS_CHECKER, control.weights_checker),
    ]
    for method, path, handler in routes:
        app.router.add_route(method, path.value, handler)
    return app


class _InferenceRoutes:
    """Requests for completions and questions about the engine."""

    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend

    async def generate(self, http: web.Request) -> web.Response:
        try:
            request = parse_generate(await http.read(), self._backend.limits)
            reply = await self._backend.generate(request)
        except RequestRefused as refused:
            error = {"message": refused.message} if refused.nested else refused.message
            return _json({"error": error}, status=refused.status)
        return _json(reply)

    async def abort(self, http: web.Request) -> web.Response:
        try:
            request = await _parse(http, AbortRequest)
        except RequestRefused as refused:
            return _json({"error": {"message": refused.message}}, status=refused.status)
        if request.abort_all:
            await self._backend.abort_all()
        else:
            await self._backend.abort(request.rid)
        return web.Response(status=200)

    async def model_info(self, http: web.Request) -> web.Response:
        return _json(self._backend.model_info())

    async def server_info(self, http: web.Request) -> web.Response:
        return _json(self._backend.server_info())

    async def ready(self, http: web.Request) -> web.Response:
        if self._backend.failure or self._backend.paused:
            return web.Response(status=503, text=self._backend.failure or "paused")
        return web.Response(status=200)

    async def health(self, http: web.Request) -> web.Response:
        if self._backend.failure:
            return web.Response(status=503, text=self._backend.failure)
        return web.Response(status=200)


class _ControlRoutes:
    """Pausing and weight updates; answers are `{"success", "message"}` unless noted."""

    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend

    async def flush_cache(self, http: web.Request) -> web.Response:
        """Plain text."""
        try:
            await self._backend.flush_cache()
        except RequestRefused as refused:
            return web.Response(status=refused.status, text=f"{refused.message}\n")
        return web.Response(text="Cache flushed.\n")

    async def pause(self, http: web.Request) -> web.Response:
        """`{"status", "message"}`."""
        try:
            request = await _parse(http, PauseRequest)
            if request.mode is not PauseMode.IN_PLACE:
                raise RequestRefused(
                    f"pause mode {request.mode.value!r} is not supported yet; use 'in_place'"
                )
            await self._backend.pause()
        except RequestRefused as refused:
            return _json({"status": "error", "message": refused.message}, status=refused.status)
        return _json({"status": "ok", "message": "Generation paused."})

    async def resume(self, http: web.Request) -> web.Response:
        """`{"status", "message"}`."""
        try:
            await self._backend.resume()
        except RequestRefused as refused:
            return _json({"status": "error", "message": refused.message}, status=refused.status)
        return _json({"status": "ok", "message": "Generation continued."})

    async def init_group(self, http: web.Request) -> web.Response:
        return await _control(http, InitGroupRequest, self._backend.init_group)

    async def destroy_group(self, http: web.Request) -> web.Response:
        return await _control(http, DestroyGroupRequest, self._backend.destroy_group)

    async def begin_update(self, http: web.Request) -> web.Response:
        return await _control(http, dict, lambda _: self._backend.begin_update())

    async def update(self, http: web.Request) -> web.Response:
        return await _control(http, UpdateFromDistributedRequest, self._backend.update)

    async def end_update(self, http: web.Request) -> web.Response:
        return await _control(http, dict, lambda _: self._backend.end_update())

    async def weights_checker(self, http: web.Request) -> web.Response:
        try:
            if http.method == "GET":
                request = WeightsCheckerRequest(action=http.query.get("action", "checksum"))
            else:
                request = await _parse(http, WeightsCheckerRequest)
            if request.action != "checksum":
                raise RequestRefused(f"action {request.action!r} is not supported")
            reply = WeightsCheckerReply(per_engine_checksum=await self._backend.checksum())
        except RequestRefused as refused:
            reply = WeightsCheckerReply(success=False, message=refused.message)
            return _json(reply, status=refused.status)
        return _json(reply)


async def _control(
    http: web.Request, kind: type[Body], act: Callable[[Body], Awaitable[None]]
) -> web.Response:
    try:
        await act(await _parse(http, kind))
    except RequestRefused as refused:
        return _json(ControlReply(success=False, message=refused.message), status=refused.status)
    return _json(ControlReply(success=True, message="Succeeded."))


async def _parse(http: web.Request, kind: type[Body]) -> Body:
    """The body as `kind`; no body counts as an empty object."""
    body = await http.read()
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise RequestRefused(str(error)) from error


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )
