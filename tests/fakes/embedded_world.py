"""A run whose every part is real, but for the size of the model and what it is trained on.

`GlooWorld` with embedded engines and the trainer's own probe.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from async_grpo.engine_api import GenerateRequest, SamplingParams
from async_grpo.interfaces import WeightSource
from async_grpo.training.model import PolicyModel
from async_grpo.training.weight_source import PolicyWeights
from async_grpo.types import RolloutGroup, WeightsName
from tests.contracts.engine.update_tools import reference_logprobs
from tests.fakes.embedded_engine import BUCKET_BYTES, embedded_engine, model_of
from tests.fakes.gloo_world import GlooWorld

PROMPT = [3, 4, 5, 6]


class EmbeddedWorld(GlooWorld):
    """Each version is another model; see `GlooWorld` for the rest."""

    def __init__(self, directory: Path, *, timeout_s: float = 30.0, **options: Any) -> None:
        super().__init__(directory, timeout_s=timeout_s, **options)
        self._build = partial(embedded_engine, directory, timeout_s=timeout_s)
        weights = replace(
            self._config.weights,
            bucket_bytes=BUCKET_BYTES,
        )
        self._config = replace(self._config, weights=weights)

    def _make_source(self, version: int) -> WeightSource:
        model = PolicyModel(model_of(version), chunk_tokens=64)
        return PolicyWeights(model, self._config.weights, seed=0)

    async def gap(self, slot: int, version: int) -> torch.Tensor:
        """[num_tokens] |log-prob that the engine samples with - transformers' of that version|."""
        request = GenerateRequest(
            input_ids=PROMPT,
            sampling_params=SamplingParams(max_new_tokens=8, temperature=1.0, ignore_eos=True),
            return_logprob=True,
        )
        reply = await self.engine(slot).client.generate(request, timeout_s=30.0)
        served = self.engine(slot).names.served(WeightsName(self.incarnation, version))
        assert reply.meta_info.weight_version == served
        found = torch.tensor([pair[0] for pair in reply.meta_info.output_token_logprobs])
        assert len(found) == 8
        return (found - reference_logprobs(model_of(version), PROMPT, reply.output_ids)).abs()

    def worst_gap(self, groups: Sequence[RolloutGroup]) -> float:
        """Largest |stored log-prob - transformers'| by the weights that a token names."""
        worst = 0.0
        for sequence in (s for g in groups for r in g.rollouts for s in r.sequences):
            ids, start = sequence.token_ids.tolist(), 0
            found = torch.tensor(sequence.behavior_logprobs)
            for segment in sequence.segments:
                assert segment.weights is not None
                assert not segment.kv_mixed
                model = model_of(segment.weights.policy_version)
                expected = reference_logprobs(model, sequence.prompt_token_ids.tolist(), ids)
                end = start + segment.num_tokens
                worst = max(worst, (found - expected)[start:end].abs().max().item())
                start = end
            assert start == len(ids)
        return worst
