"""The `http` transport: trainer rank 0 serves the snapshot as safetensors, straight from memory.

The path begins with a secret that only announcements tell, since weights are not for everyone who
reaches the port.
"""

import logging
import secrets

from aiohttp import web
from yarl import URL

from async_grpo.errors import WeightSyncError
from async_grpo.replay_parts import Cell, WeightFiles
from async_grpo.weights.cells import Call, CellOrder
from async_grpo.weights.file_set import FileContent, file_set
from async_grpo.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 1.0
"""For downloads under way when the run ends."""


class HttpTransport:
    """Serves the newest prepared weights.

    Args:
        call: runs coroutines on the event loop that will serve.
        host: address that generators can reach.
        timeout_s: deadline for a bucket to be copied from the trainer.
    """

    def __init__(self, call: Call, host: str, timeout_s: float) -> None:
        self._call, self._host, self._timeout_s = call, host, timeout_s
        self._runner: web.AppRunner | None = None
        self._root = ""
        self._secret = secrets.token_urlsafe(16)
        self._served: tuple[Snapshot, WeightFiles] | None = None
        self._contents: dict[str, FileContent] = {}

    def prepare(self, snapshot: Snapshot) -> WeightFiles | None:
        """Hash them and serve them from now on, instead of the ones before.

        Raises:
            WeightSyncError: the port cannot be opened.
        """
        if self._served is not None and self._served[0] is snapshot:
            return self._served[1]
        contents = file_set(snapshot, self._timeout_s)
        name = str(snapshot.weights)
        try:
            self._call(self._start())
        except OSError as error:
            raise WeightSyncError(f"weights.host={self._host}", name, "listen", str(error)) from (
                error
            )
        files = WeightFiles(
            location=f"{self._root}/{self._secret}/{name}",
            files=[content.file for content in contents],
        )
        # one assignment: handlers on the event loop see all of it or nothing
        self._contents = {f"{name}/{content.file.name}": content for content in contents}
        self._served = (snapshot, files)
        return files

    def keep_only(self, cells: list[Cell]) -> None:
        """Nothing is kept for a cell."""

    def deliver(self, order: CellOrder, snapshot: Snapshot) -> None:
        """Nothing to do: the announcement named the files."""

    def failed(self, cell: Cell) -> None:
        """Nothing is kept for a cell."""

    def settled(self) -> None:
        """The newest stay, for late joiners."""

    def close(self) -> None:
        """Serve nothing more."""
        self._contents = {}
        if self._runner is not None:
            self._call(self._runner.cleanup())
            self._runner = None

    async def _start(self) -> None:
        if self._runner is not None:
            return
        app = web.Application()
        app.router.add_get(f"/{self._secret}/{{weights}}/{{file}}", self._file)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_TIMEOUT_S)
        await runner.setup()
        await web.TCPSite(runner, self._host, 0).start()
        self._runner = runner
        port = runner.addresses[0][1]
        self._root = str(URL.build(scheme="http", host=self._host, port=port))
        logger.info("serving weights at %s", self._root)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = f"{request.match_info['weights']}/{request.match_info['file']}"
        content = self._contents.get(name)
        if content is None:
            raise web.HTTPNotFound(text=f"{name} is not served (any more)")
        response = web.StreamResponse()
        response.content_length = content.file.num_bytes
        response.content_type = "application/octet-stream"
        await response.prepare(request)
        for chunk in content.chunks():
            await response.write(bytes(chunk))  # a copy: the next publish may overwrite the bucket
        await response.write_eof()
        return response
