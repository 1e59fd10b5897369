"""Checks at start-up that catch what would otherwise train silently wrong.

Each costs two forwards of a few dozen tokens.
"""

import torch

from async_grpo.errors import ConfigError
from async_grpo.training.model import LogprobRequest, PolicyModel

_HEAD_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05}
"""nats; largest difference between the chunked head and the model's own logits"""


@torch.no_grad()
def check_model(model: PolicyModel, *, seed: int = 0) -> None:
    """Run every check.

    Raises:
        ConfigError: this model, with this version of transformers, cannot be trained here.
    """
    _check_packing(model, seed)
    _check_head(model, seed)


def _ids(model: PolicyModel, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.vocab_size, (count,), generator=generator)
    return ids.to(model.device)


def _check_packing(model: PolicyModel, seed: int) -> None:
    """Two sequences in one row: changing the first must not change the second."""
    first, second = _ids(model, 9, seed), _ids(model, 7, seed + 1)
    position_ids = torch.cat([torch.arange(9), torch.arange(7)])[None].to(model.device)
    changed = (first + 1) % model.vocab_size
    before, after = (
        model.hidden_states(torch.cat([head, second])[None], position_ids)
        for head in (first, changed)
    )
    leak = (before[0, 9:] - after[0, 9:]).abs().max().item()
    scale = before.abs().max().item()
    if leak > 1e-5 * scale:
        raise ConfigError(
            f"policy.model: packed sequences see each other (hidden states change by {leak:.3g}); "
            "this model or version of transformers does not honor restarting position_ids"
        )
    if torch.equal(before[0, :9], after[0, :9]):
        raise ConfigError("policy.model: hidden states do not depend on the input")


def _check_head(model: PolicyModel, seed: int) -> None:
    """The chunked head must agree with the model's own logits (no softcap, scale or bias)."""
    ids = _ids(model, 12, seed + 2)
    positions = torch.arange(11, device=model.device)
    request = LogprobRequest(
        input_ids=ids[None, :-1],
        position_ids=positions[None],
        rows=positions,
        targets=ids[1:],
        temperature=torch.ones(11, dtype=model.accumulation_dtype, device=model.device),
    )
    ours, _ = model.logprobs(request)
    output = model.module(input_ids=ids[None, :-1], use_cache=False)
    logits = output.logits[0].to(model.accumulation_dtype)
    theirs = logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
    difference = (ours - theirs).abs().max().item()
    if difference > _HEAD_TOLERANCE[model.dtype]:
        raise ConfigError(
            f"policy.model: log-probs from hidden states differ from the model's logits by "
            f"{difference:.3g} nats; its head does more than a linear map, which is not supported"
        )
