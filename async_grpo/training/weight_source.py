"""The policy as the weight publisher sees it: named tensors and a probe."""

from collections.abc import Iterator

import torch
from torch import Tensor

from async_grpo.replay_parts import Probe
from async_grpo.training.model import LogprobRequest, PolicyModel

_PROBE_TOKENS = 24
"""Enough positions that wrong weights cannot agree by chance, cheap on every engine."""


class PolicyWeights:
    """A `WeightSource` over a transformers model."""

    def __init__(self, model: PolicyModel, *, seed: int, tolerance: float) -> None:
        self._model, self._tolerance = model, tolerance
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, model.vocab_size, (_PROBE_TOKENS,), generator=generator)
        self._token_ids: list[int] = ids.tolist()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor), a tied tensor under its first name only."""
        seen: set[int] = set()
        for name, tensor in self._model.module.state_dict().items():
            if tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
            yield name, tensor

    @torch.no_grad()
    def probe(self) -> Probe:
        """Fixed ids and the log-probs that the present weights give them, at temperature 1."""
        model, count = self._model, _PROBE_TOKENS - 1
        ids = torch.tensor(self._token_ids, device=model.device)
        positions = torch.arange(count, device=model.device)
        request = LogprobRequest(
            input_ids=ids[None, :-1],
            position_ids=positions[None],
            rows=positions,
            targets=ids[1:],
            temperature=torch.ones(count, dtype=model.accumulation_dtype, device=model.device),
        )
        logprobs, _ = model.logprobs(request)
        return Probe(
            token_ids=self._token_ids, logprobs=logprobs.tolist(), tolerance=self._tolerance
        )
