"""A simulated trainer: draws, acks, publishes; dies of refusals, as the real one does."""

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

from async_grpo.replay_api.base import Error, ErrorCode, Ok
from async_grpo.replay_api.publishing import (
    AbortCell,
    Announce,
    AnnounceReply,
    OpenCell,
    WaitCell,
    WaitCellReply,
)
from async_grpo.replay_api.trainer import (
    Ack,
    Draw,
    DrawReply,
    Fetch,
    Finish,
    SetDepth,
    Settle,
    StartTrainer,
    StartTrainerReply,
    TrainerHeartbeat,
)
from async_grpo.replay_parts import (
    Cell,
    CellPhase,
    LeasedGroup,
    Probe,
    Rendezvous,
    Role,
)
from async_grpo.types import WeightsName
from tests.simulation.generator_process import HEARTBEAT_S, STATUS, UPDATE_TIMEOUT_S, WAIT_S, Steps
from tests.simulation.world import Process, World


def _by_version(name: WeightsName) -> tuple[int, int]:
    return name.policy_version, name.incarnation


class TrainerProcess(Process):
    """Draws, acks, publishes; starts from the newest or an earlier checkpoint."""

    role = Role.TRAINER

    def __init__(self, world: World, name: str, start_number: int) -> None:
        super().__init__(world, name, start_number)
        self.incarnation = 0
        self.version = 0
        self.draws: set[int] = set()
        self._publish_numbers = count(1)
        self._depths = random.Random(f"depths of {self.instance}, {world.schedule.seed}")
        self.start(self._main())

    def _main(self) -> Steps:
        reply = yield from self._start_from()
        self.incarnation = reply.incarnation
        self.spawn(self._heartbeats())
        yield from self._publish(wished_only=False)
        yield from self._train(count(reply.next_draw_number))

    def _start_from(self) -> Steps:
        """The newest checkpoint, an older one because it is damaged, or one that is no more."""
        world, rng = self.world, self.world.rng
        newest = (
            len(world.checkpoints) if rng.random() < 0.5 else rng.randint(1, len(world.checkpoints))
        )
        # an attempt to go on from an older one whose answer was lost makes this one's refusal fair
        choices = world.checkpoints[:newest][::-1]
        if world.discarded and rng.random() < 0.8:
            choices.insert(0, rng.choice(world.discarded[-3:]))
        while True:
            found = choices[0]
            reply = yield StartTrainer(
                restored_version=found.policy_version, restored_incarnation=found.incarnation
            )
            if isinstance(reply, StartTrainerReply):
                break
            assert isinstance(reply, Error), reply
            if reply.code is ErrorCode.NOT_FOUND and len(choices) > 1:
                choices.pop(0)
                continue
            assert reply.code is ErrorCode.TRAINER_ALIVE, reply
            yield 1.0
        self.version = found.policy_version
        known = {*world.checkpoints, found}
        world.checkpoints = sorted(
            (name for name in known if name.policy_version <= self.version), key=_by_version
        )
        world.discarded += sorted(known.difference(world.checkpoints))
        return reply

    def _checkpoint(self) -> Steps:
        """Write one, remove the oldest, then say which steps are final."""
        checkpoints, keep = self.world.checkpoints, self.world.schedule.num_kept
        checkpoints.append(WeightsName(self.incarnation, self.version))
        self.world.discarded += checkpoints[:-keep]
        del checkpoints[:-keep]
        if self.world.rng.random() < 0.5:
            yield self.world.rng.uniform(0.0, 0.5)
        oldest = checkpoints[0].policy_version
        yield from self._checked(Settle(incarnation=self.incarnation, policy_version=oldest))

    def _train(self, numbers: Iterator[int]) -> Steps:
        world, last = self.world, self.world.schedule.settings.num_train_steps
        prefetched = None
        number = 0
        while self.version < last:
            if prefetched is None:
                number = next(numbers)
                groups = yield from self._draw(number, self.version)
            else:
                number, groups = prefetched
                prefetched = None
            for group in groups:
                yield from self._fetch(group)
            yield world.rng.uniform(0.1, 0.8)
            if world.schedule.prefetch and self.version + 1 < last:
                prefetched = yield from self._prefetch(numbers)
                if prefetched is not None and world.rng.random() < 0.3:
                    self.draws.discard(prefetched[0])  # given up: the heartbeat releases it
                    prefetched = None
                    yield from self._beat()
            yield from self._ack(number, groups)
            if self.version % world.schedule.publish_every == 0 and self.version < last:
                yield from self._publish(wished_only=False)
        yield from self._checked(Finish(incarnation=self.incarnation, reason="all steps done"))
        self.exit("finished")

    def _checked(self, request: Any) -> Steps:
        """The reply; an error ends the process."""
        reply = yield request
        if isinstance(reply, Error):
            self.exit(f"{type(request).__name__} refused: {reply.message}")
            yield 0.0
        return reply

    def _draw(self, number: int, version: int) -> Steps:
        self.draws.add(number)
        while True:
            reply = yield from self._checked(self._draw_request(number, version))
            assert isinstance(reply, DrawReply), reply
            if reply.groups:
                return reply.groups
            if reply.wishes:
                yield from self._publish(wished_only=True)
                yield 0.5

    def _prefetch(self, numbers: Iterator[int]) -> Steps:
        """One try at the groups of the next step, while this one's are held."""
        number = next(numbers)
        self.draws.add(number)
        reply = yield from self._checked(self._draw_request(number, self.version + 1))
        if reply.groups:
            return number, reply.groups
        self.draws.discard(number)
        return None

    def _draw_request(self, number: int, version: int) -> Draw:
        return Draw(
            incarnation=self.incarnation, draw_number=number, train_version=version, wait_s=WAIT_S
        )

    def _fetch(self, group: LeasedGroup) -> Steps:
        """The payload; one that went with a restart costs the trainer its life."""
        yield from self._checked(
            Fetch(incarnation=self.incarnation, group_id=group.group_id, attempt=group.attempt)
        )

    def _ack(self, number: int, groups: list[LeasedGroup]) -> Steps:
        keys = [(group.group_id, group.attempt) for group in groups]
        world = self.world
        world.trained[self.version] = (self.incarnation, keys)
        yield from self._checked(
            Ack(incarnation=self.incarnation, step=self.version, draw_number=number, groups=keys)
        )
        self.draws.discard(number)
        self.version += 1
        yield from self._set_depth()
        if world.rng.random() < 0.5:
            yield from self._checkpoint()

    def _set_depth(self) -> Steps:
        """Now and then another pipeline_depth, sometimes the one in force."""
        settings, rng = self.world.schedule.settings, self._depths
        if rng.random() < 0.4:
            depth = rng.randint(settings.min_depth, settings.deepest)
            yield from self._checked(
                SetDepth(incarnation=self.incarnation, depth=depth, reason="for a change")
            )

    def _heartbeats(self) -> Steps:
        while True:
            yield from self._beat()
            yield HEARTBEAT_S

    def _beat(self) -> Steps:
        draws = sorted(self.draws)
        yield from self._checked(
            TrainerHeartbeat(incarnation=self.incarnation, draws=draws, status=STATUS)
        )

    def _publish(self, *, wished_only: bool) -> Steps:
        reply = yield from self._checked(
            Announce(
                incarnation=self.incarnation,
                number=next(self._publish_numbers),
                weights=WeightsName(self.incarnation, self.version),
                wished_only=wished_only,
                plan_hash="",
                buckets=[],
                probe=Probe(sets=[], tolerance=0.0, max_tolerance=0.0),
                digests={},
            )
        )
        assert isinstance(reply, AnnounceReply), reply
        for cell in reply.cells:
            yield from self._serve(reply.publish_sequence, cell)

    def _serve(self, sequence: int, cell: Cell) -> Steps:
        rendezvous = Rendezvous(
            group_name=f"{sequence}-{cell.cell_id}",
            host="",
            port=1,
            world_size=1 + len(cell.engines),
            backend="",
            fresh=True,
        )
        opened = yield OpenCell(
            incarnation=self.incarnation,
            publish_sequence=sequence,
            cell_id=cell.cell_id,
            rendezvous=rendezvous,
        )
        for phase in (CellPhase.BEGUN, CellPhase.COMMITTED):
            reached = isinstance(opened, Ok)
            if reached:
                reached = yield from self._wait_cell(sequence, cell, phase)
            if not reached:
                yield from self._checked(
                    AbortCell(
                        incarnation=self.incarnation,
                        publish_sequence=sequence,
                        cell_id=cell.cell_id,
                        reason=f"not {phase.value}",
                    )
                )
                return
            if phase is CellPhase.BEGUN:
                yield self.world.rng.uniform(0.05, 0.5)
                self.world.broadcast.add((sequence, cell.cell_id))

    def _wait_cell(self, sequence: int, cell: Cell, phase: CellPhase) -> Steps:
        """Whether every engine of the cell reached the phase in time."""
        deadline = self.world.now + UPDATE_TIMEOUT_S
        while self.world.now < deadline:
            reply = yield WaitCell(
                incarnation=self.incarnation,
                publish_sequence=sequence,
                cell_id=cell.cell_id,
                phase=phase,
                wait_s=2.0,
            )
            if not isinstance(reply, WaitCellReply):
                return False
            phases = set(reply.phases.values())
            if CellPhase.FAILED in phases:
                return False
            if phases <= {phase, CellPhase.COMMITTED}:
                return True
        return False
