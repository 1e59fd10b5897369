"""An engine that is real but for what it says: a real server behind it, some replies changed.

    async with LyingEngine(url_of_a_real_engine, null_logprob) as engine:
        ...                                   # engine.url is the address to use

Updates go through unchanged, the collective among them: the trainer meets the server behind.
"""

from collections.abc import Callable
from typing import Any, Self

import aiohttp
import msgspec
from aiohttp import web

from async_grpo.engine_api import Path

Reply = dict[str, Any]
Lie = Callable[[int, Reply], None]
"""Changes the reply of the n-th /generate, counted from 0."""


def null_logprob(_number: int, reply: Reply) -> None:
    """The last log-prob is not a number: null in JSON, as SGLang writes it."""
    if pairs := reply["meta_info"]["output_token_logprobs"]:
        pairs[-1][0] = None


def short_list(_number: int, reply: Reply) -> None:
    """One log-prob less than ids."""
    if pairs := reply["meta_info"]["output_token_logprobs"]:
        pairs.pop()


class LyingEngine:
    """Listens on loopback and passes every call on.

    Args:
        target: base URL of the real engine.
        lie: changes replies of /generate.

    Attributes:
        url: base URL while started.
        num_generated: /generate calls that were answered.
    """

    def __init__(self, target: str, lie: Lie) -> None:
        self.url = ""
        self.num_generated = 0
        self._target = target
        self._lie = lie
        self._session: aiohttp.ClientSession
        self._runner: web.AppRunner

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, http: web.Request) -> web.Response:
        body = await http.read()
        headers = {"Content-Type": http.content_type}
        target = self._target + http.path_qs
        try:
            async with self._session.request(
                http.method, target, data=body, headers=headers
            ) as response:
                answer = await response.read()
        except aiohttp.ClientError as error:
            raise web.HTTPBadGateway(text=str(error)) from error
        if http.path == Path.GENERATE and response.status == 200:
            answer = self._changed(answer)
        return web.Response(status=response.status, body=answer, content_type=response.content_type)

    def _changed(self, answer: bytes) -> bytes:
        reply: Reply = msgspec.json.decode(answer)
        self._lie(self.num_generated, reply)
        self.num_generated += 1
        return msgspec.json.encode(reply)
