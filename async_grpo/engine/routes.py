"""SGLang's HTTP routes over any engine backend. Knows HTTP and JSON; nothing of models.

Status codes and bodies are SGLang's 0.5.23 (`engine_api`). A client that disconnects cancels its
handler, and with it the backend's `generate`.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.engine.admission import RequestRefused, parse_generate
from async_grpo.engine.backend import EngineBackend
from async_grpo.engine.key_check import require_keys
from async_grpo.engine_api import (
    AbortRequest,
    ControlReply,
    DestroyGroupRequest,
    InitGroupRequest,
    LoadsReply,
    Path,
    PauseRequest,
    RankChecksums,
    UpdateFromDiskReply,
    UpdateFromDiskRequest,
    UpdateFromDistributedRequest,
    UpdateVersionReply,
    UpdateVersionRequest,
    WeightsCheckerReply,
    WeightsCheckerRequest,
)

MAX_BODY_BYTES = 64 << 20

Body = TypeVar("Body")
Handler = Callable[[web.Request], Awaitable[web.Response]]


def make_app(backend: EngineBackend, keys: EngineKeys) -> web.Application:
    """The application that serves `backend` to holders of `keys`."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[require_keys(keys)])
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
        ("GET", Path.LOADS, inference.loads),
        ("GET", Path.METRICS, inference.metrics),
        ("GET", Path.FLUSH_CACHE, control.flush_cache),
        ("POST", Path.FLUSH_CACHE, control.flush_cache),
        ("POST", Path.PAUSE, control.pause),
        ("POST", Path.CONTINUE, control.resume),
        ("POST", Path.INIT_GROUP, control.init_group),
        ("POST", Path.DESTROY_GROUP, control.destroy_group),
        ("POST", Path.BEGIN_UPDATE, control.begin_update),
        ("POST", Path.UPDATE_FROM_DISTRIBUTED, control.update),
        ("POST", Path.END_UPDATE, control.end_update),
        ("POST", Path.UPDATE_FROM_DISK, control.update_from_disk),
        ("POST", Path.UPDATE_VERSION, control.update_version),
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

    async def loads(self, http: web.Request) -> web.Response:
        """The core figures, whatever `include` asks for besides."""
        return _json(LoadsReply(loads=[self._backend.load()]))

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(text=self._backend.metrics(), content_type="text/plain")

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
            await self._backend.pause(request.mode)
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

    async def update_from_disk(self, http: web.Request) -> web.Response:
        """`{"success", "message", "num_paused_requests"}`."""
        try:
            request = await _parse(http, UpdateFromDiskRequest)
            num_paused = await self._backend.update_from_disk(request)
        except RequestRefused as refused:
            reply = UpdateFromDiskReply(success=False, message=refused.message)
            return _json(reply, status=refused.status)
        return _json(
            UpdateFromDiskReply(success=True, message="Succeeded.", num_paused_requests=num_paused)
        )

    async def update_version(self, http: web.Request) -> web.Response:
        """`{"success", "message", "new_version"}`."""
        try:
            request = await _parse(http, UpdateVersionRequest)
            await self._backend.update_version(request)
        except RequestRefused as refused:
            reply = UpdateVersionReply(success=False, message=refused.message)
            return _json(reply, status=refused.status)
        version = request.new_version
        return _json(
            UpdateVersionReply(
                success=True, message=f"Weight version updated to {version}", new_version=version
            )
        )

    async def weights_checker(self, http: web.Request) -> web.Response:
        try:
            if http.method == "GET":
                request = WeightsCheckerRequest(action=http.query.get("action", "checksum"))
            else:
                request = await _parse(http, WeightsCheckerRequest)
            if request.action != "checksum":
                raise RequestRefused(f"action {request.action!r} is not supported")
            found = await self._backend.checksums()
            reply = WeightsCheckerReply(
                per_engine_checksum=found.total, ranks=[RankChecksums(checksums=found.tensors)]
            )
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
