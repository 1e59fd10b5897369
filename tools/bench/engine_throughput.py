"""Tokens per second of the embedded engine over HTTP against the bare batching manager.

    python tools/bench/engine_throughput.py [--slots 64] [--max-batch-tokens 256] [--page-size 16]

Both sides run the same random 0.2 M parameter model with the same sizes in a process of their own,
one after the other, each warmed up first; the client of the HTTP side runs in this process. Prints
one JSON line. `ratio` is HTTP over bare in tokens per second, `cpu_ratio` the same per CPU second
(steadier on a busy machine), `overhead_cpu_ms` what HTTP, JSON and hand-over cost the server per
request.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml

REPOSITORY = Path(__file__).parents[2]
NUM_NEW_TOKENS = 7
PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--in-flight", type=int, default=0, help="requests; 0: as many as slots")
    parser.add_argument("--max-batch-tokens", type=int, default=256)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--num-requests", type=int, default=1500)
    parser.add_argument("--side", choices=["both", "bare", "server"], default="both")
    parser.add_argument("--config", default="")
    options = parser.parse_args()
    if options.side == "bare":
        run_bare(options)
    elif options.side == "server":
        run_server(options)
    else:
        with tempfile.TemporaryDirectory() as directory:
            compare(options, make_config(options, Path(directory)))


def compare(options: argparse.Namespace, config: Path) -> None:
    """Both sides, one after the other."""
    arguments = [*sys.argv[1:], "--config", str(config), "--side"]
    command = [sys.executable, __file__, *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    bare = json.loads(
        subprocess.run(
            [*command, "bare"], env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    )
    server = subprocess.Popen(
        [*command, "server"], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        over_http = asyncio.run(run_client(options, url, lambda: cpu_of(server.pid)))
    finally:
        server.terminate()
        server.wait(20)
    report = {
        "slots": options.slots,
        "max_batch_tokens": options.max_batch_tokens,
        "page_size": options.page_size,
        "bare": bare,
        "http": over_http,
        "ratio": round(over_http["tokens_per_s"] / bare["tokens_per_s"], 3),
        "cpu_ratio": round(over_http["tokens_per_cpu_s"] / bare["tokens_per_cpu_s"], 3),
        "overhead_cpu_ms": round(over_http["cpu_ms_per_request"] - bare["cpu_ms_per_request"], 3),
    }
    print(json.dumps(report))


def make_config(options: argparse.Namespace, directory: Path) -> Path:
    """A configuration and its random model."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=50, hidden_size=96, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=24,
            max_position_embeddings=256, tie_word_embeddings=True,
            eos_token_id=1, pad_token_id=0, bos_token_id=None,
        )
    ).save_pretrained(directory / "model")  # fmt: skip
    path = directory / "config.yaml"
    content = {
        "run": {"output_dir": str(directory / "run"), "num_train_steps": 1},
        "policy": {"model": str(directory / "model")},
        "task": {"name": "reverse"},
        "engine": {
            "max_running_requests": options.slots,
            "max_batch_tokens": options.max_batch_tokens,
            "page_size": options.page_size,
        },
    }
    path.write_text(yaml.safe_dump(content))
    return path


def run_server(options: argparse.Namespace) -> None:
    """The engine itself."""
    from async_grpo.config.load import load_config
    from async_grpo.engine.server import main as serve

    serve(load_config(options.config), port=0)


def run_bare(options: argparse.Namespace) -> None:
    """The manager alone, kept as full as the client keeps the server."""
    import torch
    from transformers import GenerationConfig

    from async_grpo.config.load import load_config
    from async_grpo.engine.batching import _batching_config
    from async_grpo.engine.model import load_model

    torch.set_num_threads(1)
    config = load_config(options.config)
    model = load_model(config)
    batching = _batching_config(model, config.engine)
    batching.per_request_processors = False
    manager = model.module.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=True, top_k=0, top_p=1.0, temperature=1.0, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=batching,
    )
    with torch.inference_mode():
        manager.start()

    def run(num_requests: int) -> None:
        started = finished = 0
        while finished < num_requests:
            while started < num_requests and started - finished < in_flight(options):
                manager.add_request(PROMPT, max_new_tokens=NUM_NEW_TOKENS)
                started += 1
            assert manager.get_result(timeout=30) is not None
            finished += 1

    run(200)
    begin, cpu = time.perf_counter(), cpu_of(os.getpid())
    run(options.num_requests)
    print(json.dumps(figures(options.num_requests, begin, cpu, cpu_of(os.getpid()))))
    manager.stop(hard_stop=True)


async def run_client(
    options: argparse.Namespace, url: str, server_cpu: Callable[[], float]
) -> dict[str, Any]:
    """The server, kept full from here."""
    body = msgspec.json.encode(
        {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True},
            "return_logprob": True,
        }
    )
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as http:

        async def worker(numbers: Any) -> None:
            for _ in numbers:
                async with http.post("/generate", data=body) as reply:
                    assert len(msgspec.json.decode(await reply.read())["output_ids"]) == 7

        async def run(num_requests: int) -> None:
            numbers = iter(range(num_requests))
            await asyncio.gather(*(worker(numbers) for _ in range(in_flight(options))))

        await run(200)
        begin, cpu = time.perf_counter(), server_cpu()
        await run(options.num_requests)
        return figures(options.num_requests, begin, cpu, server_cpu())


def in_flight(options: argparse.Namespace) -> int:
    """Requests at a time."""
    return options.in_flight or options.slots


def figures(num_requests: int, begin: float, cpu: float, cpu_end: float) -> dict[str, float]:
    """Rates since `begin`."""
    wall = time.perf_counter() - begin
    return {
        "tokens_per_s": round(num_requests * NUM_NEW_TOKENS / wall, 1),
        "tokens_per_cpu_s": round(num_requests * NUM_NEW_TOKENS / (cpu_end - cpu), 1),
        "cpu_ms_per_request": round(1e3 * (cpu_end - cpu) / num_requests, 3),
    }


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
