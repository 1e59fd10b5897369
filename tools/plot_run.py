"""Draw reward and staleness of a run by train step: `plot_run.py RUN_DIR OUT.png`.

Reads metrics.jsonl only. Needs the extra `plot`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

Line = dict[str, Any]


def main() -> int:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("out", type=Path, metavar="OUT.png")
    parser.add_argument("--window", type=int, default=5, help="steps of the moving mean")
    args = parser.parse_args()
    lines = read_lines(args.run_dir / "metrics.jsonl")
    if not any("reward/mean" in line for line in lines):
        parser.error(f"{args.run_dir} has no train step yet")
    draw(lines, args.run_dir.name, args.window, args.out)
    print(f"wrote {args.out}")
    return 0


def read_lines(path: Path) -> list[Line]:
    """Whole lines of metrics.jsonl; one that is still being written is left out."""
    if not path.exists():
        raise SystemExit(f"{path} does not exist")
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1] if line]


def series(lines: Sequence[Line], x: str, y: str) -> tuple[list[float], list[float]]:
    """Points of the lines that have both."""
    points = [(line[x], line[y]) for line in lines if x in line and y in line]
    return [point[0] for point in points], [point[1] for point in points]


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window` - 1 before it."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def draw(lines: Sequence[Line], title: str, window: int, out: Path) -> None:
    """Two panels over one axis of steps."""
    figure, (reward, staleness) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1), layout="constrained"
    )
    _draw_reward(reward, lines, window)
    _draw_staleness(staleness, lines)
    minutes = max(line.get("time/wall_s", 0.0) for line in lines) / 60
    figure.suptitle(f"{title}: {minutes:.1f} minutes")
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def _draw_reward(axes: Axes, lines: Sequence[Line], window: int) -> None:
    steps, rewards = series(lines, "step", "reward/mean")
    axes.plot(steps, rewards, color="tab:blue", alpha=0.3, label="all finished completions")
    axes.plot(
        steps, moving_mean(rewards, window), color="tab:blue", label=f"mean of {window} steps"
    )
    versions, evaluated = series(lines, "eval/policy_version", "eval/reward_mean")
    if versions:
        axes.plot(versions, evaluated, "o-", color="tab:orange", label="held-out prompts")
    axes.set_ylabel("reward")
    axes.legend(loc="best")
    axes.grid(alpha=0.3)


def _draw_staleness(axes: Axes, lines: Sequence[Line]) -> None:
    for name, label in (("staleness/max", "max"), ("staleness/mean", "mean")):
        axes.plot(*series(lines, "step", name), label=label, drawstyle="steps-mid")
    axes.set_ylabel("staleness (steps)")
    axes.set_xlabel("train step")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="best")
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    sys.exit(main())
