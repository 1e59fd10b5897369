"""A weight update over gloo on one machine, phase by phase, and against a flat broadcast.

    python tools/bench/weight_broadcast.py [--size 135m] [--dtype float32] [--rounds 7]

Everything is real: a replay server, a publisher, a generator's weight driver and an embedded engine
in a process of its own, with a model of that shape and random weights, two long requests in flight
(retracted) and one-token requests one after the other. The limit, measured in alternation, is one
broadcast of the same bytes as one flat tensor between two processes: no copy, no phase. Prints one
JSON line:

    flat_s           the limit, median of the rounds (fastest in flat_best_s)
    publish_s        from `publish` to the commit, median (fastest in publish_best_s)
    copy_s           of it, what kept the trainer: copying the weights into buckets
    seen_pause_s     longest wait of a one-token request less the median one, median of the rounds
    pause_s          by the driver: {"begin", "go", "receive", "verify", "probe"}, medians
    transfer_ratio   flat_best_s / receive part of the fastest round: copying, broadcasting, loading
    publish_ratio    flat_best_s / publish_best_s: all phases, checksum and probe included
    cpu_ratio        CPU seconds of flat broadcasts over those of publishes, both ends, all rounds
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import yaml
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from async_grpo.config.generation import OnWeightUpdate
from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.engine_api import GenerateRequest, SamplingParams
from async_grpo.errors import GenerationError
from async_grpo.generation.client import HttpEngineClient
from async_grpo.generation.engines import Engine
from async_grpo.generation.names import GivenNames, Holder
from async_grpo.generation.weight_driver import WeightDriver
from async_grpo.replay.generator_client import GeneratorClient
from async_grpo.replay.server import ReplayServer
from async_grpo.replay.trainer_client import TrainerClient
from async_grpo.replay_parts import Dataset, Probe, RoleStatus
from async_grpo.training.feed import LoopThread
from async_grpo.training.model import load_policy
from async_grpo.training.weight_source import PolicyWeights
from async_grpo.types import WeightsName
from async_grpo.weights.group import join_group, listen
from async_grpo.weights.publish_result import PublishResult
from async_grpo.weights.publisher import WeightPublisher

REPOSITORY = Path(__file__).parents[2]
SIZES = {  # layers, hidden, kv heads, heads, intermediate, vocabulary
    "135m": (30, 576, 3, 9, 1536, 49152),
    "10m": (6, 256, 2, 8, 768, 16384),
}
TIMEOUT_S = 300.0
PROMPT = [3, 4, 5, 6]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        config = make_config(options, Path(directory))
        print(json.dumps(Bench(config, options.rounds).run()))


def make_config(options: argparse.Namespace, directory: Path) -> Config:
    """A model on the disk and a run that uses it."""
    layers, hidden, kv_heads, heads, intermediate, vocabulary = SIZES[options.size]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate,
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=None,
            bos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip
    model.to(getattr(torch, options.dtype)).save_pretrained(directory / "model")
    content = {
        "run": {
            "output_dir": str(directory / "run"),
            "num_train_steps": 1000,
            "no_progress_timeout_s": 600,
        },
        "policy": {"model": str(directory / "model"), "dtype": options.dtype},
        "task": {"name": "reverse"},
        "replay": {"address": "tcp://127.0.0.1:0", "peer_timeout_s": 600, "heartbeat_s": 1},
        "engine": {
            "max_running_requests": 8,
            "control_timeout_s": TIMEOUT_S,
            "context_length": 4096,
            "start_timeout_s": 600,
        },
        "weights": {"timeout_s": TIMEOUT_S},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_config(path)


class Source:
    """The policy's weights, another each time."""

    def __init__(self, config: Config) -> None:
        policy = load_policy(config.policy, config.trainer, torch.device("cpu"))
        self._policy = policy
        self._weights = PolicyWeights(policy, config.weights, seed=0)

    @torch.no_grad()
    def change(self) -> None:
        """A small step."""
        for parameter in self._policy.module.parameters():
            parameter.mul_(1.001)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Of the model."""
        return self._weights.named_tensors()

    def probe(self) -> Probe:
        """By the model."""
        return self._weights.probe()


class Flat:
    """The limit: this process broadcasts one flat tensor to another process."""

    def __init__(self, num_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        store, port = listen("127.0.0.1")
        self.process = context.Process(target=receive_flat, args=(theirs, port, num_bytes))
        self.process.start()
        self._payload = torch.ones(num_bytes, dtype=torch.uint8)
        self._group = join_group(
            host="127.0.0.1", port=port, rank=0, world_size=2, group_name="flat", backend="gloo",
            timeout_s=TIMEOUT_S, store=store,
        )  # fmt: skip

    def seconds(self) -> float:
        """One broadcast, until the other end says that it has everything."""
        started = time.perf_counter()
        self._pipe.send(True)
        self._group.broadcast(self._payload)
        self._pipe.recv()
        return time.perf_counter() - started

    def close(self) -> None:
        """End the other process."""
        self._pipe.send(False)
        self.process.join(20)
        self._group.close()


def receive_flat(pipe: Connection, port: int, num_bytes: int) -> None:
    """The other end."""
    torch.set_num_threads(1)
    group = join_group(
        host="127.0.0.1", port=port, rank=1, world_size=2, group_name="flat", backend="gloo",
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    while pipe.recv():
        group.broadcast(payload)
        pipe.send(True)


class Bench:
    """All parts, and the rounds."""

    def __init__(self, config: Config, num_rounds: int) -> None:
        self._config, self._num_rounds = config, num_rounds
        self._source = Source(config)
        self._answers: list[float] = []
        """when one-token requests were answered"""

    def run(self) -> dict[str, object]:
        """The report."""
        command = [
            sys.executable, "-m", "async_grpo", "engine",
            str(Path(self._config.run.output_dir).parent / "config.yaml"), "engine.port=0",
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        engine = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        num_bytes = sum(t.numel() * t.element_size() for _, t in self._source.named_tensors())
        flat = Flat(num_bytes)
        try:
            assert engine.stdout is not None
            url = json.loads(engine.stdout.readline())["url"]
            pids = [engine.pid, flat.process.pid or 0]
            return asyncio.run(self._measure(url, flat, pids, num_bytes))
        finally:
            flat.close()
            engine.terminate()
            engine.wait(30)

    async def _measure(
        self, url: str, flat: Flat, pids: list[int], num_bytes: int
    ) -> dict[str, object]:
        server = ReplayServer(self._config)
        serving = asyncio.create_task(server.serve())
        config = replace(self._config, replay=replace(self._config.replay, address=server.address))
        generator = GeneratorClient(
            config, name="g", dataset=Dataset(fingerprint="bench", num_prompts=1)
        )
        client = HttpEngineClient(url, control_timeout_s=TIMEOUT_S)
        loop = LoopThread("trainer")
        trainer = TrainerClient(config)
        await generator.connect()
        await asyncio.to_thread(loop.call, trainer.connect())
        started = await asyncio.to_thread(loop.call, trainer.start(0))
        publisher = WeightPublisher(
            trainer, loop.call, config.weights, run_directory=Path(config.run.output_dir)
        )
        info = await client.server_info(timeout_s=60)
        names = GivenNames(Holder("bench", "g/0"))
        engine = Engine("g/0#1", client, info, lambda: None, names)
        tasks: set[asyncio.Task[None]] = set()
        driver = WeightDriver(
            generator,
            lambda: [engine],
            lambda work: tasks.add(asyncio.create_task(work)),
            config.weights,
            on_weight_update=OnWeightUpdate.retract,
            dtype=config.policy.dtype,
        )
        await client.adopt(engine.info)
        await generator.heartbeat([engine.status], [], RoleStatus(state="bench"))
        background = [
            asyncio.create_task(work)
            for work in (watch(generator, driver), self._knock(client), long_request(client, 0),
                         long_request(client, 1))
        ]  # fmt: skip
        rounds: list[dict[str, float]] = []
        try:
            for number in range(self._num_rounds + 1):
                weights = WeightsName(started.incarnation, number)
                rounds.append(await self._round(publisher, flat, weights, pids))
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await asyncio.to_thread(publisher.close)
            await asyncio.to_thread(loop.call, trainer.close())
            loop.close()
            await client.close()
            driver.close()
            await generator.close()
            server.stop("measured")
            with suppress(asyncio.CancelledError):
                await serving
            server.close()
        return summary(rounds[1:], num_bytes)  # the first builds the group

    async def _round(
        self, publisher: WeightPublisher, flat: Flat, weights: WeightsName, pids: list[int]
    ) -> dict[str, float]:
        """One flat broadcast, one publish."""
        cpu_start = cpu_seconds(pids)
        flat_s = await asyncio.to_thread(flat.seconds)
        cpu_flat = cpu_seconds(pids)
        self._source.change()
        self._answers.clear()
        started = time.perf_counter()
        await asyncio.to_thread(publisher.publish, weights, self._source)
        copied = time.perf_counter()
        await asyncio.to_thread(publisher.wait)
        ended = time.perf_counter()
        result: PublishResult | None = publisher.last_result
        assert result is not None
        assert not result.failures, result
        await asyncio.sleep(0.5)  # so that a request beyond the pause is among those measured
        gaps = [b - a for a, b in zip(self._answers, self._answers[1:], strict=False)]
        values = {
            "flat_s": flat_s,
            "publish_s": ended - started,
            "copy_s": copied - started,
            "seen_pause_s": max(gaps) - statistics.median(gaps) if gaps else 0.0,
            "flat_cpu_s": cpu_flat - cpu_start,
            "publish_cpu_s": cpu_seconds(pids) - cpu_flat,
        }
        return values | {f"pause.{k}": v for k, v in result.reports[0].seconds.items()}

    async def _knock(self, client: HttpEngineClient) -> None:
        """One-token requests, one after the other."""
        number = 0
        while True:
            number += 1
            await client.generate(sampling(f"knock-{number}", 1), timeout_s=TIMEOUT_S)
            self._answers.append(time.perf_counter())


async def watch(generator: GeneratorClient, driver: WeightDriver) -> None:
    """Orders for the driver."""
    seen = 0
    while True:
        reply = await generator.watch(seen)
        seen = reply.revision
        driver.on_orders(reply.orders)


async def long_request(client: HttpEngineClient, number: int) -> None:
    """Requests that outlast updates, one after the other."""
    count = 0
    while True:
        count += 1
        with suppress(GenerationError):
            await client.generate(sampling(f"long-{number}-{count}", 2000), timeout_s=TIMEOUT_S)


def sampling(rid: str, num_tokens: int) -> GenerateRequest:
    """A request of exactly so many tokens."""
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    return GenerateRequest(input_ids=PROMPT, sampling_params=params, rid=rid, return_logprob=True)


def cpu_seconds(pids: list[int]) -> float:
    """Of this process and the others, so far."""
    total = time.process_time()
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def summary(rounds: list[dict[str, float]], num_bytes: int) -> dict[str, object]:
    """Medians and ratios."""
    median = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    best = {key: min(r[key] for r in rounds) for key in rounds[0]}
    flat_cpu, publish_cpu = (sum(r[key] for r in rounds) for key in ("flat_cpu_s", "publish_cpu_s"))
    report: dict[str, object] = {
        "mbytes": round(num_bytes / 1e6, 1),
        "rounds": len(rounds),
        **{key: round(median[key], 4) for key in ("flat_s", "publish_s", "copy_s", "seen_pause_s")},
        "flat_best_s": round(best["flat_s"], 4),
        "publish_best_s": round(best["publish_s"], 4),
        "pause_s": {
            key.removeprefix("pause."): round(value, 4)
            for key, value in median.items()
            if key.startswith("pause.")
        },
        "transfer_ratio": round(best["flat_s"] / best["pause.receive"], 3),
        "publish_ratio": round(best["flat_s"] / best["publish_s"], 3),
        "cpu_ratio": round(flat_cpu / publish_cpu, 3),
    }
    return report


if __name__ == "__main__":
    main()
