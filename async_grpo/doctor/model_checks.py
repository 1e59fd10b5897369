"""The policy alone: what the trainer checks at its start, with the figures."""

from collections.abc import Callable, Iterator

from async_grpo.doctor.report import Finding, fail, ok
from async_grpo.errors import ConfigError
from async_grpo.training.model import PolicyModel
from async_grpo.training.self_test import (
    head_gap,
    neighbor_gap,
    neighbor_tokens,
    packing_leak,
    repeat_gap,
    require_no_leak,
    require_no_neighbor,
    require_plain_head,
    require_repeatable,
)
from async_grpo.weights.model_facts import require_steady_positions

_ADVICE = (
    "choose another model, or a version of transformers that knows it (constraints.txt lists the "
    "versions this was tested with)"
)


def check_model(model: PolicyModel, *, seed: int, context_length: int) -> Iterator[Finding]:
    """Randomness, packing, positions and head.

    Args:
        model: in the mode that trains.
        seed: of the ids.
        context_length: longest sequence of the run; 0: the model's own limit.
    """
    gap = repeat_gap(model, seed)
    yield _finding(
        "repeatable",
        lambda: require_repeatable(gap, model),
        f"the same tokens scored twice differ by {gap:.2g} nats",
        gap,
    )
    yield _packing(model, seed)
    num_tokens = neighbor_tokens(model, context_length)
    neighbor = neighbor_gap(model, num_tokens, seed)

    def judge_neighbor() -> None:
        require_steady_positions(model.text_config, context_length)
        require_no_neighbor(neighbor, num_tokens, model)

    yield _finding(
        "neighbors",
        judge_neighbor,
        f"a sequence changes by {neighbor:.2g} nats a token beside one of {num_tokens} tokens",
        neighbor,
    )
    head = head_gap(model, seed)
    yield _finding(
        "head",
        lambda: require_plain_head(head, model),
        f"chunked log-probs and the model's logits differ by {head:.2g} nats",
        head,
    )


def _packing(model: PolicyModel, seed: int) -> Finding:
    try:
        leak = packing_leak(model, seed)
        require_no_leak(leak)
    except ConfigError as error:
        return fail("packing", str(error), _ADVICE)
    return ok("packing", f"a packed sequence changes its neighbor by {leak:.2g}", {"leak": leak})


def _finding(check: str, judge: Callable[[], None], figure: str, gap: float) -> Finding:
    try:
        judge()
    except ConfigError as error:
        return fail(check, str(error), _ADVICE, {"gap": gap})
    return ok(check, figure, {"gap": gap})
