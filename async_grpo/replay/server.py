"""The replay server's loop: sockets on one side, the replay core on the other.

One message at a time: let the core decide, write its records to the ledger, then answer. A request
that cannot be answered yet is parked and tried again after every change. An exception in here is
our own bug and ends the process: the supervisor restarts it, and everything but payloads comes back
from the ledger. Knows what frames weigh and whether they are sane, never what they mean.
"""

import logging
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from async_grpo.config.load import agreement_digest
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.errors import AsyncGrpoError, CodecError
from async_grpo.interfaces import Clock
from async_grpo.replay.core.core import ReplayCore
from async_grpo.replay.core.events import Effects, Joined, Received, Tick
from async_grpo.replay.core.records import Record, decode_record, encode_record
from async_grpo.replay.core.settings import CoreSettings
from async_grpo.replay.sessions import Sessions, refuse, wait_s
from async_grpo.replay.snapshots import EVERY_RECORDS, Snapshots
from async_grpo.replay.store import Ledger, PayloadStore
from async_grpo.replay_api.base import Error, ErrorCode, Message
from async_grpo.replay_api.generator import Insert, InsertReply
from async_grpo.replay_api.peers import Hello, HelloReply, Leave
from async_grpo.replay_api.protocol import Request
from async_grpo.replay_api.trainer import Fetch, FetchReply
from async_grpo.transport.codec import GroupLimits, inspect_group
from async_grpo.transport.group_header import Frame
from async_grpo.transport.rpc import Incoming, RpcServer
from async_grpo.types import InsertOutcome

logger = logging.getLogger(__name__)

TICK_S = 0.2
"""How late a lost heartbeat or a deadline may take effect."""
_LONGEST_WAIT_S = 60.0
_LINGER_S = 1.0
_MAX_ROUNDS = 10_000
_LONGEST_RUN_NAME = 24
"""Characters of the run directory's name in a run's token."""


@dataclass(slots=True)
class _Asked:
    """A request whose answer is due at `deadline` (clock seconds)."""

    incoming: Incoming
    instance: str
    request: Request
    deadline: float


class ReplayServer:
    """One run's replay server. `serve` on one event loop, then `close`."""

    def __init__(self, config: Config, *, clock: Clock = time.monotonic) -> None:
        """Take the ledger, restore what it says, listen.

        Raises:
            ConfigError: the address cannot be bound.
            AsyncGrpoError: the ledger is in use or is not one.
        """
        self._clock = clock
        self._peer_timeout_s = config.replay.peer_timeout_s
        self._limits = GroupLimits(
            max_bytes=config.replay.max_group_bytes,
            max_completions=config.generation.group_size,
            max_tokens=config.generation.max_new_tokens,
        )
        self._sessions = Sessions(agreement_digest(config))
        self._new_token = _new_token(Path(config.run.output_dir))
        self._store = PayloadStore()
        self._parked: list[_Asked] = []
        self._next_tick = clock()
        self._finished_at: float | None = None
        self._stop_reason = ""
        with ExitStack() as undo:
            directory = RunDirectory(Path(config.run.output_dir))
            self._ledger = Ledger(directory.ledger)
            undo.callback(self._ledger.close)
            settings = CoreSettings.from_config(config)
            self._snapshots = Snapshots(directory.ledger_snapshot, settings)
            self._core = self._restored(settings, directory.ledger)
            limit = config.replay.max_group_bytes
            self._rpc = RpcServer(config.replay.address, max_frame_bytes=limit)
            undo.pop_all()
        logger.info(
            "listening at %s; %d ledger records restored, the first %d of them from a snapshot",
            self.address, self._num_records, self._num_saved,
        )  # fmt: skip

    def _restored(self, settings: CoreSettings, path: Path) -> ReplayCore:
        """The core of the ledger: from its newest snapshot, and the records after that."""
        beginning = self._snapshots.load(self._ledger)
        state, offset = None, 0
        self._num_records = self._num_saved = 0
        if beginning is not None:
            state, offset = beginning.state, beginning.offset
            self._num_records = self._num_saved = beginning.num_records
        return ReplayCore.restore(settings, self._read(path, offset), self._clock(), state=state)

    def _read(self, path: Path, offset: int) -> Iterator[Record]:
        """Records of the ledger after byte `offset`."""
        for line in self._ledger.lines(offset):
            self._num_records += 1
            try:
                yield decode_record(line)
            except msgspec.MsgspecError as error:
                raise AsyncGrpoError(
                    f"{path}, line {self._num_records} is not a ledger record: {error}"
                ) from error

    @property
    def address(self) -> str:
        """Where it listens, with the port that the system chose."""
        return self._rpc.address

    @property
    def payload_bytes(self) -> int:
        """Bytes of payloads held now."""
        return self._store.num_bytes

    def stop(self, reason: str) -> None:
        """Let `serve` return within a tick. Event-loop thread or signal handler."""
        self._stop_reason = reason

    def close(self) -> None:
        """Send what is on its way, give up address and ledger."""
        self._rpc.close(linger_s=_LINGER_S)
        self._ledger.close()

    async def serve(self) -> None:
        """Until `stop`, or until a finished run's peers have left (at most peer_timeout_s)."""
        while not self._is_over():
            for incoming in await self._rpc.receive(self._idle_s()):
                self._handle(incoming)
            now = self._clock()
            self._answer_overdue(now)
            if now >= self._next_tick:
                self._next_tick = now + TICK_S
                self._settle(self._core.apply(Tick(), now), now)
        logger.info("stopped: %s", self._stop_reason)

    def _is_over(self) -> bool:
        if not self._core.over:
            self._finished_at = None
        elif self._finished_at is None:
            self._finished_at = self._clock()
        elif not self._stop_reason:
            if self._sessions.everyone_left():
                self._stop_reason = "the run is finished and everyone has left"
            elif self._clock() - self._finished_at > self._peer_timeout_s:
                self._stop_reason = "the run is finished; peers that have not left are given up"
        return bool(self._stop_reason)

    def _idle_s(self) -> float:
        """Until the next tick or the next parked request's deadline."""
        due = min((asked.deadline for asked in self._parked), default=self._next_tick)
        return max(0.0, min(due, self._next_tick) - self._clock())

    def _handle(self, incoming: Incoming) -> None:
        now = self._clock()
        request = incoming.request
        if isinstance(request, Hello):
            self._hello(incoming, request, now)
            return
        session = self._sessions.of(incoming.peer)
        if session is None:
            error = Error(code=ErrorCode.HELLO_REQUIRED, message="say hello first")
            self._rpc.reply(incoming, error)
            return
        if (refusal := refuse(session, request, self._limits.max_bytes)) is not None:
            self._rpc.reply(incoming, refusal)
            return
        if isinstance(request, Insert):
            request = self._inspected(request, incoming.payload)
        deadline = now + min(max(wait_s(request), 0.0), _LONGEST_WAIT_S)
        asked = _Asked(incoming, session.instance, request, deadline)
        self._forget_repeated(asked)
        if self._ask(asked, now):
            self._retry_parked(now)

    def _hello(self, incoming: Incoming, hello: Hello, now: float) -> None:
        """Join the peer, unless it was started from other code, configuration or data."""
        refusal = self._sessions.refuse_hello(hello)
        if refusal is not None:
            logger.warning("refused %s %s: %s", hello.role, hello.name, refusal.message)
            self._rpc.reply(incoming, refusal)
            return
        joined = Joined(
            hello.instance, hello.role, hello.name, hello.dataset, new_token=self._new_token
        )
        effects = self._core.apply(joined, now)
        assert effects.reply is not None, "a hello is answered at once"
        if isinstance(effects.reply, HelloReply):
            for instance in self._sessions.open(incoming.peer, hello):
                self._drop_parked(instance)
            logger.info("%s %s said hello (%s)", hello.role, hello.name, hello.instance)
        self._commit(effects)
        self._rpc.reply(incoming, effects.reply)
        if effects.changed:
            self._retry_parked(now)

    def _inspected(self, request: Insert, payload: list[Frame]) -> Insert:
        """The insert with what its frames say, or with why they were refused."""
        try:
            summary = inspect_group(payload, self._limits)
            if (summary.group_id, summary.attempt) != (request.group_id, request.attempt):
                raise CodecError(
                    f"payload of group {summary.group_id}, attempt {summary.attempt}, in the "
                    f"insert of group {request.group_id}, attempt {request.attempt}"
                )
        except CodecError as error:
            return msgspec.structs.replace(request, invalid=str(error)[:500])
        return msgspec.structs.replace(request, summary=summary)

    def _ask(self, asked: _Asked, now: float) -> bool:
        """Let the core decide; answer or park. Returns whether parked ones are worth a retry."""
        effects = self._core.apply(Received(asked.instance, asked.request), now)
        self._commit(effects)
        if effects.reply is None:
            self._parked.append(asked)
        else:
            self._answer(asked, effects.reply)
        return effects.changed

    def _commit(self, effects: Effects) -> None:
        """What must be true before anyone hears of it."""
        if effects.records:
            self._ledger.append(encode_record(record) for record in effects.records)
            self._num_records += len(effects.records)
            if self._num_records - self._num_saved >= EVERY_RECORDS:
                # the core decides one event at a time: its state is that of the ledger
                self._snapshots.save(self._core.state, self._ledger, self._num_records)
                self._num_saved = self._num_records
        self._store.forget(effects.freed)

    def _settle(self, effects: Effects, now: float) -> None:
        self._commit(effects)
        for name in effects.silent:
            logger.warning(
                "%s has not been heard of for %g s (replay.peer_timeout_s): what it held is free",
                name, self._peer_timeout_s,
            )  # fmt: skip
        if effects.changed:
            self._retry_parked(now)

    def _answer(self, asked: _Asked, reply: Message) -> None:
        request = asked.request
        payload: list[Frame] = []
        if isinstance(request, Insert) and isinstance(reply, InsertReply):
            if reply.outcome is InsertOutcome.STORED:
                self._store.put((request.group_id, request.attempt), asked.incoming.payload)
        elif isinstance(request, Fetch) and isinstance(reply, FetchReply):
            held = self._store.get((request.group_id, request.attempt))
            if held is None:
                reply = Error(
                    code=ErrorCode.NOT_FOUND,
                    message=f"the payload of group {request.group_id}, attempt {request.attempt}, "
                    "was lost in a restart of the replay server",
                )
            else:
                payload = list(held)
        elif isinstance(request, Leave):
            self._sessions.end(asked.instance)
            self._drop_parked(asked.instance)
        if isinstance(reply, Error) and reply.code is ErrorCode.HELLO_REQUIRED:
            self._sessions.end(asked.instance)
        self._rpc.reply(asked.incoming, reply, payload)

    def _retry_parked(self, now: float) -> None:
        """Try parked requests again until nothing changes any more."""
        for _ in range(_MAX_ROUNDS):
            waiting, self._parked = self._parked, []
            changes = [self._ask(asked, now) for asked in waiting]
            if not any(changes):
                return
        raise AssertionError("the core reports a change for ever")

    def _answer_overdue(self, now: float) -> None:
        overdue = [asked for asked in self._parked if asked.deadline <= now]
        if overdue:
            self._parked = [asked for asked in self._parked if asked.deadline > now]
            for asked in overdue:
                self._answer(asked, self._core.empty_reply(asked.request, asked.instance))

    def _forget_repeated(self, asked: _Asked) -> None:
        """A request that is asked again replaces the try before it, which nobody waits for."""
        self._parked = [
            other
            for other in self._parked
            if other.instance != asked.instance or other.request != asked.request
        ]

    def _drop_parked(self, instance: str) -> None:
        self._parked = [other for other in self._parked if other.instance != instance]


def _new_token(directory: Path) -> str:
    """A name that no other run has, and that tells people which run it is."""
    name = re.sub(r"[^A-Za-z0-9_]+", "_", directory.resolve().name)[:_LONGEST_RUN_NAME]
    return f"{name}-{secrets.token_hex(4)}"
