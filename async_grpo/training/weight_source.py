"""The policy as the weight publisher sees it: named tensors and a probe."""

from collections.abc import Iterator

import torch
from torch import Tensor

from async_grpo.replay_parts import Probe
from async_grpo.training.model import PolicyModel
from async_grpo.training.scoring import sequence_logprobs
from async_grpo.weights.tensor_list import travelling_tensors

_PROBE_TOKENS = 24
"""Enough positions that wrong weights cannot agree by chance, cheap on every engine."""


class PolicyWeights:
    """A `WeightSource` over a transformers model."""

    def __init__(self, model: PolicyModel, *, seed: int, tolerance: float) -> None:
        self._model, self._tolerance = model, tolerance
        self._tensors = travelling_tensors(model.module)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, model.vocab_size, (_PROBE_TOKENS,), generator=generator)
        self._token_ids: list[int] = ids.tolist()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name in a checkpoint, tensor that may be written to), a tied one by its first name."""
        yield from self._tensors.items()

    def probe(self) -> Probe:
        """Fixed ids and the log-probs that the present weights give them, at temperature 1."""
        logprobs, _ = sequence_logprobs(self._model, self._token_ids)
        return Probe(
            token_ids=self._token_ids, logprobs=logprobs.tolist(), tolerance=self._tolerance
        )
