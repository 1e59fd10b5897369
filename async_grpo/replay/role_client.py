"""What every role's client of the replay server has in common: its two connections.

Every call may be slow, none may hang: a server that restarts costs a delay, a server that stays
away costs an RpcTimeout after `run.no_progress_timeout_s`. One event loop per client.
"""

import logging
import os
import uuid

from async_grpo.config.load import agreement_digest
from async_grpo.config.schema import Config
from async_grpo.errors import PeerError, RpcTimeout
from async_grpo.replay.link import Link
from async_grpo.replay_api.base import WIRE_VERSION, Ok
from async_grpo.replay_api.peers import Hello, HelloReply, Leave
from async_grpo.replay_parts import Dataset, Role
from async_grpo.transport.waiting import saying

logger = logging.getLogger(__name__)

_HEARTBEATS_PER_POLL = 5
_GOODBYE_S = 3.0


class RoleClient:
    """Two connections of one process: control, and bulk when it is first needed."""

    def __init__(self, config: Config, role: Role, name: str, dataset: Dataset | None) -> None:
        self._config = config
        self._role, self._name, self._dataset = role, name, dataset
        self._instance = f"{name}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._poll_s = config.replay.heartbeat_s * _HEARTBEATS_PER_POLL
        self._control = Link(config, self._hello(bulk=False))
        self._bulk_link: Link | None = None

    async def connect(self) -> HelloReply:
        """Say hello; waits for a server that is not there yet.

        Raises:
            VersionMismatch: code, configuration or data set differ from the server's.
            RpcTimeout: no server within `run.no_progress_timeout_s`.
        """
        self._control.open()
        logger.info("connecting to the %s", self._control.peer)
        timeout_s = self._config.run.no_progress_timeout_s
        try:
            with saying(f"the {self._control.peer}", timeout_s, "run.no_progress_timeout_s"):
                return await self._control.welcome()
        except RpcTimeout as error:
            advice = "start it with `async-grpo replay CONFIG`, or correct replay.address"
            raise RpcTimeout(error.peer, error.operation, timeout_s, advice=advice) from error

    async def leave(self, reason: str) -> None:
        """Say goodbye, so that others need not wait for this peer's heartbeat; best effort."""
        try:
            await self._control.ask(Leave(reason=reason[:500]), Ok, timeout_s=_GOODBYE_S)
        except PeerError as error:
            logger.warning("left without a goodbye: %s", error)

    async def close(self) -> None:
        """Drop the connections."""
        try:
            await self._control.close()
        finally:
            if self._bulk_link is not None:
                await self._bulk_link.close()

    def _bulk(self) -> Link:
        if self._bulk_link is None:
            self._bulk_link = Link(self._config, self._hello(bulk=True))
            self._bulk_link.open()
        return self._bulk_link

    def _hello(self, *, bulk: bool) -> Hello:
        return Hello(
            role=self._role,
            name=self._name,
            instance=self._instance,
            wire_version=WIRE_VERSION,
            config_digest=agreement_digest(self._config),
            bulk=bulk,
            dataset=self._dataset,
        )
