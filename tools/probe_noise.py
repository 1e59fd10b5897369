"""How far correct computations of a model disagree on probes, and which wrong tensors probes find.

    python tools/probe_noise.py models/smollm2-135m --probes 128 --every 4 --json noise.json

Prints, one line each:

    own noise      what a trainer measures at its start (bfloat16 against float32), over pairs of
                   probes, and the tolerance that follows from it
    engine ...     a correct engine against a bfloat16 trainer: |log-prob difference| of tokens that
                   the model sampled, of whole probes, and how many probes and pairs (asked twice)
                   a run would have refused
    one tensor ... a wrong engine: one tensor zeroed or random, of every n-th tensor of the model;
                   the share that a probe, and a probe asked twice, finds
    stale          one tensor as it was some steps of 1e-6 ago: what a probe sees of it, and the
                   tensors whose bytes differ, so that checksums find them

Trainer and engine are this program: bfloat16 with sdpa, with eager attention, and float32. On a CPU
without bfloat16 instructions, products of matrices are made in float32 and rounded, which is what
such instructions do; `--native` leaves them to torch.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from async_grpo.config.policy import DType, PolicySection
from async_grpo.config.trainer import TrainerSection
from async_grpo.config.weights import ProbeLimits, WeightsSection
from async_grpo.engine_api import Checksums
from async_grpo.training.model import PolicyModel, load_policy
from async_grpo.training.probe import NUM_TOKENS, sample_ids
from async_grpo.weights.arrival import ArrivalWatch
from async_grpo.weights.flatten import digests
from async_grpo.weights.probing import ProbeGap, probe_gap

STEP = 1e-6
STALE_STEPS = (1, 10, 100)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--probes", type=int, default=128, help="an even number")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS[torch.bfloat16])
    parser.add_argument("--batch", type=int, default=16, help="probes of one forward pass")
    parser.add_argument("--every", type=int, default=0, help="n-th tensor to spoil; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--native", action="store_true", help="torch's own bfloat16 products")
    parser.add_argument("--json", type=Path, help="append the figures as one line")
    args = parser.parse_args()
    started = time.monotonic()
    found = measure(args)
    found["seconds"] = round(time.monotonic() - started, 1)
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps(found) + "\n")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    exact = load(args.model, DType.float32)
    ids = torch.tensor(
        sample_ids(exact, num_sets=args.probes, num_tokens=args.tokens, seed=args.seed)
    )
    reference = score(exact.module, ids, args.batch)
    del exact
    trainer = load(args.model, DType.bfloat16)
    module: Any = trainer.module
    with products(trainer.module, native=args.native):
        own = score(trainer.module, ids, args.batch)
        module.set_attn_implementation("eager")
        eager = score(trainer.module, ids, args.batch)
        module.set_attn_implementation("sdpa")
        limits = own_tolerances(own, reference)
        found: dict[str, Any] = {"probes": args.probes, "tokens": args.tokens, "seed": args.seed}
        found["tolerance"] = show(
            "own tolerance", quantiles(torch.tensor([each.mean for each in limits[::2]]))
        )
        for name, engine in (("eager", eager), ("float32", reference)):
            found[name] = correct_engine(f"engine {name}", own, engine, limits)
        if args.every:
            found["spoiled"] = spoiled(trainer, ids, own, limits, args.every)
            found["stale"] = stale(trainer, ids[:2], own[:2], args.every)
    return found


def load(model: str, dtype: DType) -> PolicyModel:
    """As a trainer loads it."""
    section = PolicySection(model=model, dtype=dtype)
    return load_policy(section, TrainerSection(), torch.device("cpu"), trainable=False)


@torch.no_grad()
def score(module: nn.Module, ids: Tensor, batch: int) -> Tensor:
    """[N, L - 1] log-probs in float32, from logits in the module's dtype, as engines make them."""
    parts = []
    for start in range(0, len(ids), batch):
        part = ids[start : start + batch]
        logits = module(input_ids=part[:, :-1], use_cache=False).logits.float()
        chosen = logits.gather(-1, part[:, 1:, None]).squeeze(-1)
        parts.append(chosen - logits.logsumexp(-1))
    return torch.cat(parts)


@contextmanager
def products(module: nn.Module, *, native: bool) -> Iterator[None]:
    """bfloat16 linear layers by float32 products that are rounded once; weights are read anew."""
    layers = [] if native else [m for m in module.modules() if isinstance(m, nn.Linear)]

    def rounded(layer: nn.Linear) -> Any:
        def forward(inputs: Tensor) -> Tensor:
            bias = None if layer.bias is None else layer.bias.float()
            return functional.linear(inputs.float(), layer.weight.float(), bias).to(inputs.dtype)

        return forward

    for layer in layers:
        layer.forward = rounded(layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def own_tolerances(own: Tensor, reference: Tensor) -> list[ProbeLimits]:
    """Of each probe, as the run that has this pair of probes would set it."""
    noise = (own - reference).abs().view(len(own) // 2, -1).mean(1).repeat_interleave(2)
    return [WeightsSection().probe_limits(DType.bfloat16, float(each)) for each in noise]


def gaps_of(found: Tensor, expected: Tensor) -> list[ProbeGap]:
    """Of each probe."""
    pairs = zip(found.tolist(), expected.tolist(), strict=True)
    return [probe_gap(theirs, ours) for theirs, ours in pairs]


def refusals(gaps: Sequence[ProbeGap], limits: Sequence[ProbeLimits]) -> tuple[int, int]:
    """Probes beyond their limits, and pairs of which both are: an update would fail."""
    bad = [not gap.within(each.mean, each.largest) for gap, each in zip(gaps, limits, strict=True)]
    return sum(bad), sum(one and other for one, other in zip(bad[::2], bad[1::2], strict=True))


def quantiles(values: Tensor) -> dict[str, float]:
    """For people."""
    values = values.double()
    return {
        "mean": float(values.mean()),
        "p50": float(values.quantile(0.5)),
        "p99": float(values.quantile(0.99)),
        "max": float(values.max()),
    }


def show(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Print a line and hand it back."""
    short = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in figures.items()}
    print(f"{name:16s}", "  ".join(f"{k} {v}" for k, v in short.items()), flush=True)
    return figures


def correct_engine(
    name: str, own: Tensor, engine: Tensor, limits: Sequence[ProbeLimits]
) -> dict[str, Any]:
    """Gaps that are nobody's fault."""
    gaps = gaps_of(engine, own)
    once, twice = refusals(gaps, limits)
    tokens = quantiles((engine - own).abs().flatten()[:100_000])
    return show(
        name,
        {f"token_{key}": value for key, value in tokens.items()}
        | {f"probe_{k}": v for k, v in quantiles(torch.tensor([g.mean for g in gaps])).items()}
        | {"probe_largest": max(gap.largest for gap in gaps)}
        | {"probes": len(gaps), "refused": once, "refused_twice": twice},
    )


def spoiled(
    trainer: PolicyModel, ids: Tensor, own: Tensor, limits: Sequence[ProbeLimits], every: int
) -> dict[str, Any]:
    """One tensor of the engine holds zeros, or random numbers of the tensor's own spread."""
    generator = torch.Generator().manual_seed(1)
    found, missed = {"zeroed": [0, 0], "random": [0, 0]}, []
    tensors = list(trainer.module.named_parameters())[::every]
    for number, (name, weight) in enumerate(tensors):
        pair = slice(2 * number % len(ids), 2 * number % len(ids) + 2)
        kept = weight.detach().clone()
        for kind in found:
            spread = float(kept.float().std()) or 1.0
            noise = torch.randn(kept.shape, generator=generator) * spread
            weight.data.copy_(noise + (kept.float().mean() if kept.dim() == 1 else 0))
            if kind == "zeroed":
                weight.data.zero_()
            gaps = gaps_of(score(trainer.module, ids[pair], 2), own[pair])
            once, twice = refusals(gaps, limits[pair])
            found[kind][0] += once
            found[kind][1] += twice
            if not twice:
                missed.append(f"{name} {kind}: mean {gaps[0].mean:.3g}, {gaps[1].mean:.3g}")
        weight.data.copy_(kept)
    for line in missed:
        print("  missed:", line)
    return {
        kind: show(
            f"one {kind}",
            {"tensors": len(tensors), "probe": once / 2 / len(tensors),
             "asked_twice": twice / len(tensors)},
        )
        for kind, (once, twice) in found.items()
    } | {"missed": missed}  # fmt: skip


def stale(trainer: PolicyModel, ids: Tensor, own: Tensor, every: int) -> list[dict[str, Any]]:
    """Each tensor in turn is some steps behind: what a probe and what checksums see."""
    generator = torch.Generator().manual_seed(2)
    tensors = list(trainer.module.named_parameters())
    lines = []
    for steps in STALE_STEPS:
        behind = {
            name: (
                weight.float()
                - steps * STEP * torch.randn(weight.shape, generator=generator).sign()
            ).to(weight.dtype)
            for name, weight in tensors
        }
        fresh = digests({name: weight.detach() for name, weight in tensors})
        before = digests(behind)
        changed = {name for name in fresh if fresh[name] != before[name]}
        found = set()
        held = {each: str(value) for each, value in before.items()}
        watch = ArrivalWatch()
        watch.remember("before", before, Checksums(total="before", tensors=held))
        for name in changed:
            engine = {each: str(value) for each, value in fresh.items()} | {name: held[name]}
            faults = watch.check("now", fresh, Checksums(total="now", tensors=engine))
            found |= {fault.name for fault in faults} & {name}
        name, weight = tensors[every]
        kept = weight.detach().clone()
        weight.data.copy_(behind[name])
        gap = gaps_of(score(trainer.module, ids, 2), own)[0].mean
        weight.data.copy_(kept)
        lines.append(
            show(
                f"stale {steps} steps",
                {"tensors": len(tensors), "bytes_differ": len(changed), "checksum": len(found),
                 "probe_mean": gap},
            )
        )  # fmt: skip
    return lines


if __name__ == "__main__":
    sys.exit(main())
