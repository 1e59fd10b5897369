"""Checks of a model that catch what would otherwise train silently wrong.

Each costs two forwards of a few dozen tokens.
"""

import torch

from async_grpo.errors import ConfigError
from async_grpo.training.model import PolicyModel
from async_grpo.training.scoring import sequence_logprobs

LEAK_TOLERANCE = 1e-5
"""Largest change of hidden states, relative to the largest of them."""
HEAD_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05}
"""nats; largest difference between the chunked head and the model's own logits"""


def check_model(model: PolicyModel, *, seed: int = 0) -> None:
    """Run every check.

    Raises:
        ConfigError: this model, with this version of transformers, cannot be trained here.
    """
    require_no_leak(packing_leak(model, seed))
    require_plain_head(head_gap(model, seed), model)


def require_no_leak(leak: float) -> None:
    """Refuse a `packing_leak` above the tolerance.

    Raises:
        ConfigError: packed sequences see each other.
    """
    if not leak <= LEAK_TOLERANCE:  # a NaN fails
        raise ConfigError(
            f"policy.model: packed sequences see each other (hidden states change by {leak:.3g} of "
            "their largest); this model or version of transformers does not honor restarting "
            "position_ids"
        )


def require_plain_head(gap: float, model: PolicyModel) -> None:
    """Refuse a `head_gap` above the tolerance.

    Raises:
        ConfigError: the chunked head computes something else than the model's own.
    """
    if not gap <= HEAD_TOLERANCE[model.dtype]:
        raise ConfigError(
            f"policy.model: log-probs from hidden states differ from the model's logits by "
            f"{gap:.3g} nats; its head does more than a linear map, which is not supported"
        )


@torch.no_grad()
def packing_leak(model: PolicyModel, seed: int = 0) -> float:
    """How much the second of two sequences in one row changes when the first does.

    Returns:
        The largest change of its hidden states, relative to the largest hidden state.

    Raises:
        ConfigError: hidden states do not depend on the input at all.
    """
    first, second = _ids(model, 9, seed), _ids(model, 7, seed + 1)
    position_ids = torch.cat([torch.arange(9), torch.arange(7)])[None].to(model.device)
    changed = (first + 1) % model.vocab_size
    before, after = (
        model.hidden_states(torch.cat([head, second])[None], position_ids)
        for head in (first, changed)
    )
    if torch.equal(before[0, :9], after[0, :9]):
        raise ConfigError("policy.model: hidden states do not depend on the input")
    leak: float = (before[0, 9:] - after[0, 9:]).abs().max().item()
    scale: float = before.abs().max().item()
    return leak / scale


@torch.no_grad()
def head_gap(model: PolicyModel, seed: int = 0) -> float:
    """Largest difference (nats) between the chunked head and the model's own logits.

    Its cause would be a softcap, a scale or a bias.
    """
    ids = _ids(model, 12, seed + 2)
    ours, _ = sequence_logprobs(model, ids.tolist())
    output = model.module(input_ids=ids[None, :-1], use_cache=False)
    logits = output.logits[0].to(model.accumulation_dtype)
    theirs = logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
    gap: float = (ours - theirs).abs().max().item()
    return gap


def _ids(model: PolicyModel, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.vocab_size, (count,), generator=generator)
    return ids.to(model.device)
