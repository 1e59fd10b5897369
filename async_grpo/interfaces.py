"""Every seam between parts, on one page. Real parts and fakes pass the same contract suites.

Coroutines run on the caller's event loop. Every call has a deadline and raises a named error of
`errors` past it. No torch here; tensors appear in annotations only.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from async_grpo.engine_api import (
    Checksums,
    GenerateReply,
    GenerateRequest,
    InitGroupRequest,
    Load,
    ModelInfo,
    PauseMode,
    ServerInfo,
    UpdateFromDiskRequest,
    UpdateFromDistributedRequest,
)
from async_grpo.replay_api.generator import WatchReply
from async_grpo.replay_api.publishing import AnnounceReply, WaitCellReply
from async_grpo.replay_api.trainer import DrawReply, StartTrainerReply
from async_grpo.replay_parts import (
    BucketSpec,
    CellPhase,
    EndStats,
    EngineStatus,
    EvalResult,
    Probe,
    Rendezvous,
    RoleStatus,
    UpdateReport,
    WeightFiles,
)
from async_grpo.types import (
    DropReason,
    InsertOutcome,
    Prompt,
    RewardOutcome,
    RolloutGroup,
    Ticket,
    WeightsName,
)

if TYPE_CHECKING:
    import torch


class Clock(Protocol):
    """Monotonic seconds. Tests pass a fake; nothing decides by wall time."""

    def __call__(self) -> float:
        """Seconds since an arbitrary moment."""
        ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the generator needs."""

    bos_token_id: int | None
    eos_token_id: int | None
    adds_bos: bool
    """ids made with special tokens begin with `bos_token_id`"""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids; for rewards and people only, never tokenized again."""
        ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], **options: Any
    ) -> str | list[int]:
        """The conversation in the model's chat format."""
        ...


class Task(Protocol):
    """A source of prompts and the reward of their completions. Deterministic by index."""

    def __len__(self) -> int:
        """Number of prompts."""
        ...

    def fingerprint(self) -> str:
        """Changes whenever a prompt or an answer does."""
        ...

    def question(self, index: int) -> tuple[str, str, dict[str, Any]]:
        """(text, answer, metadata) of prompt `index`."""
        ...

    @property
    def reward(self) -> "Reward":
        """Importable at top level: it runs in another process."""
        ...


class Reward(Protocol):
    """Scores one completion's text. Pure; runs in a worker that may be killed."""

    def __call__(
        self, completion: str, answer: str, metadata: Mapping[str, Any]
    ) -> "float | Mapping[str, float] | None":
        """The reward; or named parts, which add up to it; None: no answer was found."""
        ...


class RewardPool(Protocol):
    """Scores texts in other processes."""

    last_error: str
    """Newest complaint about a reward, naming the prompt; empty: none so far."""

    async def score(
        self, completions: Sequence[str], prompt: Prompt
    ) -> list[tuple[RewardOutcome, float, dict[str, float]]]:
        """(outcome, reward, parts) of each completion; never raises for a bad completion."""
        ...

    async def close(self) -> None:
        """End the workers."""
        ...


class EngineClient(Protocol):
    """One inference server. Raises GenerationError; `timeout_s` is the deadline of each call."""

    url: str

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> GenerateReply:
        """One completion."""
        ...

    async def abort(self, rid: str) -> None:
        """End a request early; it then returns its partial output. Unknown ids are no error."""
        ...

    async def abort_all(self) -> None:
        """End every request early."""
        ...

    async def model_info(self) -> ModelInfo:
        """Model and weight_version."""
        ...

    async def ready(self) -> bool:
        """Whether it takes new requests: not while it starts or is paused."""
        ...

    async def server_info(self, *, timeout_s: float) -> ServerInfo:
        """Liveness and sizes; at most one question is open at a time."""
        ...

    async def fresh_server_info(self) -> ServerInfo:
        """The same over a connection of its own: behind a balancer each may reach another."""
        ...

    async def healthy(self) -> bool:
        """Whether it answers /health, as routers do too."""
        ...

    async def rename_weights(self, name: str) -> bool:
        """Call the present weights `name`, whatever runs; False: it has no such call."""
        ...

    async def context_length(self) -> int | None:
        """Longest prompt + completion, of a server whose /server_info does not tell; or None."""
        ...

    async def adopt(self, info: ServerInfo) -> None:
        """Be ready for its sizes; raises if its vocabulary is not the policy's."""
        ...

    async def load(self) -> Load:
        """How busy it is; answers even while it is stuck in an update."""
        ...

    async def flush_cache(self) -> None:
        """Drop cached prefixes; refused while requests hold KV."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding."""
        ...

    async def resume(self) -> None:
        """Go on decoding."""
        ...

    async def begin_update(self) -> None:
        """Open an update session."""
        ...

    async def end_update(self, *, missing_ok: bool = False) -> None:
        """Close it; `missing_ok`: no open session is no error."""
        ...

    async def init_group(self, request: InitGroupRequest, *, timeout_s: float) -> None:
        """Join an update group; returns when all ranks have met."""
        ...

    async def destroy_group(self, group_name: str) -> None:
        """Leave it; an unknown group is no error."""
        ...

    async def update_from_distributed(
        self, request: UpdateFromDistributedRequest, *, timeout_s: float
    ) -> None:
        """Receive one bucket."""
        ...

    async def update_from_disk(self, request: UpdateFromDiskRequest, *, timeout_s: float) -> None:
        """Load a directory of safetensors."""
        ...

    async def checksums(self) -> Checksums | None:
        """Of all weights and of each tensor; None: the server gives none."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


class UpdateReports(Protocol):
    """Who is told how far an engine has come in a weight update."""

    async def report_phase(
        self,
        publish_sequence: int,
        cell_id: int,
        engine_id: str,
        phase: CellPhase,
        detail: str,
        report: UpdateReport | None = None,
    ) -> None:
        """An engine reached a phase of an update."""
        ...


class GeneratorReplay(UpdateReports, Protocol):
    """The replay server as a generator uses it. Retries inside; raises PeerError at deadlines."""

    async def claim(self) -> Ticket | None:
        """A ticket, or None when none may be handed out within one long poll."""
        ...

    async def insert(self, group: RolloutGroup) -> InsertOutcome:
        """Deliver a group: waits for room, sends, returns the acknowledged outcome."""
        ...

    async def end(self, ticket: Ticket, reason: DropReason, detail: str, stats: EndStats) -> None:
        """The attempt ends without an insert."""
        ...

    async def evaluated(
        self, ticket: Ticket, stats: EndStats, weights_tokens: list[tuple[WeightsName, int]]
    ) -> None:
        """An eval ticket was sampled and scored."""
        ...

    async def watch(self, seen: int) -> WatchReply:
        """What changed since revision `seen`; at the latest after one long poll."""
        ...

    async def heartbeat(
        self,
        engines: list[EngineStatus],
        claims: list[tuple[int, int]],
        status: RoleStatus,
    ) -> None:
        """I live."""
        ...


class PublishReplay(Protocol):
    """Who brings the trainer's weights and the engines together."""

    async def announce(
        self,
        number: int,
        weights: WeightsName,
        *,
        wished_only: bool,
        plan_hash: str,
        buckets: list[BucketSpec],
        probe: Probe,
        digests: dict[str, int],
        files: WeightFiles | None = None,
    ) -> AnnounceReply:
        """Start a publish; freezes the cells. With `files`, each engine loads them for itself."""
        ...

    async def open_cell(self, publish_sequence: int, cell_id: int, rendezvous: Rendezvous) -> None:
        """Rank 0 listens for this cell."""
        ...

    async def wait_cell(
        self, publish_sequence: int, cell_id: int, phase: CellPhase, *, timeout_s: float
    ) -> WaitCellReply:
        """Phases once every engine is at `phase` or failed, or at the deadline."""
        ...

    async def abort_cell(self, publish_sequence: int, cell_id: int, reason: str) -> None:
        """Nothing more will be broadcast to this cell."""
        ...


class TrainerReplay(PublishReplay, Protocol):
    """The replay server as trainer rank 0 uses it."""

    async def start(
        self, restored_version: int, restored_incarnation: int = 0
    ) -> StartTrainerReply:
        """Become the run's trainer; waits for a silent predecessor, at most peer_timeout_s.

        Raises RemoteError `not_found` if the run cannot go on from that checkpoint.
        """
        ...

    async def draw(self, draw_number: int, train_version: int) -> DrawReply:
        """Groups, wishes, or neither after one long poll."""
        ...

    async def fetch(self, group_id: int, attempt: int) -> RolloutGroup:
        """Payload of a leased group."""
        ...

    async def ack(self, step: int, draw_number: int, groups: list[tuple[int, int]]) -> None:
        """The step was applied."""
        ...

    async def settle(self, policy_version: int) -> None:
        """The oldest kept checkpoint holds this version: no earlier step will be undone."""
        ...

    async def set_depth(self, depth: int, reason: str) -> None:
        """Admission goes by this pipeline_depth from now on."""
        ...

    async def evaluations(self, seen: int) -> list[EvalResult]:
        """Results of evaluation rounds beyond the first `seen`; maybe none after one long poll."""
        ...

    async def heartbeat(self, draws: list[int], status: RoleStatus) -> None:
        """I live; leases of other draws are released."""
        ...

    async def finish(self, reason: str) -> None:
        """The run is over: everyone stops."""
        ...


class WeightSource(Protocol):
    """The trainer's model as the publisher sees it."""

    def named_tensors(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """(Hugging Face name, tensor) in one fixed order; tied tensors once."""
        ...

    def probe(self) -> Probe:
        """Fixed ids and this model's log-probs of them."""
        ...
