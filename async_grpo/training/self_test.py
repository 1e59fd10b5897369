"""Checks of a model that catch what would otherwise train silently wrong.

Each costs two forwards of a few dozen tokens; `neighbor_gap` may need one as long as a window.
"""

import torch

from async_grpo.errors import ConfigError
from async_grpo.training.model import LogprobRequest, PolicyModel
from async_grpo.training.scoring import sequence_logprobs
from async_grpo.weights.model_facts import sliding_window, unsteady_border

LEAK_TOLERANCE = 1e-5
"""Largest change of hidden states, relative to the largest of them."""
HEAD_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05}
"""nats; largest difference between the chunked head and the model's own logits"""
NEIGHBOR_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""nats a token; float64 models compute their positions in float32"""
_SHORT, _LONG, _LONGEST = 12, 48, 8192
"""Tokens: of the sequence that is scored, and of its neighbor at least and at most."""


def check_model(model: PolicyModel, *, seed: int = 0, context_length: int = 0) -> None:
    """Run every check.

    Args:
        model: in the mode that trains.
        seed: of the ids.
        context_length: longest sequence of the run; 0: the model's own limit.

    Raises:
        ConfigError: this model, with this version of transformers, cannot be trained here.
    """
    require_repeatable(repeat_gap(model, seed), model)
    require_no_leak(packing_leak(model, seed))
    num_tokens = neighbor_tokens(model, context_length)
    require_no_neighbor(neighbor_gap(model, num_tokens, seed), num_tokens, model)
    require_plain_head(head_gap(model, seed), model)


def require_repeatable(gap: float, model: PolicyModel) -> None:
    """Refuse a `repeat_gap`: on a CPU any, elsewhere one above rounding.

    Raises:
        ConfigError: the model draws random numbers.
    """
    limit = 0.0 if model.device.type == "cpu" else HEAD_TOLERANCE[model.dtype]
    if not gap <= limit:  # a NaN fails
        raise ConfigError(
            f"policy.model: the same tokens scored twice differ by {gap:.3g} nats: the model draws "
            "random numbers (dropout, noise of a router) or its weights are not finite; engines "
            "sample without"
        )


def require_no_neighbor(gap: float, num_tokens: int, model: PolicyModel) -> None:
    """Refuse a `neighbor_gap` above the tolerance.

    Raises:
        ConfigError: log-probs depend on what shares the micro-batch.
    """
    if not gap <= NEIGHBOR_TOLERANCE[model.dtype]:
        raise ConfigError(
            f"policy.model: log-probs of a sequence change by {gap:.3g} nats a token beside one of "
            f"{num_tokens} tokens in the same row; this model or version of transformers cannot "
            "score packed sequences"
        )


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
def repeat_gap(model: PolicyModel, seed: int = 0) -> float:
    """Largest difference (nats) between two scorings of the same tokens."""
    ids = _ids(model, _LONG, seed + 3).tolist()
    one, other = (sequence_logprobs(model, ids)[0] for _ in range(2))
    gap: float = (one - other).abs().max().item()
    return gap


def neighbor_tokens(model: PolicyModel, context_length: int) -> int:
    """Tokens of a neighbor that passes what the model's positions or attention depend on.

    That is the border of `unsteady_border` and the sliding window, if a sequence of the run can.
    """
    config = model.text_config
    most = min(context_length or int(config.get("max_position_embeddings") or _LONG), _LONGEST)
    border = unsteady_border(config)
    wanted = [sliding_window(config) + 1, 0 if border is None else border[1] + 1, _LONG]
    return max(tokens for tokens in wanted if tokens <= max(most, _LONG))


@torch.no_grad()
def neighbor_gap(model: PolicyModel, num_tokens: int, seed: int = 0) -> float:
    """Mean change (nats) of a short sequence's log-probs beside one of `num_tokens`, in one row."""
    short, long = _ids(model, _SHORT, seed + 4), _ids(model, num_tokens, seed + 5)
    alone, _ = sequence_logprobs(model, short.tolist())
    positions = torch.cat([torch.arange(num_tokens), torch.arange(_SHORT - 1)]).to(model.device)
    beside, _ = model.logprobs(
        LogprobRequest(
            input_ids=torch.cat([long, short[:-1]])[None],
            position_ids=positions[None],
            rows=torch.arange(num_tokens, len(positions), device=model.device),
            targets=short[1:],
            temperature=torch.ones_like(alone),
        )
    )
    gap: float = (alone - beside).abs().mean().item()
    return gap


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
