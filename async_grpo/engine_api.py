"""The part of SGLang's HTTP API (0.5.23) that the engine, the generator and the fakes share.

Field names, defaults and status codes are SGLang's. Control calls answer
`{"success": bool, "message": str}` with 200 or 400. Requests ignore unknown top-level fields, as
the real server does; unknown sampling parameters are refused.
"""

from enum import StrEnum
from typing import Any

import msgspec

NOT_RECEIVED = "Failed to receive weights"
"""How an engine's answer begins when it left a broadcast early, or never entered it."""
FLATTENED_BUCKET = "flattened_bucket"
"""`load_format` of an update whose payload is one uint8 broadcast: every tensor contiguous and
flattened, in the order of `names`, without padding; each offset a multiple of its item size."""


SGLANG_RESERVE = 6
"""Tokens of its context that SGLang 0.5.23 leaves unused: a completion ends 2 tokens before the
context does, without a word, and a prompt ends 7 before. A completion that goes on behind a weight
update is a prompt, nearly as long as the whole."""


class Path(StrEnum):
    """Routes."""

    GENERATE = "/generate"
    MODEL_INFO = "/model_info"
    SERVER_INFO = "/server_info"
    READY = "/ready"
    HEALTH = "/health"
    FLUSH_CACHE = "/flush_cache"
    PAUSE = "/pause_generation"
    CONTINUE = "/continue_generation"
    ABORT = "/abort_request"
    INIT_GROUP = "/init_weights_update_group"
    DESTROY_GROUP = "/destroy_weights_update_group"
    BEGIN_UPDATE = "/begin_weight_update"
    UPDATE_FROM_DISTRIBUTED = "/update_weights_from_distributed"
    END_UPDATE = "/end_weight_update"
    WEIGHTS_CHECKER = "/weights_checker"
    UPDATE_FROM_DISK = "/update_weights_from_disk"
    UPDATE_VERSION = "/update_weight_version"
    LOADS = "/v1/loads"
    MODELS = "/v1/models"
    METRICS = "/metrics"


OPEN_PATHS = frozenset({Path.READY, Path.HEALTH, Path.METRICS})
"""Answered without a key."""
ADMIN_PATHS = frozenset(
    {
        Path.FLUSH_CACHE, Path.PAUSE, Path.CONTINUE, Path.ABORT, Path.INIT_GROUP,
        Path.DESTROY_GROUP, Path.BEGIN_UPDATE, Path.UPDATE_FROM_DISTRIBUTED, Path.END_UPDATE,
        Path.WEIGHTS_CHECKER, Path.UPDATE_FROM_DISK, Path.UPDATE_VERSION,
    }
)  # fmt: skip
"""Need the admin key where there is one, else the API key. The rest needs the API key."""


class PauseMode(StrEnum):
    """What happens to running requests; see `docs/architecture.md`."""

    ABORT = "abort"
    """they return now, with what they have sampled"""
    RETRACT = "retract"
    """their KV is freed, and computed afresh when decoding goes on"""
    IN_PLACE = "in_place"
    """they are frozen with their KV"""


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=False):
    """`sampling_params` of /generate. All are always sent: a server fills in what is left out."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = 1
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_new_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    skip_special_tokens: bool = True
    sampling_seed: int | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Body of /generate: one prompt, ids in and ids out."""

    input_ids: list[int]
    sampling_params: SamplingParams
    rid: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    """-1: outputs only; 0: the prompt too (`meta_info.input_token_logprobs`)"""
    extra_key: str | None = None
    """prefix-cache namespace: entries are shared only between requests with the same key"""
    stream: bool = False


class WeightVersionSpan(msgspec.Struct, kw_only=True):
    """Output positions [start, end) were sampled under `version`."""

    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct, kw_only=True):
    """`meta_info` of a reply. Only what we read; parse defensively: an abort may lack fields."""

    id: str = ""
    finish_reason: dict[str, Any] | None = None
    """{"type": "stop" | "length" | "abort", ...}"""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    input_token_logprobs: list[tuple[float | None, int, str | None]] = []
    """the first is [null, id, null]"""
    weight_version: str = ""
    weight_versions: list[WeightVersionSpan] = []
    num_retractions: int = 0
    e2e_latency: float = 0.0


class GenerateReply(msgspec.Struct, kw_only=True):
    """Reply of /generate."""

    text: str = ""
    output_ids: list[int] = []
    meta_info: MetaInfo


class ModelInfo(msgspec.Struct, kw_only=True):
    """Reply of /model_info."""

    model_path: str
    weight_version: str
    is_generation: bool = True
    model_type: str = ""
    architectures: list[str] | None = None


class ServerInfo(msgspec.Struct, kw_only=True):
    """Reply of /server_info; the real one has many more fields."""

    version: str
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    max_running_requests: int | None = None
    context_length: int | None = None
    dtype: str = "auto"
    disable_overlap_schedule: bool = True
    """SGLang's own default is false; the embedded engine, which does not compute ahead, says
    nothing"""
    enable_deterministic_inference: bool = False
    """requests without a seed then all have the same one"""
    host: str = ""
    port: int = 0
    random_seed: int | None = None
    """SGLang draws one at each start: with the port it tells one process from another"""
    instance: str = ""
    """ours only: a new one at each start"""
    engine: str = "sglang"
    """ours adds "embedded" here"""
    vocab_size: int | None = None
    """ours only; for a real server the model's config tells"""


class PauseRequest(msgspec.Struct, kw_only=True):
    """Body of /pause_generation."""

    mode: PauseMode = PauseMode.ABORT


class AbortRequest(msgspec.Struct, kw_only=True):
    """Body of /abort_request; an unknown rid is no error."""

    rid: str = ""
    abort_all: bool = False


class InitGroupRequest(msgspec.Struct, kw_only=True):
    """Body of /init_weights_update_group; blocks until all ranks have met."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyGroupRequest(msgspec.Struct, kw_only=True):
    """Body of /destroy_weights_update_group."""

    group_name: str = "weight_update_group"


class UpdateFromDistributedRequest(msgspec.Struct, kw_only=True):
    """Body of /update_weights_from_distributed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None
    """FLATTENED_BUCKET, or None: one broadcast per tensor, in order, in its declared dtype"""


class UpdateFromDiskRequest(msgspec.Struct, kw_only=True):
    """Body of /update_weights_from_disk; needs no session."""

    model_path: str
    """directory with safetensors files, as the engine's machine sees it"""
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


class UpdateFromDiskReply(msgspec.Struct, kw_only=True):
    """Reply of /update_weights_from_disk."""

    success: bool
    message: str = ""
    num_paused_requests: int = 0


class UpdateVersionRequest(msgspec.Struct, kw_only=True):
    """Body of /update_weight_version: another name for the present weights."""

    new_version: str
    abort_all_requests: bool = True
    """SGLang's default: a mere rename ends every request unless one says otherwise"""


class UpdateVersionReply(msgspec.Struct, kw_only=True):
    """Reply of /update_weight_version."""

    success: bool
    message: str = ""
    new_version: str = ""


class Load(msgspec.Struct, kw_only=True):
    """How busy one data-parallel rank is; the real one has more fields."""

    dp_rank: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float = 0.0
    """share of the KV cache that unfinished requests occupy"""
    max_total_num_tokens: int = 0
    """the KV cache, in tokens"""
    max_running_requests: int = 0
    gen_throughput: float = 0.0
    """tokens/s sampled of late"""


class LoadsReply(msgspec.Struct, kw_only=True):
    """Reply of /v1/loads?include=core."""

    loads: list[Load]


class ModelCard(msgspec.Struct, kw_only=True):
    """One entry of /v1/models."""

    max_model_len: int | None = None
    """context length in use; null for adapters"""


class ModelsReply(msgspec.Struct, kw_only=True):
    """Reply of /v1/models; the served model comes first."""

    data: list[ModelCard]


class ControlReply(msgspec.Struct, kw_only=True):
    """Reply of a control call."""

    success: bool
    message: str = ""


class WeightsCheckerRequest(msgspec.Struct, kw_only=True):
    """Body of /weights_checker."""

    action: str = "checksum"


class Checksums(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's weights are, for comparisons with engines and weights before."""

    total: str
    """over all weights"""
    tensors: dict[str, str]
    """by the server's own names, which fuse some of Hugging Face's; over all ranks. May be empty"""


class RankChecksums(msgspec.Struct, kw_only=True):
    """Of one rank of a server."""

    checksums: dict[str, str] = {}
    """by the server's own names of its tensors, which fuse some of Hugging Face's"""


class WeightsCheckerReply(msgspec.Struct, kw_only=True):
    """Reply of /weights_checker: compare `per_engine_checksum` between engines of one kind."""

    success: bool = True
    message: str = ""
    per_engine_checksum: str | None = None
    ranks: list[RankChecksums] = []
