"""The policy as it is and as it would be after an update: two sets of weights of one model.

Both are scored by the code that trains. The second differs in *every* tensor, so that an engine
that ignores one cannot agree. Holds two copies of the weights besides the model's own. Not
thread-safe; knows no engine.
"""

import math
from collections.abc import Iterator, Sequence
from enum import StrEnum

import torch
from torch import Tensor

from async_grpo.config.weights import ProbeLimits, WeightsSection
from async_grpo.replay_parts import ProbeIds
from async_grpo.training.model import PolicyModel
from async_grpo.training.scoring import sequence_logprobs
from async_grpo.training.weight_source import PolicyWeights

NOISE = 0.1
"""Perturbation of a tensor, relative to its root mean square. A tenth moves log-probs by far more
than bfloat16 rounds."""
_NOISE_OF_ZEROS = 0.02


class Which(StrEnum):
    """One of the two."""

    OWN = "own"
    """as `policy.model` stores them"""
    PERTURBED = "perturbed"


class TwoPolicies:
    """A policy and its perturbed twin.

    Args:
        model: its tensors are written to; `use(OWN)` restores them exactly.
        settings: section `weights`.
        seed: of the perturbation, and of the probe's ids.

    Attributes:
        source: of the weights that are in use, for a publisher. Its probe allows any difference:
            the checks judge it.
        probe_limits: what a run's probe would allow.
        noise: mean |log-prob difference| of the policy's own rounding, nats.
    """

    def __init__(self, model: PolicyModel, settings: WeightsSection, *, seed: int) -> None:
        self.model = model
        self.source = PolicyWeights(model, settings, seed=seed)
        self.probe_limits, self.noise = self.source.limits, self.source.noise
        self.source.limits = ProbeLimits(math.inf, math.inf)
        own = {name: tensor.detach().clone() for name, tensor in self.source.named_tensors()}
        self._weights = {Which.OWN: own, Which.PERTURBED: _perturbed(own, seed)}
        self._used = Which.OWN

    @property
    def names(self) -> list[str]:
        """Of the tensors that travel, in their order."""
        return list(self._weights[Which.OWN])

    @torch.no_grad()
    def use(self, which: Which) -> None:
        """Put these weights into the model."""
        if which is not self._used:
            for name, tensor in self.source.named_tensors():
                tensor.copy_(self._weights[which][name])
            self._used = which

    def probe(self, which: Which) -> ProbeIds:
        """Fixed ids and their log-probs under these weights, as a run asks for them first."""
        self.use(which)
        return self.source.probe().sets[0]

    def logprobs(
        self, which: Which, prompt: Sequence[int], token_ids: Sequence[int], temperature: float
    ) -> list[float]:
        """[len(token_ids)] log-probs of a completion, in nats."""
        self.use(which)
        scored, _ = sequence_logprobs(self.model, [*prompt, *token_ids], temperature=temperature)
        return scored[len(prompt) - 1 :].tolist()

    @torch.no_grad()
    def surprisal_moments(
        self, which: Which, prompt: Sequence[int], token_ids: Sequence[int], temperature: float
    ) -> tuple[float, float]:
        """Sums over a completion's positions: expected surprisal, and its variance.

        Of what the full distribution would sample there; in nats and nats squared.
        """
        self.use(which)
        ids = torch.tensor([[*prompt, *token_ids]], device=self.model.device)
        logits = self.model.module(input_ids=ids, use_cache=False).logits
        scaled = logits[0, len(prompt) - 1 : -1].to(self.model.accumulation_dtype) / temperature
        logprobs = scaled.log_softmax(-1)
        probabilities = logprobs.exp()
        # a probability that underflows to 0 contributes nothing, whatever its logarithm
        weighted = torch.where(probabilities > 0, probabilities * logprobs, 0.0)
        squares = torch.where(probabilities > 0, weighted * logprobs, 0.0)
        means = -weighted.sum(-1)
        return means.sum().item(), (squares.sum(-1) - means.square()).sum().item()

    def without_each(self, which: Which, probe: ProbeIds) -> Iterator[tuple[str, list[float]]]:
        """Log-probs of the probe if one tensor, each in turn, had not arrived.

        Yields:
            The tensor's name and [len(probe.logprobs)] log-probs.
        """
        other = Which.OWN if which is Which.PERTURBED else Which.PERTURBED
        self.use(which)
        for name, tensor in list(self.source.named_tensors()):
            with torch.no_grad():
                tensor.copy_(self._weights[other][name])
            scored, _ = sequence_logprobs(self.model, probe.token_ids)
            with torch.no_grad():
                tensor.copy_(self._weights[which][name])
            yield name, scored.tolist()


def _perturbed(own: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in own.items():
        if not tensor.is_floating_point():
            found[name] = tensor.clone()
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        size = tensor.float().square().mean().sqrt().item() * NOISE or _NOISE_OF_ZEROS
        found[name] = (tensor.float() + size * noise.to(tensor.device)).to(tensor.dtype)
    return found
