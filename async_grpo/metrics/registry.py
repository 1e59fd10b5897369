"""Every metric: name, unit, meaning. A name that is not here cannot be recorded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from async_grpo.config.alarms import KINDS
from async_grpo.types import DropReason, ReissueReason

BUCKET_NAMES = ("0", "1", "2", "3-4", "5-8", "9+")
"""as `algorithms.staleness.BUCKETS` has them"""
_OFF_POLICY = frozenset(
    {"ratio", "clip", "behavior_weight", "ess", "kl", "chi2", "m2", "perplexity", "rejected",
     "kept"}
)  # fmt: skip
"""first parts of the names that are also kept by staleness"""


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric."""

    name: str
    unit: str
    meaning: str
    by_staleness: bool = False
    """also kept apart by staleness, as `by_staleness/{bucket}/{name}`"""


_DECLARED = (
    ("step", "steps", "train steps applied before this one; the version that it started from"),
    ("policy_version", "steps", "train steps applied after this one"),
    ("incarnation", "", "starts of the trainer on this run"),
    ("time/wall_s", "s", "since this trainer process started"),
    ("time/step_s", "s", "since the step before ended"),
    ("time/starting_s", "s", "trainer: loading and joining, so far"),
    ("time/working_s", "s", "trainer: forward, backward, optimizer, so far"),
    ("time/waiting_s", "s", "trainer: no groups to train on, so far"),
    ("time/checkpointing_s", "s", "trainer: held up by checkpoints (copied to host memory, and the "
     "one before waited for), so far; writing goes on beside training"),
    ("checkpoint/write_s", "s", "from the copy to the disk, in the background, of the newest "
     "checkpoint that is written"),
    ("time/syncing_s", "s", "trainer: kept from working by weight sync, so far"),
    ("reward/mean", "", "over all completions that finished since the draw before, trained or not; "
     "over the drawn ones if none did"),
    ("reward/trained_mean", "", "over the rollouts of this step"),
    ("reward/group_std", "", "mean over groups of the population std of their rewards"),
    ("zero_variance_fraction", "", "of the groups of this step and those dropped as no_signal"),
    ("completion/length_mean", "tokens", "over the rollouts of this step"),
    ("completion/generated_length_mean", "tokens", "over all that finished since the draw before"),
    ("completion/truncated_fraction", "", "of the sequences of this step that ended by length"),
    ("staleness/mean", "steps", "over trained tokens: train_version - version that sampled it"),
    ("staleness/max", "steps", "over trained tokens"),
    ("staleness/head_mean", "steps", "of the first trained token, mean over sequences"),
    ("staleness/tail_mean", "steps", "of the last trained token, mean over sequences"),
    ("staleness/version_span_mean", "steps", "versions that passed while a sequence was sampled"),
    ("staleness/in_flight", "steps", "the part that passed while its group was being sampled"),
    ("staleness/in_queue", "steps", "the part that passed after its group was finished"),
    ("staleness/in_flight_s", "s", "mean over tokens from sampling to insert"),
    ("staleness/in_queue_s", "s", "mean over groups from insert to the start of the step"),
    ("ratio/behavior_mean", "", "pi_theta / pi_behavior over trained tokens, before the update"),
    ("ratio/behavior_min", "", "smallest of them"),
    ("ratio/behavior_max", "", "largest of them"),
    ("ratio/proximal_mean", "", "pi_theta / pi_prox, the ratio that is clipped"),
    ("ratio/proximal_min", "", "smallest of them"),
    ("ratio/proximal_max", "", "largest of them"),
    ("clip/fraction", "", "of trained tokens: any clip of the surrogate is active"),
    ("clip/low_fraction", "", "of trained tokens: the lower clip is active"),
    ("clip/high_fraction", "", "of trained tokens: the upper clip is active"),
    ("clip/dual_fraction", "", "of trained tokens: the dual clip is active"),
    ("clip/behavior_fraction", "", "of trained tokens: pi_theta / pi_behavior is outside the clip "
     "range, whatever the anchor"),
    ("behavior_weight/raw_mean", "", "pi_prox / pi_behavior before its bounds, at its level"),
    ("behavior_weight/raw_min", "", "smallest of them"),
    ("behavior_weight/raw_max", "", "largest of them"),
    ("behavior_weight/mean", "", "after its bounds: truncated, or 0 where masked"),
    ("behavior_weight/truncated_fraction", "", "of trained tokens: out of bounds, so truncated or "
     "masked"),
    ("ess/raw", "", "effective sample size of pi_prox / pi_behavior, as a fraction"),
    ("ess/truncated", "", "the same of the weights after their bounds"),
    ("ess/sequence_raw", "", "the same of whole sequences' products, as a fraction"),
    ("ess/sequence_truncated", "", "of sequences' mean weights after their bounds"),
    ("kl/behavior_k1", "nats", "mean of log(pi_behavior / pi_prox)"),
    ("kl/behavior_k3", "nats", "mean of w - log w - 1 with w = pi_prox / pi_behavior"),
    ("kl/reference", "nats", "against the reference policy, by kl_estimator and kl_correction"),
    ("chi2/token", "", "mean w^2 - 1 with w = pi_prox / pi_behavior"),
    ("chi2/sequence", "", "the same of whole sequences' products"),
    ("m2", "nats^2", "mean (log w)^2"),
    ("perplexity/behavior", "", "exp(-mean log-prob) by the behavior policy, mean over sequences"),
    ("perplexity/proximal", "", "the same by the proximal policy"),
    ("perplexity/log_abs_gap", "nats", "mean over sequences of |log perplexity| apart"),
    ("proximal/interpolation_error", "nats", "mean |interpolated - real| proximal log-prob, over "
     "the tokens of the first update"),
    ("rejected/token_fraction", "", "of trained tokens: taken out of the loss by any mask"),
    ("rejected/sequence_fraction", "", "of trained sequences: no token is left"),
    ("rejected/token_bounds_fraction", "", "of trained tokens: out of reject_token_low, _high"),
    ("rejected/sequence_bounds_fraction", "", "of trained tokens: out of reject_sequence_low, "
     "_high"),
    ("rejected/veto_fraction", "", "of trained tokens: by reject_veto"),
    ("rejected/opsm_fraction", "", "of trained tokens: by reject_opsm"),
    ("rejected/m2_fraction", "", "of trained tokens: by reject_m2"),
    ("rejected/custom_fraction", "", "of trained tokens: by any of reject_custom"),
    ("rejected/overlong_fraction", "", "of trained tokens: by overlong_mask"),
    ("rejected/behavior_weight_fraction", "", "of trained tokens: by behavior_weight=mask"),
    ("kept/ess", "", "ess/raw over the tokens that no mask rejected"),
    ("kept/k3", "nats", "kl/behavior_k3 over the tokens that no mask rejected"),
    ("kept/ratio_mean", "", "mean pi_prox / pi_behavior over the tokens that no mask rejected"),
    ("logprob/lag0_tokens", "tokens", "of completions sampled whole by the weights that the step "
     "starts from; the figures over them are the engine's mismatch alone"),
    ("logprob/lag0_gap", "nats", "mean |log pi_theta - log pi_behavior| over those"),
    ("logprob/lag0_gap_max", "nats", "largest of them"),
    ("logprob/lag0_k1", "nats", "mean of log(pi_behavior / pi_theta) over those"),
    ("logprob/lag0_k3", "nats", "mean of w - log w - 1 with w = pi_theta / pi_behavior over those"),
    ("logprob/lag0_ess", "", "effective sample size of that w, as a fraction"),
    ("masked_fraction", "", "of sampled tokens: not trained"),
    ("excluded_fraction", "", "of sampled tokens: not trained, or rejected by a mask"),
    ("entropy", "nats", "mean over trained tokens, at the sampling temperature"),
    ("loss", "", "mean over the step's optimizer updates"),
    ("grad_norm", "", "before clipping, mean over the step's optimizer updates"),
    ("lr", "", "of the step's last optimizer update"),
    ("tokens/trained", "tokens", "trained in this step"),
    ("tokens/over_age", "tokens", "of this step's groups that were too old to be trained "
     "(`staleness.over_age: mask_tokens`)"),
    ("tokens/trained_per_s", "tokens/s", "trained in this step / time/step_s"),
    ("tokens/generated", "tokens", "of all groups that finished since the draw before"),
    ("groups/generated", "groups", "that finished since the draw before"),
    ("groups/trained", "groups", "of this step"),
    ("eval/reward_mean", "", "over the held-out completions of one evaluation, on the first line "
     "written after it ended; TensorBoard shows it at eval/policy_version"),
    ("eval/policy_version", "steps", "version that was live when that evaluation began"),
    ("eval/sampled_version_mean", "steps", "mean over its tokens of the version that sampled them; "
     "generation goes on through updates"),
    ("eval/length_mean", "tokens", "of its completions"),
    ("eval/prompts", "prompts", "that it evaluated"),
    ("eval/failed_prompts", "prompts", "of it that could not be sampled or scored"),
    ("selection/length_ratio", "", "mean completion length, trained / generated, over the last 20 "
     "steps without no_signal groups; below 1: long ones are lost"),
    ("selection/reward_ratio", "", "the same of the mean reward, where that is above 0"),
    ("pacing/pipeline_depth", "steps", "D in force after the step"),
    ("pacing/decision", "steps", "change of it by the controller, on the steps where it decides"),
    ("pacing/fit_intercept", "", "-log ESS of fresh tokens, by the controller's fit"),
    ("pacing/fit_slope", "", "-log ESS per train step of staleness, by the controller's fit"),
    ("pacing/predicted_ess", "", "of raw token weights at the depth decided for, by that fit"),
    ("alarm/active", "alarms", "that last"),
    ("lr_scale", "", "of the next step's learning rate, by alarms of action scale_lr"),
    ("sync/publish_s", "s", "the newest finished announcement, all cells committed"),
    ("sync/failed_cells", "cells", "of it that did not commit as a whole"),
    ("sync/alarms", "", "of it: tensors that an engine did not change though the trainer did, or "
     "engines that disagree; the trainer's log says which"),
    ("sync/probe_gap", "nats", "of it: mean |log-prob difference| between trainer and engine on "
     "the probe, of the worst engine"),
    ("sync/probe_gap_max", "nats", "of it: largest such difference of one position"),
    ("sync/pause_s", "s", "of it, mean over engines: from the pause to the end of the probe, so "
     "about the pause that requests saw"),
    ("sync/pause_begin_s", "s", "the part of it until the engine had paused"),
    ("sync/pause_go_s", "s", "the part waiting for the rest of the cell and for the trainer"),
    ("sync/pause_receive_s", "s", "the part joining the update group and receiving the weights, or "
     "loading them from files"),
    ("sync/pause_verify_s", "s", "the part ending the update: flush, version, checksum"),
    ("sync/pause_probe_s", "s", "the part until the probe was answered, behind whatever recomputes "
     "its KV"),
)  # fmt: skip


def _declared() -> dict[str, Metric]:
    metrics = {
        name: Metric(name, unit, meaning, name.partition("/")[0] in _OFF_POLICY)
        for name, unit, meaning in _DECLARED
    }
    for reason in DropReason:
        for kind in ("groups", "tokens"):
            name = f"dropped/{reason.value}_{kind}"
            meaning = f"that ended as {reason.value} since the draw before"
            metrics[name] = Metric(name, kind, meaning)
    for reissue in (ReissueReason.REQUEUED, ReissueReason.SUPERSEDED, ReissueReason.LOST):
        name = f"reissued/{reissue.value}_tokens"
        meaning = f"of finished groups, wasted since the draw before: {reissue.value}"
        metrics[name] = Metric(name, "tokens", meaning)
    for alarm in KINDS:
        name = f"alarm/{alarm.name}"
        metrics[name] = Metric(name, "", f"1 while the alarm over {alarm.metric} lasts")
        name = f"alarm/{alarm.name}_raised"
        metrics[name] = Metric(name, "alarms", f"times that it was raised so far, of {alarm.name}")
    for metric in list(metrics.values()):
        if metric.by_staleness:
            for bucket in BUCKET_NAMES:
                name = f"by_staleness/{bucket}/{metric.name}"
                meaning = f"{metric.name} over tokens of staleness {bucket}"
                metrics[name] = Metric(name, metric.unit, meaning)
    for bucket in BUCKET_NAMES:
        name = f"by_staleness/{bucket}/tokens"
        metrics[name] = Metric(name, "tokens", f"trained tokens of staleness {bucket}")
    return metrics


METRICS: dict[str, Metric] = _declared()
"""name -> metric"""


def checked(values: Mapping[str, float]) -> dict[str, float]:
    """`values`, each under a declared name, without those that are not a number.

    Raises:
        KeyError: an undeclared name.
    """
    unknown = sorted(values.keys() - METRICS.keys())
    if unknown:
        raise KeyError(f"metrics that metrics/registry.py does not declare: {unknown}")
    return {name: value for name, value in values.items() if math.isfinite(value)}
