"""Log-probs of one token sequence by a policy, for checks. Knows no batch and no objective."""

from collections.abc import Sequence

import torch
from torch import Tensor

from async_grpo.training.model import LogprobRequest, PolicyModel


@torch.no_grad()
def sequence_logprobs(
    model: PolicyModel, token_ids: Sequence[int], *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """How likely each token is after those before it, by the code that trains.

    Args:
        model: the policy.
        token_ids: at least two.
        temperature: > 0; inside the softmax, as the sampler's is.

    Returns:
        log-probs and entropies [len(token_ids) - 1], of ids 1.., in nats, without gradient; of the
        model's accumulation dtype.
    """
    ids = torch.tensor(token_ids, device=model.device)
    positions = torch.arange(len(ids) - 1, device=model.device)
    request = LogprobRequest(
        input_ids=ids[None, :-1],
        position_ids=positions[None],
        rows=positions,
        targets=ids[1:],
        temperature=torch.full(
            (len(positions),), temperature, dtype=model.accumulation_dtype, device=model.device
        ),
    )
    logprobs, entropy = model.logprobs(request)
    return logprobs.detach(), entropy.detach()
