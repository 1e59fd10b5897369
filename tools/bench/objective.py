"""Cost of the policy loss against the forward and backward of the head on the same tokens.

    python tools/bench/objective.py [--tokens N] [--preset NAME] [--vocabulary V]

Exits 1 if a preset costs more than 2 % of it. The head is timed on a part of the tokens and scaled:
it is linear in them. CPU seconds of one thread.
"""

import argparse
import time
from collections.abc import Callable

import torch

from async_grpo.algorithms.losses import TokenBatch, policy_loss
from async_grpo.algorithms.sequences import Sequences
from async_grpo.config.algorithm import preset_section
from async_grpo.config.presets import Preset
from async_grpo.training.logprobs import chosen_logprobs
from async_grpo.training.objective import make_objective

LIMIT = 0.02
SEQUENCE_TOKENS = 512
HEAD_TOKENS = 256


def main() -> int:
    """Print one line per preset."""
    parser = argparse.ArgumentParser(description="Time the policy loss.")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--preset", action="append", choices=list(Preset))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head_s = _best(_head(args.vocabulary, args.hidden), 3) * args.tokens / HEAD_TOKENS
    print(f"head {args.hidden} x {args.vocabulary}, {args.tokens} tokens: {head_s:.3f} s")
    above = False
    for name in args.preset or list(Preset):
        seconds = _best(_loss(name, args.tokens), 5)
        ratio = seconds / head_s
        above |= ratio > LIMIT
        print(f"{name:20} {seconds * 1e3:8.2f} ms  {ratio:.2e} of the head (limit {LIMIT})")
    return int(above)


def _head(vocabulary: int, hidden_size: int) -> Callable[[], None]:
    hidden = torch.randn(HEAD_TOKENS, hidden_size, requires_grad=True)
    scale = hidden_size**-0.5  # logits of size 1: no denormal probabilities
    weight = (torch.randn(vocabulary, hidden_size) * scale).requires_grad_()
    targets = torch.randint(0, vocabulary, (HEAD_TOKENS,))
    temperature = torch.ones(HEAD_TOKENS)

    def run() -> None:
        logprobs, _ = chosen_logprobs(hidden, weight, targets, temperature, chunk_tokens=512)
        torch.autograd.grad(logprobs.sum(), (hidden, weight))

    return run


def _loss(preset: str, num_tokens: int) -> Callable[[], None]:
    objective = make_objective(preset_section(preset))
    behavior = -2 * torch.rand(num_tokens) - 0.05
    policy = (behavior + 0.1 * torch.randn(num_tokens)).requires_grad_()
    names = torch.arange(num_tokens) // SEQUENCE_TOKENS
    advantages = torch.randn(int(names[-1]) + 1)[names]

    def run() -> None:
        batch = TokenBatch(
            policy_logprobs=policy,
            proximal_logprobs=policy.detach(),
            behavior_logprobs=behavior,
            advantages=advantages,
            sequences=Sequences.of(names),
            reference_logprobs=behavior,
        )
        torch.autograd.grad(policy_loss(batch, objective).per_token.sum(), policy)

    return run


def _best(run: Callable[[], None], times: int) -> float:
    """Seconds of the fastest of `times` runs."""
    found = []
    for _ in range(times):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


if __name__ == "__main__":
    raise SystemExit(main())
