"""What only a card shows of weight sync: rounding at probes, and broadcasts beside training."""

import time
from typing import Any

import torch

from async_grpo.training.model import PolicyModel
from async_grpo.training.probe import logprobs_of, own_noise, sample_ids
from async_grpo.weights.group import join_group, listen

PAYLOAD_BYTES = 512 << 20
"""One bucket."""
TRAINING_S = 2.0
"""Of matmuls that are queued when the broadcast begins."""


def probe_noise(model: PolicyModel, *, num_probes: int, num_tokens: int) -> dict[str, Any]:
    """How far two correct computations are apart on probes, in mean |log-prob difference|, nats.

    Args:
        model: in bfloat16.
        num_probes: sequences that the model samples.
        num_tokens: of each.
    """
    sets = sample_ids(model, num_sets=num_probes, num_tokens=num_tokens, seed=0)
    batches = [sets[start : start + 8] for start in range(0, len(sets), 8)]
    module: Any = model.module
    ours = torch.cat([logprobs_of(model, batch) for batch in batches])
    module.set_attn_implementation("eager")
    eager = torch.cat([logprobs_of(model, batch) for batch in batches])
    module.set_attn_implementation("sdpa")
    gaps = (ours - eager).abs().double().cpu()
    probes = gaps.mean(dim=1)
    return {
        "probes": num_probes,
        "tokens": num_tokens,
        "own_noise": sum(own_noise(model, batch) for batch in batches) / len(batches),
        "sdpa_eager_p50": float(probes.quantile(0.5)),
        "sdpa_eager_p99": float(probes.quantile(0.99)),
        "sdpa_eager_max_probe": float(probes.max()),
        "sdpa_eager_max_token": float(gaps.max()),
    }


def side_stream(device: torch.device) -> dict[str, Any]:
    """A broadcast while training kernels are queued: it must not wait for them.

    One card has no second rank for NCCL, so the group is of one; what is tried is the stream that
    the group chooses, the event that it waits for, and who waits for whom.
    """
    if device.type != "cuda":
        return {"status": "not run", "error": "needs a CUDA device"}
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    store, port = listen("127.0.0.1")
    group = join_group(
        host="127.0.0.1", port=port, rank=0, world_size=1, group_name="gpu-day", backend="nccl",
        timeout_s=60.0, store=store, device=device,
    )  # fmt: skip
    payload = torch.zeros(PAYLOAD_BYTES, dtype=torch.uint8, device=device)
    group.broadcast(payload)
    alone_s = _seconds(lambda: group.broadcast(payload))
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    _work(matrix, 1)
    one_s = _seconds(lambda: _work(matrix, 10)) / 10
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
    ready.record()
    started = time.perf_counter()
    for _ in range(max(1, round(TRAINING_S / one_s))):
        torch.mm(matrix, matrix)
    queued_s = time.perf_counter() - started
    group.broadcast(payload, ready=ready)
    beside_s = time.perf_counter() - started - queued_s
    torch.cuda.synchronize()
    training_s = time.perf_counter() - started
    group.close()
    figures = {"alone_s": alone_s, "beside_training_s": beside_s, "training_s": training_s}
    if beside_s > training_s / 2:
        return figures | {"status": "failed", "error": "the broadcast waited for training"}
    return figures


def _work(matrix: torch.Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(matrix, matrix)
    torch.cuda.synchronize()


def _seconds(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
