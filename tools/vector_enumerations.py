"""Vectors that enumerate outcomes, and the planner's. Part of check_vectors.py.

Expectations are exact sums over the outcomes of a small categorical policy, made of the
implementation's own losses, weights and estimators.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vector_losses import Values

from async_grpo.algorithms import kl, surrogates
from async_grpo.algorithms.behavior_weights import BehaviorWeightRule, WeightAction
from async_grpo.algorithms.distributions import entropy, sampling_logprobs
from async_grpo.algorithms.losses import Objective, TokenBatch, policy_loss
from async_grpo.algorithms.sequences import Sequences
from async_grpo.analysis.planner import Workload, emax_lognormal, predict
from async_grpo.training.logprobs import chosen_logprobs

Inputs = Mapping[str, Any]
Config = Mapping[str, Any]
ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


def _double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _gradient(objective: Tensor, logits: Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(objective, logits)
    found: list[float] = gradient.tolist()
    return found


def kl_gradients(inputs: Inputs, config: Config) -> Values:
    """Expected gradients of the estimators: as losses, in the reward, off policy."""
    reference, behavior = _double(inputs["ref"]).log(), _double(inputs["behaviour"])
    values: Values = {}

    def expectation(build: Any) -> list[float]:
        logits = _double(inputs["logits"]).requires_grad_()
        return _gradient(build(logits.log_softmax(-1)), logits)

    def penalty(estimator: str, correction: kl.KLCorrection) -> Any:
        rule = kl.KLRule(1.0, kl.KLEstimator(estimator), correction)
        return lambda logprobs: (
            behavior * kl.kl_penalty(logprobs, reference, behavior.log(), rule)
        ).sum()

    def reverse(logprobs: Tensor) -> Tensor:
        return (logprobs.exp() * kl.k1(logprobs, reference)).sum()

    def forward(logprobs: Tensor) -> Tensor:
        return (reference.exp() * kl.k1(reference, logprobs)).sum()

    logprobs = _double(inputs["logits"]).log_softmax(-1)
    values["kl_reverse"], values["kl_forward"] = float(reverse(logprobs)), float(forward(logprobs))
    values["grad_kl_reverse"], values["grad_kl_forward"] = (
        expectation(reverse), expectation(forward),
    )  # fmt: skip
    for name, estimator in ESTIMATORS.items():
        values[f"onpolicy_E_grad_{name}_loss"] = expectation(
            lambda lp, k=estimator: (lp.detach().exp() * k(lp, reference)).sum()
        )
        values[f"{name}_in_reward"] = expectation(
            lambda lp, k=estimator: ((lp.exp() * k(lp, reference)).detach() * lp).sum()
        )
    none, detached, through = kl.KLCorrection
    values["offpolicy_E_grad_k2_loss_no_is"] = expectation(penalty("k2", none))
    values["offpolicy_E_grad_k3_no_is"] = expectation(penalty("k3", none))
    values["offpolicy_E_sg_rho_grad_k2"] = expectation(penalty("k2", detached))
    values["offpolicy_E_grad_rho_k3"] = expectation(penalty("k3", through))
    return values


def bandit(inputs: Inputs, config: Config) -> Values:
    """One-token policy gradients by the policy loss itself, every outcome weighed exactly."""
    behavior, reward = _double(inputs["behaviour"]), _double(inputs["reward"])
    advantages = reward - inputs["baseline"]
    low, high = config["icepop"]

    def gradient(weight: BehaviorWeightRule | None, *, on_policy: bool = False) -> list[float]:
        logits = _double(inputs["logits"]).requires_grad_()
        logprobs = logits.log_softmax(-1)
        batch = TokenBatch(
            policy_logprobs=logprobs,
            proximal_logprobs=logprobs.detach(),
            behavior_logprobs=behavior.log(),
            advantages=advantages,
            sequences=Sequences.of(torch.arange(len(advantages))),
        )
        result = policy_loss(batch, Objective(surrogate=surrogates.reinforce, weight=weight))
        sampled_by = logprobs.detach().exp() if on_policy else behavior
        return _gradient(-(sampled_by * result.per_token).sum(), logits)

    logits = _double(inputs["logits"]).requires_grad_()
    truncate, mask = WeightAction.truncate, WeightAction.mask
    return {
        "true_grad": _gradient((logits.softmax(-1) * reward).sum(), logits),
        "on_policy_formula": gradient(None, on_policy=True),
        "ignoring_mu": gradient(None),
        "is_exact": gradient(BehaviorWeightRule(truncate)),
        "tis": gradient(BehaviorWeightRule(truncate, cap=config["tis_cap"])),
        "icepop": gradient(BehaviorWeightRule(mask, floor=low, cap=high)),
    }


def entropies(inputs: Inputs, config: Config) -> Values:
    """Entropy and its gradient; the train step's own entropy must agree."""
    logits = _double(inputs["logits"]).requires_grad_()
    value = entropy(logits)
    _, of_step = _scored(logits.detach(), 1.0)
    if abs(float(of_step[0]) - value.item()) > 1e-12:
        return {"entropy": float(of_step[0]), "grad": []}
    return {"entropy": value.item(), "grad": _gradient(value, logits)}


def _scored(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of every token, and the entropy, as the train step computes them."""
    count = len(logits)
    return chosen_logprobs(
        logits.expand(count, -1),
        torch.eye(count, dtype=torch.float64),
        torch.arange(count),
        torch.full((count,), temperature, dtype=torch.float64),
        chunk_tokens=count,
    )


def sampling(inputs: Inputs, config: Config) -> Values:
    """What a sampler's log-probs are of; the trainer's are of logits / T."""
    logits, temperature, top_p = (
        _double(inputs["logits"]), config["temperature"], config["top_p"],
    )  # fmt: skip
    filtered = sampling_logprobs(logits, temperature=temperature, top_p=top_p)
    raw = sampling_logprobs(logits)
    return {
        "raw": raw.tolist(),
        "temperature_scaled": _scored(logits, temperature)[0].tolist(),
        "wrong_logprob_over_T": (raw / temperature).tolist(),
        "top_p_support": filtered.isfinite().tolist(),
        "top_p_renormalised": filtered.tolist(),
    }


def planner(inputs: Inputs, config: Config) -> Values:
    """The closed form."""
    plan = predict(
        Workload(
            groups_per_step=inputs["B"],
            group_size=inputs["K"],
            slots=inputs["slots"],
            tokens_per_s=inputs["tok_rate"],
            mean_tokens=inputs["mean"],
            cv_tokens=inputs["cv"],
            train_s=inputs["tau"],
            sync_s=inputs["sync"],
            staleness=inputs["eta"],
        )
    )
    return {
        "resp_latency": plan.completion_s,
        "group_latency": plan.group_s,
        "gen_capacity": plan.generator_groups_per_s,
        "train_capacity": plan.trainer_groups_per_s,
        "admission_bound": plan.admission_groups_per_s,
        "groups_per_s_work": plan.groups_per_s,
        "step_s": plan.step_s,
        "util_trainer": plan.util_trainer,
        "util_generator": plan.util_generator,
        "eta_to_saturate": plan.staleness_to_saturate,
        "mean_head_lag": plan.mean_staleness,
    }


def emax(inputs: Inputs, config: Config) -> Values:
    """Expected maxima."""
    return {"emax": [emax_lognormal(inputs["mean"], inputs["cv"], n) for n in inputs["n"]]}


COMPUTE: dict[str, Any] = {
    "kl_expected_gradients_3way_categorical": kl_gradients,
    "entropy_and_gradient": entropies,
    "pg_exact_bandit": bandit,
    "sampling_logprob_variants": sampling,
    "emax_lognormal": emax,
}
