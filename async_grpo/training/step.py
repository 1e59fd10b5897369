"""The train step: drawn groups in, updated weights and facts about every trained token out.

Knows nothing of where groups come from or where weights go. The gradient is the same under
permuting groups, splitting into micro-batches and padding: losses are summed and divided once by
the batch's own denominator, and what pools tokens over the batch sees all of it beforehand.
"""

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from async_grpo.algorithms.aggregation import Aggregation, denominator, sequence_token_weights
from async_grpo.algorithms.losses import PolicyLoss, TokenBatch, policy_loss, rejections
from async_grpo.algorithms.proximal import (
    Interpolation,
    interpolated_proximal,
    interpolation_weight,
)
from async_grpo.config.algorithm import AlgorithmSection, Denominator, Proximal
from async_grpo.config.objective import SURROGATE_KNOBS, needs_whole_batch
from async_grpo.config.objective_text import objective_line
from async_grpo.config.trainer import TrainerSection
from async_grpo.errors import ConfigError, NumericsError
from async_grpo.training.batching import MicroBatch, TrainSequence, make_microbatches, sequences_of
from async_grpo.training.model import PolicyModel
from async_grpo.training.objective import group_advantages, make_advantage, make_objective
from async_grpo.training.optimizer import PolicyOptimizer, learning_rate
from async_grpo.training.token_facts import BatchTokens, TokenFacts
from async_grpo.types import RolloutGroup
from async_grpo.weights.model_facts import unsteady_border

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepOutcome:
    """One train step."""

    sequences: list[TrainSequence]
    tokens: TokenFacts
    losses: list[float] = field(default_factory=list)
    """of each optimizer update"""
    grad_norms: list[float] = field(default_factory=list)
    lr: float = 0.0
    num_over_age: int = 0
    """tokens that were too old to be trained"""


@dataclass(slots=True)
class _Batch:
    """One train step's tokens while its updates are made."""

    tokens: BatchTokens
    facts: TokenFacts
    prescored: bool
    """the proximal log-probs are in `facts`, by a pass before the updates"""
    alpha: Tensor | None = None
    """[B] where the proximal policy is interpolated"""
    rejected: Mapping[str, Tensor] | None = None
    """masks [B], made before the updates"""


class TrainStep:
    """Applies train steps to one policy.

    Attributes:
        optimizer: of the policy's trainable parameters.
    """

    def __init__(
        self,
        policy: PolicyModel,
        algorithm: AlgorithmSection,
        trainer: TrainerSection,
        *,
        num_train_steps: int,
        reference: PolicyModel | None = None,
        max_staleness: int | None = None,
    ) -> None:
        """Prepare for train steps on `policy`.

        Args:
            policy: the one to train.
            algorithm: the objective.
            trainer: optimizer and packing.
            num_train_steps: of the run, for the learning rate's schedule.
            reference: the frozen policy of the KL term.
            max_staleness: train no token that is older than so many versions; None: whoever hands
                out groups has seen to that.

        Raises:
            ValueError: a KL term without a reference policy.
            ConfigError: an attribute of the user's cannot be resolved.
        """
        if algorithm.kl_coef > 0 and reference is None:
            raise ValueError("kl_coef > 0 needs a reference policy")
        self._policy, self._reference = policy, reference
        self._algorithm, self._trainer = algorithm, trainer
        self._objective, self._advantage = make_objective(algorithm), make_advantage(algorithm)
        logger.info("objective %s: %s", algorithm.preset, objective_line(algorithm))
        self._aggregation = Aggregation(algorithm.aggregation.value)
        self._max_staleness = max_staleness
        self._border = unsteady_border(policy.text_config)
        self._num_updates = num_train_steps * trainer.updates_per_step
        parameters = ((n, p) for n, p in policy.module.named_parameters() if p.requires_grad)
        self.optimizer = PolicyOptimizer(parameters, trainer)

    def apply(
        self,
        groups: Sequence[RolloutGroup],
        train_version: int,
        *,
        weights: Sequence[float] | None = None,
        lr_scale: float = 1.0,
    ) -> StepOutcome:
        """One or more optimizer updates on `groups`.

        Args:
            groups: what one draw returned.
            train_version: version of the weights now; the step makes it train_version + 1.
            weights: of each group's loss, scaled here to a mean of 1; None: all the same.
            lr_scale: factor of the scheduled learning rate.

        Raises:
            NumericsError: a reward, the loss or the gradient norm is not finite; the update was
                not applied.
            ConfigError: a sequence is longer than the model's positions are steady.
            ValueError: no group has a token to train on.
        """
        try:
            advantages = group_advantages(self._algorithm, self._advantage, groups)
        except NumericsError as error:
            raise NumericsError(_message(str(error), train_version, groups)) from error
        oldest = 0 if self._max_staleness is None else train_version - self._max_staleness
        sequences = sequences_of(groups, advantages, oldest_version=oldest, weights=weights)
        if not sequences:
            raise ValueError("no group of the batch has a token to train on")
        self._require_steady(sequences)
        updates = self._split(groups, sequences)
        batch = self._prepare(sequences, train_version, num_updates=len(updates))
        batch.facts.num_first_update = sum(s.num_trained for s in updates[0])
        outcome = StepOutcome(
            sequences=sequences,
            tokens=batch.facts,
            num_over_age=sum(
                count
                for group in groups
                for name, count in group.weights_tokens().items()
                if name.policy_version < oldest
            ),
        )
        for number, part in enumerate(updates):
            update = train_version * self._trainer.updates_per_step + number
            outcome.lr = lr_scale * learning_rate(self._trainer, update, self._num_updates)
            loss = self._accumulate(part, batch)
            grad_norm = self.optimizer.clip()
            self._require_finite(loss, grad_norm, train_version, groups)
            self.optimizer.step(outcome.lr)
            outcome.losses.append(loss)
            outcome.grad_norms.append(grad_norm)
        self.optimizer.zero_grad()
        return outcome

    def _require_steady(self, sequences: Sequence[TrainSequence]) -> None:
        """Refuse a sequence that would change the log-probs of those packed beside it."""
        longest = max(sequence.num_input_tokens for sequence in sequences)
        if self._border is not None and longest > self._border[1]:
            kind, tokens = self._border
            raise ConfigError(
                f"an engine made a sequence of {longest + 1} tokens, and beyond {tokens} the "
                f"{kind} positions of policy.model depend on what shares a forward pass; set "
                f"engine.context_length to at most {tokens}, and start attached engines with it"
            )

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
        return [part for part in parts if part]

    def _prepare(
        self, sequences: list[TrainSequence], train_version: int, *, num_updates: int
    ) -> _Batch:
        """Everything that must be known of the whole batch before the first update."""
        algorithm, how = self._algorithm, self._algorithm.proximal
        tokens = BatchTokens.of(sequences, self._policy)
        facts = TokenFacts.empty(
            self._policy,
            tokens,
            with_reference=self._reference is not None,
            weighted=self._objective.weight is not None,
        )
        pooled = needs_whole_batch(algorithm)
        prescored = how is Proximal.recompute or (
            how is Proximal.auto and (num_updates > 1 or pooled)
        )
        batch = _Batch(tokens, facts, prescored)
        if how is Proximal.interpolate:
            batch.alpha = interpolation_weight(
                tokens.versions, policy_version=train_version, proximal_version=train_version - 1
            )
        if prescored:
            self._proximal_pass(sequences, facts.proximal_logprobs)
            whole = TokenBatch(
                policy_logprobs=facts.proximal_logprobs,
                proximal_logprobs=facts.proximal_logprobs,
                behavior_logprobs=tokens.behavior_logprobs,
                advantages=tokens.advantages,
                sequences=tokens.sequences,
                truncated=tokens.truncated,
            )
            batch.rejected = rejections(whole, self._objective)
        return batch

    def _microbatches(
        self, sequences: list[TrainSequence], num_tokens: Sequence[int]
    ) -> Iterator[MicroBatch]:
        """Packed `sequences`, weighted by how many tokens of each count."""
        shares = sequence_token_weights(self._aggregation, num_tokens)
        return make_microbatches(
            sequences,
            [s.weight * share for s, share in zip(sequences, shares, strict=True)],
            tokens_per_microbatch=self._trainer.tokens_per_microbatch,
            dtype=self._policy.accumulation_dtype,
            device=self._policy.device,
        )

    @torch.no_grad()
    def _proximal_pass(self, sequences: list[TrainSequence], into: Tensor) -> None:
        """Log-probs of all tokens under the weights that the train step starts from."""
        for batch in self._microbatches(sequences, [s.num_trained for s in sequences]):
            into[batch.slots] = self._policy.logprobs(batch)[0]

    def _counted(self, sequences: list[TrainSequence], batch: _Batch) -> list[int]:
        """Tokens of each sequence that the denominator counts."""
        if self._algorithm.denominator is Denominator.original:
            return [s.num_trained for s in sequences]
        kept = torch.ones_like(batch.facts.kept)
        for mask in (batch.rejected or {}).values():
            kept &= ~mask
        per_sequence = [kept[s.first_slot : s.first_slot + s.num_trained] for s in sequences]
        return [int(mask.sum()) for mask in per_sequence]

    def _accumulate(self, sequences: list[TrainSequence], batch: _Batch) -> float:
        """Gradients of one optimizer update; returns its loss.

        A sequence of advantage 0 has no gradient (without KL or entropy bonus, by a built-in
        surrogate): it counts in the denominator and is scored for the metrics, but not
        differentiated. If rejection leaves no token to count, the loss is 0.
        """
        self.optimizer.zero_grad()
        counted = self._counted(sequences, batch)
        divisor = 1.0
        if any(counted):
            divisor = denominator(self._aggregation, counted, length=self._algorithm.length_limit)
        # read once, at the end: each reading waits for the device
        total = torch.zeros((), dtype=torch.float64, device=self._policy.device)
        pairs = list(zip(sequences, counted, strict=True))
        pulling = [pair for pair in pairs if self._pulls(pair[0])]
        idle = [pair for pair in pairs if not self._pulls(pair[0])]
        if not pulling:
            self.optimizer.zero_fill()
        for differentiate, part in ((True, pulling), (False, idle)):
            for micro in self._microbatches([s for s, _ in part], [n for _, n in part]):
                with torch.set_grad_enabled(differentiate):
                    logprobs, entropy = self._policy.logprobs(micro)
                result = self._loss(micro, logprobs, entropy, batch)
                loss = (result.per_token * micro.weights).sum() / divisor
                if differentiate:
                    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                total += loss.detach().double()
                batch.facts.record(micro, logprobs.detach(), entropy.detach(), result)
        return float(total)

    def _pulls(self, sequence: TrainSequence) -> bool:
        """Whether the sequence can have a gradient."""
        custom = self._algorithm.surrogate not in SURROGATE_KNOBS
        more = self._reference is not None or self._algorithm.entropy_coef > 0
        return sequence.advantage != 0 or more or custom

    def _loss(
        self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor, batch: _Batch
    ) -> PolicyLoss:
        slots, tokens, facts = micro.slots, batch.tokens, batch.facts
        if batch.alpha is not None:
            facts.proximal_logprobs[slots] = interpolated_proximal(
                logprobs.detach(),
                micro.behavior_logprobs,
                batch.alpha[slots],
                Interpolation(self._algorithm.proximal_interpolation.value),
            )
        elif not batch.prescored:  # one update: the proximal policy is the policy itself
            facts.proximal_logprobs[slots] = logprobs.detach()
        reference_logprobs = rejected = None
        if self._reference is not None:
            with torch.no_grad():
                reference_logprobs, _ = self._reference.logprobs(micro)
        if batch.rejected is not None:
            rejected = {name: mask[slots] for name, mask in batch.rejected.items()}
        given = TokenBatch(
            policy_logprobs=logprobs,
            proximal_logprobs=facts.proximal_logprobs[slots],
            behavior_logprobs=micro.behavior_logprobs,
            advantages=micro.advantages,
            sequences=micro.sequences,
            reference_logprobs=reference_logprobs,
            truncated=tokens.truncated[slots],
            entropy=entropy,
        )
        return policy_loss(given, self._objective, rejected)

    def _require_finite(
        self, loss: float, grad_norm: float, train_version: int, groups: Sequence[RolloutGroup]
    ) -> None:
        if not torch.tensor([loss, grad_norm]).isfinite().all():
            self.optimizer.zero_grad()
            facts = f"loss {loss}, gradient norm {grad_norm}"
            raise NumericsError(_message(facts, train_version, groups))


def _message(facts: str, train_version: int, groups: Sequence[RolloutGroup]) -> str:
    names = ", ".join(f"{group.group_id}/{group.attempt}" for group in groups)
    return f"train step from version {train_version}: {facts}; groups (id/attempt): {names}"
