"""Insert, draw and fetch through the replay server, against raw ZeroMQ with the same bytes.

    python tools/bench/replay_throughput.py [--steps 6] [--groups 16] [--tokens 8192]

Both servers are processes of their own, both clients live in this one. The raw side is a DEALER
that sends the same frames to a ROUTER, awaits an acknowledgment of each and gets them back; it
checks and records nothing, and knows no tickets. Prints the ratio of the two rates, medians over
steps; exits 1 below 0.8.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import zmq
from codec import make_group

from async_grpo.config.generation import GenerationSection
from async_grpo.config.load import to_yaml
from async_grpo.config.policy import PolicySection
from async_grpo.config.replay import ReplaySection
from async_grpo.config.run import RunSection
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.config.staleness import StalenessSection
from async_grpo.config.task import TaskSection
from async_grpo.replay.client import GeneratorClient, TrainerClient
from async_grpo.replay_parts import (
    CellPhase,
    Dataset,
    EngineState,
    EngineStatus,
    Probe,
    RoleStatus,
)
from async_grpo.transport.codec import encode_group, num_bytes
from async_grpo.transport.parent import start_child
from async_grpo.types import InsertOutcome, WeightsName

REACH = 0.8
COMPLETIONS = 16
ENGINE_ID = "bench/0#1"

RAW_SERVER = """
import sys, zmq
router = zmq.Context().socket(zmq.ROUTER)
router.bind("tcp://127.0.0.1:0")
print(router.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
held = {}
while True:
    peer, key, *frames = router.recv_multipart(copy=False)
    if frames:
        held[key.bytes] = frames
        router.send_multipart([peer, key])
    else:
        router.send_multipart([peer, key, *held.pop(key.bytes)], copy=False)
"""


def bench_config(root: Path, options: argparse.Namespace) -> Config:
    """A run whose window admits every group of the benchmark without a further publish."""
    most = 1 << 31
    return Config(
        run=RunSection(output_dir=str(root), num_train_steps=options.steps),
        policy=PolicySection(model="none"),
        task=TaskSection(name="reverse"),
        generation=GenerationSection(group_size=COMPLETIONS, max_new_tokens=options.tokens),
        staleness=StalenessSection(max_staleness=options.steps, pipeline_depth=options.steps),
        replay=ReplaySection(
            address="tcp://127.0.0.1:0",
            groups_per_step=options.groups,
            max_bytes=most,
            credit_bytes=1 << 28,
            peer_timeout_s=600.0,
        ),
    )


async def start_server(config: Config, root: Path) -> "subprocess.Popen[bytes]":
    """The replay server's own process; sets the address that it was given."""
    path = root / "bench.yaml"
    path.write_text(to_yaml(config))
    process = start_child([sys.executable, "-m", "async_grpo", "replay", str(path)])
    address = RunDirectory(root).bound_address
    async with asyncio.timeout(60):
        while not address.exists():  # noqa: ASYNC110 -- a file has no event
            await asyncio.sleep(0.05)
    config.replay.address = address.read_text().strip()
    return process


async def go_live(generator: GeneratorClient, trainer: TrainerClient) -> None:
    """Publish version 0 to one engine that exists on paper."""
    weights = WeightsName((await trainer.start(0)).incarnation, 0)
    engine = EngineStatus(engine_id=ENGINE_ID, state=EngineState.SERVING, wants_sync=True)
    await generator.heartbeat([engine], [], RoleStatus(state="bench"))
    probe = Probe(token_ids=[1, 2], logprobs=[-1.0], tolerance=1.0)
    announced = await trainer.announce(
        1, weights, wished_only=False, plan_hash="", buckets=[], probe=probe
    )
    for phase in (CellPhase.BEGUN, CellPhase.COMMITTED):
        await generator.report_phase(
            announced.publish_sequence, announced.cells[0].cell_id, ENGINE_ID, phase, ""
        )


async def through_server(options: argparse.Namespace) -> list[float]:
    """Seconds of each step: insert all groups, draw, fetch all."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        config = bench_config(root, options)
        process = await start_server(config, root)
        dataset = Dataset(fingerprint="bench", num_prompts=1000)
        generator = GeneratorClient(config, name="bench", dataset=dataset)
        trainer = TrainerClient(config)
        try:
            await generator.connect()
            await trainer.connect()
            await go_live(generator, trainer)
            return [
                await one_step(generator, trainer, step, options) for step in range(options.steps)
            ]
        finally:
            await generator.close()
            await trainer.close()
            process.terminate()
            process.wait(timeout=20)


async def one_step(
    generator: GeneratorClient, trainer: TrainerClient, step: int, options: argparse.Namespace
) -> float:
    """Frames in, frames out. Claims, encoding, decoding and the ack are outside the time."""
    payloads = {}
    for _ in range(options.groups):
        ticket = await generator.claim()
        assert ticket is not None, "no ticket: the window is too small for this benchmark"
        group = make_group(COMPLETIONS, options.tokens)
        group.group_id, group.attempt = ticket.group_id, ticket.attempt
        payloads[ticket.group_id] = group, encode_group(group)
    start = time.perf_counter()
    outcomes = await asyncio.gather(
        *(generator.insert_frames(group, frames) for group, frames in payloads.values())
    )
    drawn = await trainer.draw(step + 1, step)
    received = await asyncio.gather(
        *(trainer.fetch_frames(leased.group_id, leased.attempt) for leased in drawn.groups)
    )
    seconds = time.perf_counter() - start
    assert set(outcomes) == {InsertOutcome.STORED}, outcomes
    for leased, frames in zip(drawn.groups, received, strict=True):
        sent = payloads[leased.group_id][1]
        assert [bytes(frame) for frame in frames] == [bytes(frame) for frame in sent]
    await trainer.ack(
        step, step + 1, [(leased.group_id, leased.attempt) for leased in drawn.groups]
    )
    return seconds


def raw(options: argparse.Namespace) -> list[float]:
    """Seconds of each step over raw sockets: send all, await all acks, get all back."""
    process = start_child([sys.executable, "-c", RAW_SERVER], stdout=subprocess.PIPE)
    assert process.stdout is not None
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, 30_000)
    try:
        dealer.connect(process.stdout.readline().decode().strip())
        frames = encode_group(make_group(COMPLETIONS, options.tokens))
        keys = [b"%d" % number for number in range(options.groups)]
        seconds = []
        for _ in range(options.steps):
            start = time.perf_counter()
            for key in keys:
                dealer.send_multipart([key, *frames], copy=False)
            for _ in keys:
                dealer.recv_multipart(copy=False)
            for key in keys:
                dealer.send(key)
            for _ in keys:
                dealer.recv_multipart(copy=False)
            seconds.append(time.perf_counter() - start)
        return seconds
    finally:
        dealer.close(linger=0)
        context.term()
        process.kill()
        process.wait(timeout=20)


def main() -> int:
    """Measure both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    size = num_bytes(encode_group(make_group(COMPLETIONS, options.tokens)))
    moved = 2 * options.groups * size
    raw_s = statistics.median(raw(options)[1:])
    server_s = statistics.median(asyncio.run(through_server(options))[1:])
    for name, seconds in (("raw ZeroMQ", raw_s), ("replay server", server_s)):
        print(f"{name:14} {moved / seconds / 1e9:.3f} GB/s, {seconds * 1e3:.1f} ms per step")
    ratio = raw_s / server_s
    print(f"ratio {ratio:.2f} (reach {REACH}), {options.groups} groups of {size} bytes per step")
    return int(ratio < REACH)


if __name__ == "__main__":
    sys.exit(main())
