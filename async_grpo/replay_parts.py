"""Parts that the messages of `replay_api` are made of; plain data, strictly decoded."""

from enum import StrEnum

import msgspec

from async_grpo.types import DropReason, ReissueReason, WeightsName


class Role(StrEnum):
    """Who is on the other end."""

    GENERATOR = "generator"
    TRAINER = "trainer"
    MONITOR = "monitor"


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all message parts."""


class Dataset(Struct, frozen=True, kw_only=True):
    """What every generator must agree on before it may claim."""

    fingerprint: str
    num_prompts: int


class EngineState(StrEnum):
    """Life of an engine as its generator sees it."""

    STARTING = "starting"
    SYNCING = "syncing"
    SERVING = "serving"
    PAUSED = "paused"
    QUARANTINED = "quarantined"
    DEAD = "dead"


class EngineStatus(Struct, frozen=True, kw_only=True):
    """One engine in a generator's heartbeat."""

    engine_id: str
    """unique over the run and over restarts: `{generator}/{slot}#{start}`"""
    state: EngineState
    tp_size: int = 1
    weights: WeightsName | None = None
    """the *committed* weights: version and probe confirmed; None before the first sync"""
    publish_sequence: int = 0
    """of the publish that brought them"""
    wants_sync: bool = False
    """ready to receive weights, and its weights are none or known to be wrong"""


class RoleStatus(Struct, frozen=True, kw_only=True):
    """What a role says of itself, for people; no decision is made from it."""

    state: str
    detail: str = ""
    last_error: str = ""
    step: int = 0
    metrics: dict[str, float] = {}
    seconds: dict[str, float] = {}
    """time accounting: state -> seconds so far; the sum is the role's wall time"""


class GroupSummary(Struct, frozen=True, kw_only=True):
    """What the server learns from a group's header without building the group."""

    group_id: int
    attempt: int
    num_bytes: int
    num_completions: int
    num_tokens: int
    reward_sum: float
    weights_tokens: list[tuple[WeightsName, int]]
    """sampled trainable tokens by the weights that sampled them, oldest first"""


class EndStats(Struct, frozen=True, kw_only=True):
    """Figures of a group that ends without an insert, so that no average forgets it."""

    num_completions: int = 0
    num_tokens: int = 0
    reward_sum: float = 0.0


class LeasedGroup(Struct, frozen=True, kw_only=True):
    """One group of a draw."""

    group_id: int
    attempt: int
    prompt_index: int
    num_bytes: int
    num_tokens: int
    oldest: WeightsName
    in_queue_s: float
    """seconds since it was stored"""
    keep_weight: float = 1.0
    """1 / P(not stale) of groups of its length, at most `staleness.keep_weight_cap`; 1: off"""


class GeneratedStats(Struct, frozen=True, kw_only=True):
    """What the generators finished since the previous draw; trained or not."""

    num_groups: int = 0
    """with figures: of a group whose reward or generation failed, only `dropped` tells"""
    num_completions: int = 0
    num_tokens: int = 0
    reward_sum: float = 0.0
    dropped: dict[DropReason, int] = {}
    dropped_completions: dict[DropReason, int] = {}
    dropped_tokens: dict[DropReason, int] = {}
    dropped_rewards: dict[DropReason, float] = {}
    """sums of the rewards of finished groups that were dropped"""
    reissued_tokens: dict[ReissueReason, int] = {}
    """of finished groups whose attempt ended, and whose ticket goes on"""


class EvalResult(Struct, frozen=True, kw_only=True):
    """What one evaluation round came to."""

    weights: WeightsName
    """live when the round was opened"""
    num_evaluated: int = 0
    """prompts"""
    num_failed: int = 0
    num_completions: int = 0
    num_tokens: int = 0
    reward_sum: float = 0.0
    weights_tokens: list[tuple[WeightsName, int]] = []
    """sampled tokens by the weights that sampled them: generation goes on through updates"""


class CellEngine(Struct, frozen=True, kw_only=True):
    """One engine of a cell and its ranks [rank_offset, rank_offset + tp_size) in the group."""

    engine_id: str
    generator: str
    tp_size: int
    rank_offset: int


class Rendezvous(Struct, frozen=True, kw_only=True):
    """Where the engines of a cell meet trainer rank 0."""

    group_name: str
    host: str
    port: int
    world_size: int
    backend: str
    fresh: bool
    """the group must be built; False: it exists from an earlier publish"""


class Cell(Struct, frozen=True, kw_only=True):
    """Engines that share one update group; frozen at the announcement."""

    cell_id: int
    engines: list[CellEngine]


class BucketSpec(Struct, frozen=True, kw_only=True):
    """One flattened uint8 broadcast: tensors in order, contiguous, concatenated."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class ProbeIds(Struct, frozen=True, kw_only=True):
    """Fixed ids and the trainer's own log-probs of them under the new weights (T = 1)."""

    token_ids: list[int]
    logprobs: list[float]
    """[len(token_ids) - 1] of ids 1.. given their prefix; those of a shorter prompt are a prefix"""


class Probe(Struct, frozen=True, kw_only=True):
    """What an engine must compute with the new weights before anything it samples is used."""

    sets: list[ProbeIds]
    """asked one after the other, until one agrees"""
    tolerance: float
    """largest mean |log-prob difference| over a set, nats"""
    max_tolerance: float
    """largest |log-prob difference| of one position, nats"""


class CellPhase(StrEnum):
    """How far one engine of a cell has come; the order is the protocol."""

    ANNOUNCED = "announced"
    BEGUN = "begun"
    COMMITTED = "committed"
    FAILED = "failed"

    def has_reached(self, phase: "CellPhase") -> bool:
        """Whether there is nothing to wait for: it is at `phase`, beyond it, or has failed."""
        order = list(CellPhase)
        return order.index(self) >= order.index(phase)


class WeightFile(Struct, frozen=True, kw_only=True):
    """One safetensors file."""

    name: str
    num_bytes: int
    sha256: str


class WeightFiles(Struct, frozen=True, kw_only=True):
    """One set of weights as files, where no update group carries them."""

    location: str
    """directory as engines and generators see it, or `http://...` below which trainer rank 0
    serves them"""
    files: list[WeightFile]


class UpdateReport(Struct, frozen=True, kw_only=True):
    """What an engine's update was like; for metrics and alarms, no decision is made from it."""

    checksum: str
    """over all weights, as the engine gives it: comparable between engines of one kind and size;
    empty: it gives none"""
    alarms: list[str] = []
    """what the checksums of single tensors show, where it fails no update"""
    probe_gap: float
    """mean |log-prob difference| (nats) between trainer and engine on the probe"""
    probe_gap_max: float
    """largest of them"""
    seconds: dict[str, float]
    """by part: `begin`, `go`, `receive`, `verify`, `probe`; their sum is about the pause that
    requests saw"""


class UpdateOrder(Struct, frozen=True, kw_only=True):
    """A weight update as one generator sees it: state that is pulled and repeated."""

    publish_sequence: int
    weights: WeightsName
    cell_id: int
    engine_ids: list[str]
    """this generator's engines of the cell"""
    ranks: list[int]
    """their rank offsets"""
    buckets: list[BucketSpec]
    probe: Probe
    digests: dict[str, int]
    """of the bytes of each tensor: equal iff the bytes are"""
    files: WeightFiles | None = None
    """load these, whenever the engine is ready; there is no `go` then"""
    rendezvous: Rendezvous | None = None
    go: bool = False
    """all engines of the cell have begun and the trainer is in the rendezvous: post the buckets"""
    aborted: str = ""
    """why nothing will be sent; end the session and go on with the weights you have"""
