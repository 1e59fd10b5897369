"""The policy alone: what the trainer checks at its start, with the figures."""

from collections.abc import Iterator

from async_grpo.doctor.report import Finding, fail, ok
from async_grpo.errors import ConfigError
from async_grpo.training.model import PolicyModel
from async_grpo.training.self_test import (
    head_gap,
    packing_leak,
    require_no_leak,
    require_plain_head,
)

_ADVICE = (
    "choose another model, or a version of transformers that knows it (constraints.txt lists the "
    "versions this was tested with)"
)


def check_model(model: PolicyModel, *, seed: int) -> Iterator[Finding]:
    """Packing leak and head."""
    try:
        leak = packing_leak(model, seed)
        require_no_leak(leak)
        figure = f"a packed sequence changes its neighbor by {leak:.2g}"
        yield ok("packing", figure, {"leak": leak})
    except ConfigError as error:
        yield fail("packing", str(error), _ADVICE)
    gap = head_gap(model, seed)
    try:
        require_plain_head(gap, model)
        figure = f"chunked log-probs and the model's logits differ by {gap:.2g} nats"
        yield ok("head", figure, {"gap": gap})
    except ConfigError as error:
        yield fail("head", str(error), _ADVICE, {"gap": gap})
