"""A client that only reads the replay server's counters."""

import uuid

from async_grpo.config.schema import Config
from async_grpo.replay.role_client import RoleClient
from async_grpo.replay_api.peers import Stats, StatsReply
from async_grpo.replay_parts import Role


class MonitorClient(RoleClient):
    """Reads counters, for the supervisor and for people."""

    def __init__(self, config: Config, *, name: str = "") -> None:
        """`name` must differ from other monitors'; empty: one is made up."""
        super().__init__(config, Role.MONITOR, name or f"monitor-{uuid.uuid4().hex[:8]}", None)

    async def stats(self, *, timeout_s: float | None = None) -> StatsReply:
        """Counters and peers. Raises RpcTimeout after `timeout_s`."""
        return await self._control.ask(Stats(), StatsReply, timeout_s=timeout_s)
