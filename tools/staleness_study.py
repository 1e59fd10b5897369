"""Reward against forced staleness, for several objectives: `staleness_study.py OUT.json`.

The quickstart task in one process, without servers: sampling by the library's own generate, groups
through the project's own train step. What a step trains was sampled exactly k steps before, as
with `staleness.force=k`; the first k steps train at 0 to k - 1. Completions, behavior log-probs and
versions are what a generator would have sent.

Runs that OUT.json already holds are not repeated. `--draw OUT.png` draws what it holds.
"""

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from transformers.utils.logging import disable_progress_bar

from async_grpo.config.algorithm import AlgorithmSection, ZeroVariance, preset_section
from async_grpo.config.policy import PolicySection
from async_grpo.config.presets import Preset
from async_grpo.config.trainer import TrainerSection
from async_grpo.errors import NumericsError
from async_grpo.interfaces import Tokenizer
from async_grpo.tasks.prompts import PromptSource
from async_grpo.tasks.reverse import ReverseTask
from async_grpo.tasks.tokenizer import load_tokenizer
from async_grpo.training.batching import make_microbatches, sequences_of
from async_grpo.training.model import PolicyModel, load_policy
from async_grpo.training.step import TrainStep
from async_grpo.training.step_metrics import token_metrics
from async_grpo.training.toy import make_toy_model, sample_completions
from async_grpo.types import Completion, FinishReason, Rollout, RolloutGroup, Segment, WeightsName

matplotlib.use("Agg")

OBJECTIVES = ("uncorrected", "grpo", "default", "icepop")
LAGS = (0, 1, 4, 8, 16)
SEEDS = (0, 1, 2)
LAST = 10
"""Versions whose mean reward is a run's end."""
SMOOTH = 5
"""Versions of the curves' moving mean."""
KEPT_METRICS = ("ess/raw", "clip/behavior_fraction", "kl/behavior_k3", "entropy", "grad_norm")


@dataclass(frozen=True, kw_only=True)
class Study:
    """What all runs share."""

    length: int = 4
    hidden_size: int = 96
    gate: float = 0.2
    num_steps: int = 60
    groups_per_step: int = 16
    group_size: int = 8
    lr: float = 5e-4
    warmup_steps: int = 5

    @property
    def max_new_tokens(self) -> int:
        """As the quickstart: the answer, its end, and one more."""
        return self.length + 2


def algorithm_of(objective: str) -> AlgorithmSection:
    """A preset, without KL, all groups kept: objectives differ in how they correct, only."""
    return preset_section(Preset(objective), kl_coef=0.0, zero_variance=ZeroVariance.keep)


class Sampler:
    """Samples groups of one task by the weights that a policy has now."""

    def __init__(self, study: Study, policy: PolicyModel, tokenizer: Tokenizer, seed: int) -> None:
        self._study, self._policy, self._tokenizer = study, policy, tokenizer
        self._task = ReverseTask(seed=seed, length=study.length)
        self._prompts = PromptSource(self._task, tokenizer)
        self._next_group = 0

    def groups(self, version: int) -> list[RolloutGroup]:
        """The groups of one step, with the log-probs that these weights give their tokens."""
        study, end = self._study, self._tokenizer.eos_token_id
        assert end is not None, "the toy tokenizer has an end"
        ids = range(self._next_group, self._next_group + study.groups_per_step)
        self._next_group = ids.stop
        prompts = [self._prompts.prompt(index) for index in ids]
        completions = sample_completions(
            self._policy.module,  # type: ignore[arg-type]  # a transformers model
            [prompt.token_ids for prompt in prompts for _ in range(study.group_size)],
            max_new_tokens=study.max_new_tokens,
            greedy=False,
            pad_token_id=end,
            eos_token_id=end,
        )
        found = iter(completions)
        groups = []
        for prompt in prompts:
            rollouts = []
            for _ in range(study.group_size):
                sampled = next(found)
                text = self._tokenizer.decode(sampled, skip_special_tokens=True)
                reward = self._task.reward(text, prompt.answer, {})
                assert isinstance(reward, float), "the task scores by one number"
                completion = self._completion(prompt.token_ids, sampled, version)
                rollouts.append(Rollout([completion], reward))
            groups.append(RolloutGroup(prompt.index, 1, prompt.index, rollouts))
        self._add_logprobs(groups)
        return groups

    def _completion(self, prompt: list[int], sampled: list[int], version: int) -> Completion:
        """What generate cut off is put back: a completion below the budget ended by its end."""
        ended = len(sampled) < self._study.max_new_tokens
        ids = [*sampled, self._tokenizer.eos_token_id] if ended else sampled
        return Completion(
            prompt_token_ids=np.array(prompt, dtype=np.int32),
            token_ids=np.array(ids, dtype=np.int32),
            behavior_logprobs=np.zeros(len(ids), dtype=np.float32),
            segments=[Segment(WeightsName(1, version), len(ids))],
            finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
            temperature=1.0,
        )

    @torch.no_grad()
    def _add_logprobs(self, groups: Sequence[RolloutGroup]) -> None:
        sequences = sequences_of(groups, [[0.0] * len(group.rollouts) for group in groups])
        logprobs = np.empty(sum(s.num_trained for s in sequences), dtype=np.float32)
        batches = make_microbatches(
            sequences,
            [1.0] * len(sequences),
            tokens_per_microbatch=4096,
            dtype=self._policy.accumulation_dtype,
            device=self._policy.device,
        )
        for batch in batches:
            logprobs[batch.slots.numpy()] = self._policy.logprobs(batch)[0].numpy()
        completions = [r.sequences[0] for group in groups for r in group.rollouts]
        for completion, sequence in zip(completions, sequences, strict=True):
            end = sequence.first_slot + sequence.num_trained
            completion.behavior_logprobs = logprobs[sequence.first_slot : end].copy()


def mean_reward(groups: Sequence[RolloutGroup]) -> float:
    """Of all completions."""
    return float(np.mean([rollout.reward for group in groups for rollout in group.rollouts]))


def run(study: Study, model: Path, objective: str, lag: int, seed: int) -> dict[str, Any]:
    """One run: the reward that each version's own samples earn, and figures of each step."""
    began = time.process_time()
    torch.manual_seed(seed)
    trainer = TrainerSection(lr=study.lr, warmup_steps=study.warmup_steps)
    policy = load_policy(PolicySection(model=str(model)), trainer, torch.device("cpu"))
    sampler = Sampler(study, policy, load_tokenizer(str(model)), seed)
    algorithm = algorithm_of(objective)
    step = TrainStep(policy, algorithm, trainer, num_train_steps=study.num_steps)
    waiting = deque(sampler.groups(0) for _ in range(lag + 1))
    rewards = [mean_reward([group for groups in waiting for group in groups])]
    figures: dict[str, list[float]] = {name: [] for name in KEPT_METRICS}
    failed = ""
    for version in range(study.num_steps):
        groups = waiting.popleft()
        try:
            outcome = step.apply(groups, version)
        except NumericsError as error:
            failed = str(error)
            break
        values = token_metrics(outcome, groups, version, algorithm)
        assert values["staleness/mean"] == values["staleness/max"] == min(version, lag)
        for name in KEPT_METRICS:
            figures[name].append(values[name])
        waiting.append(sampler.groups(version + 1))
        rewards.append(mean_reward(waiting[-1]))
    return {
        "objective": objective,
        "lag": lag,
        "seed": seed,
        "rewards": [round(reward, 4) for reward in rewards],
        "figures": {name: [round(v, 5) for v in values] for name, values in figures.items()},
        "failed": failed,
        "cpu_s": round(time.process_time() - began, 1),
    }


def initial_model(study: Study, seed: int, directory: Path) -> Path:
    """The quickstart's warmed-up model, one per seed; made once."""
    path = directory / f"model-{study.length}-{study.hidden_size}-{study.gate}-{seed}"
    if not (path / "toy.json").exists():
        options = {"length": study.length, "hidden_size": study.hidden_size, "gate": study.gate}
        make_toy_model(path, seed, options)
    return path


def wanted(objectives: Sequence[str], lags: Sequence[int], seeds: Sequence[int]) -> Iterator[Any]:
    """(objective, lag, seed) of every run, whole seeds first."""
    for seed in seeds:
        for lag in lags:
            for objective in objectives:
                yield objective, lag, seed


def last_reward(entry: dict[str, Any]) -> float:
    """Mean of a run's last versions."""
    return float(np.mean(entry["rewards"][-LAST:]))


def table(saved: dict[str, Any]) -> str:
    """Markdown: the reward at the end by objective and k, mean and range over seeds."""
    runs = saved["runs"]
    lags = sorted({entry["lag"] for entry in runs})
    lines = ["| objective | " + " | ".join(f"k = {lag}" for lag in lags) + " |"]
    lines.append("|---" * (len(lags) + 1) + "|")
    for objective in dict.fromkeys(entry["objective"] for entry in runs):
        cells = []
        for lag in lags:
            found = [last_reward(e) for e in runs if (e["objective"], e["lag"]) == (objective, lag)]
            cells.append(
                f"{np.mean(found):.2f} ({min(found):.2f}-{max(found):.2f})" if found else ""
            )
        lines.append(f"| `{objective}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(saved: dict[str, Any], out: Path) -> None:
    """One panel per k with the curves of its objectives, and the reward at the end against k."""
    runs = saved["runs"]
    objectives = list(dict.fromkeys(entry["objective"] for entry in runs))
    lags = sorted({entry["lag"] for entry in runs})
    figure, axes = pyplot.subplots(
        2, 3, figsize=(12, 7), sharey=True, layout="constrained", squeeze=False
    )
    panels = list(axes.flat)
    for panel, lag in zip(panels, lags[:5], strict=False):
        for number, objective in enumerate(objectives):
            curves = [e["rewards"] for e in runs if (e["objective"], e["lag"]) == (objective, lag)]
            whole = [curve for curve in curves if len(curve) == saved["study"]["num_steps"] + 1]
            if whole:
                mean = np.convolve(np.mean(whole, axis=0), np.ones(SMOOTH) / SMOOTH, "valid")
                steps = np.arange(len(mean)) + SMOOTH - 1
                panel.plot(steps, mean, color=f"C{number}", label=objective)
        panel.set_title(f"k = {lag}")
        panel.set_xlabel("version")
        panel.grid(alpha=0.3)
    _draw_ends(panels[5], runs, objectives, lags)
    for row in axes:
        row[0].set_ylabel("reward of the version's own samples")
    panels[0].legend(loc="best")
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _draw_ends(
    panel: Axes, runs: list[dict[str, Any]], objectives: list[str], lags: list[int]
) -> None:
    for number, objective in enumerate(objectives):
        ends = {
            lag: [last_reward(e) for e in runs if (e["objective"], e["lag"]) == (objective, lag)]
            for lag in lags
        }
        found = [lag for lag in lags if ends[lag]]
        means = [np.mean(ends[lag]) for lag in found]
        panel.plot(range(len(found)), means, "-", color=f"C{number}")
        for place, lag in enumerate(found):
            panel.plot([place] * len(ends[lag]), ends[lag], "o", color=f"C{number}", markersize=4)
    panel.set_xticks(range(len(lags)), [str(lag) for lag in lags])
    panel.set_title(f"mean of the last {LAST} versions; points are seeds")
    panel.set_xlabel("k")
    panel.grid(alpha=0.3)


def main() -> int:
    """Run what is missing, save after each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--models", type=Path, default=Path("runs/staleness_study"))
    parser.add_argument("--objectives", nargs="+", default=OBJECTIVES, choices=list(Preset))
    parser.add_argument("--lags", nargs="+", type=int, default=LAGS, metavar="K")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--num-steps", type=int, default=Study.num_steps)
    parser.add_argument("--lr", type=float, default=Study.lr)
    parser.add_argument("--draw", type=Path, metavar="OUT.png", help="draw OUT.json, run nothing")
    args = parser.parse_args()
    if args.draw:
        found = json.loads(args.out.read_text(encoding="utf-8"))
        draw(found, args.draw)
        print(f"{table(found)}\nwrote {args.draw}")
        return 0
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no annotation
    torch.set_num_threads(1)
    study = replace(Study(), num_steps=args.num_steps, lr=args.lr)
    saved: dict[str, Any] = {"study": asdict(study), "runs": []}
    if args.out.exists():
        saved = json.loads(args.out.read_text(encoding="utf-8"))
        if saved["study"] != asdict(study):
            parser.error(f"{args.out} holds a study with other settings: {saved['study']}")
    done = {(entry["objective"], entry["lag"], entry["seed"]) for entry in saved["runs"]}
    for objective, lag, seed in wanted(args.objectives, args.lags, args.seeds):
        if (objective, lag, seed) in done:
            continue
        model = initial_model(study, seed, args.models)
        result = run(study, model, objective, lag, seed)
        saved["runs"].append(result)
        args.out.write_text(json.dumps(saved) + "\n", encoding="utf-8")
        print(
            f"{objective:<12} k={lag:<3} seed={seed} {last_reward(result):.3f} {result['cpu_s']} s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
