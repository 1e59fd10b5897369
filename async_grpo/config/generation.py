"""Section `generation`: sampling."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from async_grpo.config.ranges import not_negative, positive


class OnWeightUpdate(StrEnum):
    """What happens to requests in flight when new weights come."""

    auto = "auto"
    retract = "retract"
    in_place = "in_place"
    abort = "abort"


@dataclass(kw_only=True)
class GenerationSection:
    """Sampling. Training data needs the full distribution, so top_p, top_k and min_p are fixed."""

    group_size: int = 8
    """Completions per prompt."""
    max_new_tokens: int = 256
    """Budget of one completion."""
    temperature: float = 1.0
    """Sampling temperature; the trainer scores with the same one."""
    on_weight_update: OnWeightUpdate = OnWeightUpdate.auto
    """What happens to requests in flight when new weights come; none is lost. retract: their KV is
    computed afresh under the new weights. in_place: they keep it, and what follows is marked
    kv_mixed. abort: they are sent again, with the tokens so far. auto: retract, unless that was
    measured to cost more than 5 % of the time between updates and in_place is known to be safe."""
    max_running_groups: int = 0
    """Groups that one generator works on at a time; 0: as many as fill its engines' slots."""
    group_timeout_s: float = 600.0
    """From claim to first insert attempt; past it the ticket is reissued, and what was sampled is
    lost: allow for the longest completion and for a wait in the queue."""
    request_timeout_s: float = 300.0
    """One request to an engine. Past it the request is aborted; what it has sampled is kept, and
    another request, perhaps on another engine, goes on from there until the group's deadline."""

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        yield from positive(
            where, self, "group_size", "max_new_tokens", "temperature", "group_timeout_s",
            "request_timeout_s",
        )  # fmt: skip
        yield from not_negative(where, self, "max_running_groups")
