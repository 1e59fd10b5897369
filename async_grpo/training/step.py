"""The train step: drawn groups in, updated weights and facts about every trained token out.

Knows nothing of where groups come from or where weights go. The gradient is the same under
permuting groups, splitting into micro-batches and padding: losses are summed and divided once by
the batch's own denominator.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from async_grpo.algorithms.advantages import AdvantageScale, group_advantages
from async_grpo.algorithms.aggregation import Aggregation, denominator, sequence_token_weights
from async_grpo.algorithms.losses import PolicyLoss, policy_loss
from async_grpo.config.algorithm import AlgorithmSection
from async_grpo.config.trainer import TrainerSection
from async_grpo.errors import NumericsError
from async_grpo.training.batching import MicroBatch, TrainSequence, make_microbatches, sequences_of
from async_grpo.training.model import PolicyModel
from async_grpo.training.optimizer import PolicyOptimizer, learning_rate
from async_grpo.types import RolloutGroup


@dataclass(slots=True)
class TokenFacts:
    """What the step saw of each trained token, detached, in the batch's order; all [B]."""

    policy_logprobs: Tensor
    """by the weights that the token's update started from"""
    proximal_logprobs: Tensor
    behavior_logprobs: Tensor
    entropy: Tensor
    behavior_weight: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor
    reference_kl: Tensor | None


@dataclass(slots=True)
class StepOutcome:
    """One train step."""

    sequences: list[TrainSequence]
    tokens: TokenFacts
    losses: list[float] = field(default_factory=list)
    """of each optimizer update"""
    grad_norms: list[float] = field(default_factory=list)
    lr: float = 0.0


class TrainStep:
    """Applies train steps to one policy."""

    def __init__(
        self,
        policy: PolicyModel,
        algorithm: AlgorithmSection,
        trainer: TrainerSection,
        *,
        num_train_steps: int,
        reference: PolicyModel | None = None,
    ) -> None:
        if algorithm.kl_coef > 0 and reference is None:
            raise ValueError("kl_coef > 0 needs a reference policy")
        self._policy, self._reference = policy, reference
        self._algorithm, self._trainer = algorithm, trainer
        self._aggregation = Aggregation(algorithm.aggregation.value)
        self._num_updates = num_train_steps * trainer.updates_per_step
        parameters = (p for p in policy.module.parameters() if p.requires_grad)
        self._optimizer = PolicyOptimizer(parameters, trainer)

    def apply(self, groups: Sequence[RolloutGroup], train_version: int) -> StepOutcome:
        """One or more optimizer updates on `groups`.

        Args:
            groups: what one draw returned.
            train_version: version of the weights now; the step makes it train_version + 1.

        Raises:
            NumericsError: the loss or the gradient norm is not finite; nothing was applied.
            ValueError: no group has a token to train on.
        """
        sequences = sequences_of(groups, self._advantages(groups))
        facts = _empty_facts(self._policy, sequences, with_reference=self._reference is not None)
        outcome = StepOutcome(sequences=sequences, tokens=facts)
        updates = self._split(groups, sequences)
        if len(updates) > 1:
            self._proximal_pass(sequences, facts.proximal_logprobs)
        for number, part in enumerate(updates):
            update = train_version * self._trainer.updates_per_step + number
            outcome.lr = learning_rate(self._trainer, update, self._num_updates)
            loss = self._accumulate(part, facts, recomputed=len(updates) > 1)
            grad_norm = self._optimizer.clip()
            self._require_finite(loss, grad_norm, train_version, groups)
            self._optimizer.step(outcome.lr)
            outcome.losses.append(loss)
            outcome.grad_norms.append(grad_norm)
        self._optimizer.zero_grad()
        return outcome

    def _advantages(self, groups: Sequence[RolloutGroup]) -> list[list[float]]:
        scale = AdvantageScale(self._algorithm.advantage.value)
        found = []
        for group in groups:
            rewards = torch.tensor([r.reward for r in group.rollouts], dtype=torch.float64)
            values = group_advantages(rewards, scale=scale, eps=self._algorithm.advantage_eps)
            found.append(values.tolist())
        return found

    def _split(
        self, groups: Sequence[RolloutGroup], sequences: list[TrainSequence]
    ) -> list[list[TrainSequence]]:
        """Sequences of each optimizer update."""
        count = min(self._trainer.updates_per_step, len(groups))
        borders = [len(groups) * number // count for number in range(count + 1)]
        parts = [
            [s for s in sequences if low <= s.group < high]
            for low, high in itertools.pairwise(borders)
        ]
        if not sequences:
            raise ValueError("no group of the batch has a token to train on")
        return [part for part in parts if part]

    def _microbatches(self, sequences: list[TrainSequence]) -> list[MicroBatch]:
        return make_microbatches(
            sequences,
            sequence_token_weights(self._aggregation, [s.num_trained for s in sequences]),
            tokens_per_microbatch=self._trainer.tokens_per_microbatch,
            dtype=self._policy.accumulation_dtype,
            device=self._policy.device,
        )

    @torch.no_grad()
    def _proximal_pass(self, sequences: list[TrainSequence], into: Tensor) -> None:
        """Log-probs of all tokens under the weights that the train step starts from."""
        for batch in self._microbatches(sequences):
            into[batch.slots] = self._policy.logprobs(batch)[0]

    def _accumulate(
        self, sequences: list[TrainSequence], facts: TokenFacts, *, recomputed: bool
    ) -> float:
        """Gradients of one optimizer update; returns its loss.

        A sequence of advantage 0 has no gradient (without KL): it counts in the denominator and
        is scored for the metrics, but not differentiated.
        """
        self._optimizer.zero_grad()
        divisor = denominator(self._aggregation, [s.num_trained for s in sequences])
        total = torch.zeros((), dtype=torch.float64)
        pulling = [s for s in sequences if s.advantage != 0 or self._reference is not None]
        idle = [s for s in sequences if s.advantage == 0 and self._reference is None]
        if not pulling:
            self._optimizer.zero_fill()
        batches = [(True, batch) for batch in self._microbatches(pulling)]
        batches += [(False, batch) for batch in self._microbatches(idle)]
        for differentiate, batch in batches:
            slots = batch.slots
            with torch.set_grad_enabled(differentiate):
                logprobs, entropy = self._policy.logprobs(batch)
            if not recomputed:  # one update: the proximal policy is the policy itself
                facts.proximal_logprobs[slots] = logprobs.detach()
            result = self._loss(batch, logprobs, facts.proximal_logprobs[slots])
            loss = (result.per_token * batch.weights).sum() / divisor
            if differentiate:
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            total += loss.detach().double().cpu()
            _record(facts, batch, logprobs.detach(), entropy, result)
        return float(total)

    def _loss(self, batch: MicroBatch, logprobs: Tensor, proximal: Tensor) -> PolicyLoss:
        reference_logprobs = None
        if self._reference is not None:
            with torch.no_grad():
                reference_logprobs, _ = self._reference.logprobs(batch)
        algorithm = self._algorithm
        return policy_loss(
            logprobs,
            proximal,
            batch.behavior_logprobs,
            batch.advantages,
            reference_logprobs,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            behavior_weight_cap=algorithm.behavior_weight_cap,
            kl_coef=algorithm.kl_coef,
        )

    def _require_finite(
        self, loss: float, grad_norm: float, train_version: int, groups: Sequence[RolloutGroup]
    ) -> None:
        finite = torch.tensor([loss, grad_norm]).isfinite().all()
        if not finite:
            self._optimizer.zero_grad()
            names = ", ".join(f"{group.group_id}/{group.attempt}" for group in groups)
            raise NumericsError(
                f"train step from version {train_version}: loss {loss}, gradient norm {grad_norm}; "
                f"groups (id/attempt): {names}"
            )


def _empty_facts(
    policy: PolicyModel, sequences: list[TrainSequence], *, with_reference: bool
) -> TokenFacts:
    count = sum(sequence.num_trained for sequence in sequences)

    def zeros(dtype: torch.dtype = policy.accumulation_dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=policy.device)

    return TokenFacts(
        policy_logprobs=zeros(),
        proximal_logprobs=zeros(),
        behavior_logprobs=zeros(),
        entropy=zeros(),
        behavior_weight=zeros(),
        clipped_low=zeros(torch.bool),
        clipped_high=zeros(torch.bool),
        clipped_dual=zeros(torch.bool),
        reference_kl=zeros() if with_reference else None,
    )


def _record(
    facts: TokenFacts, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, result: PolicyLoss
) -> None:
    slots = batch.slots
    facts.policy_logprobs[slots] = logprobs
    facts.behavior_logprobs[slots] = batch.behavior_logprobs
    facts.entropy[slots] = entropy
    assert result.behavior_weight is not None
    facts.behavior_weight[slots] = result.behavior_weight
    facts.clipped_low[slots] = result.surrogate.clipped_low
    facts.clipped_high[slots] = result.surrogate.clipped_high
    facts.clipped_dual[slots] = result.surrogate.clipped_dual
    if facts.reference_kl is not None and result.reference_kl is not None:
        facts.reference_kl[slots] = result.reference_kl
