"""Keys of an engine's routes, as SGLang checks them: `Authorization: Bearer KEY`."""

import hmac

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from async_grpo.config.engine_keys import EngineKeys

_SCHEME = "Bearer "


def require_keys(keys: EngineKeys) -> Middleware:
    """A middleware that answers 401 to requests without the key of their path."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        wanted = keys.for_path(request.path)
        if wanted and not _matches(request.headers.get("Authorization", ""), wanted):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    return check


def _matches(header: str, wanted: str) -> bool:
    if not header.startswith(_SCHEME):
        return False
    given = header.removeprefix(_SCHEME).encode("utf-8", "surrogateescape")
    return hmac.compare_digest(given, wanted.encode())
