"""Messages of the trainer: its start, draws, acks, evaluations and end."""

from typing import ClassVar

from async_grpo.replay_api.base import Message, Ok
from async_grpo.replay_parts import EvalResult, GeneratedStats, LeasedGroup, RoleStatus


class StartTrainerReply(Message, frozen=True, kw_only=True, tag="StartTrainerReply"):
    """The new trainer's incarnation."""

    incarnation: int
    next_draw_number: int
    pipeline_depth: int
    """as the run has it now: a trainer before may have changed it"""


class StartTrainer(Message, frozen=True, kw_only=True, tag="StartTrainer"):
    """Become the run's trainer. Idempotent by instance; `TRAINER_ALIVE` while another lives."""

    reply: ClassVar[type[Message]] = StartTrainerReply
    restored_version: int
    """policy_version of the checkpoint it starts from; 0: the initial weights"""
    restored_incarnation: int = 0
    """incarnation of that checkpoint; 0: the initial weights"""


class TrainerHeartbeat(Message, frozen=True, kw_only=True, tag="TrainerHeartbeat"):
    """I live; any lease not listed here is released."""

    reply: ClassVar[type[Message]] = Ok
    incarnation: int
    draws: list[int]
    """draw numbers held or being asked for"""
    status: RoleStatus


class DrawReply(Message, frozen=True, kw_only=True, tag="DrawReply"):
    """Groups, or wishes, or neither (ask again)."""

    groups: list[LeasedGroup] = []
    generated: GeneratedStats = GeneratedStats()
    """since the draw before; without groups: until now, and told again with the next ones"""
    wishes: list[str] = []
    """engine ids that want the current weights; only when there are no groups"""


class Draw(Message, frozen=True, kw_only=True, tag="Draw"):
    """Lease `groups_per_step` groups. Long poll. Idempotent by (incarnation, draw_number)."""

    reply: ClassVar[type[Message]] = DrawReply
    incarnation: int
    draw_number: int
    train_version: int
    """policy_version that the step will start from"""
    wait_s: float


class FetchReply(Message, frozen=True, kw_only=True, tag="FetchReply"):
    """Bulk; the group's frames follow."""


class Fetch(Message, frozen=True, kw_only=True, tag="Fetch"):
    """Payload of one leased group; may be asked again until the ack."""

    reply: ClassVar[type[Message]] = FetchReply
    incarnation: int
    group_id: int
    attempt: int


class Ack(Message, frozen=True, kw_only=True, tag="Ack"):
    """Step `step` was applied: its groups are trained, policy_version is step + 1.

    Idempotent by (incarnation, step).
    """

    reply: ClassVar[type[Message]] = Ok
    incarnation: int
    step: int
    """the version that the step started from"""
    draw_number: int
    groups: list[tuple[int, int]]


class Settle(Message, frozen=True, kw_only=True, tag="Settle"):
    """The oldest kept checkpoint holds `policy_version`: no earlier step will be undone.

    Idempotent; a smaller version than before changes nothing.
    """

    reply: ClassVar[type[Message]] = Ok
    incarnation: int
    policy_version: int


class SetDepth(Message, frozen=True, kw_only=True, tag="SetDepth"):
    """Admission goes by this pipeline_depth from now on, through restarts of both sides.

    Idempotent: the depth that is in force already changes nothing. Groups under way stay.
    """

    reply: ClassVar[type[Message]] = Ok
    incarnation: int
    depth: int
    reason: str
    """for people"""


class EvaluationsReply(Message, frozen=True, kw_only=True, tag="EvaluationsReply"):
    """Results of finished evaluation rounds, oldest first."""

    results: list[EvalResult] = []


class WaitEvaluations(Message, frozen=True, kw_only=True, tag="WaitEvaluations"):
    """Long poll until more than `seen` evaluation rounds of the run have finished."""

    reply: ClassVar[type[Message]] = EvaluationsReply
    incarnation: int
    seen: int
    wait_s: float


class Finish(Message, frozen=True, kw_only=True, tag="Finish"):
    """The trainer is done: tell everyone to stop. Idempotent."""

    reply: ClassVar[type[Message]] = Ok
    incarnation: int
    reason: str
