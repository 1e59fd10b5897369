"""Insert, draw and fetch through the replay server, against raw ZeroMQ with the same bytes.

    python tools/bench/replay_throughput.py [--steps 12] [--groups 16] [--tokens 8192]

Both servers are processes of their own, both clients live in this one. The raw side is a DEALER
that sends the same frames to a ROUTER, awaits an acknowledgment of each, asks for each and gets it
back; it checks and records nothing, and knows no tickets. The two take turns, step by step, so
that a busy machine disturbs both alike. Prints the ratio of the two rates, medians over steps, and
that of the processor time (client and server, all threads), which other processes disturb less.
Exits 1 if the ratio of rates is below 0.8. Linux only.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from async_grpo.replay.generator_client import GeneratorClient
from async_grpo.replay.trainer_client import TrainerClient
from async_grpo.replay_parts import (
    CellPhase,
    Dataset,
    EngineState,
    EngineStatus,
    Probe,
    RoleStatus,
)
from async_grpo.transport.codec import encode_group, num_bytes
from async_grpo.transport.group_header import Frame
from async_grpo.transport.parent import start_child
from async_grpo.types import InsertOutcome, RolloutGroup, WeightsName

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
    probe = Probe(sets=[], tolerance=1.0, max_tolerance=1.0)
    announced = await trainer.announce(
        1, weights, wished_only=False, plan_hash="", buckets=[], probe=probe, digests={}
    )
    for phase in (CellPhase.BEGUN, CellPhase.COMMITTED):
        await generator.report_phase(
            announced.publish_sequence, announced.cells[0].cell_id, ENGINE_ID, phase, ""
        )


@dataclass
class Cost:
    """What each step took, in seconds."""

    server_pid: int
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """One step."""
        cpu_s, start = self._cpu_s(), time.perf_counter()
        yield
        self.wall_s.append(time.perf_counter() - start)
        self.cpu_s.append(self._cpu_s() - cpu_s)

    def medians(self) -> tuple[float, float]:
        """Wall and processor seconds of a step; the first step warms up."""
        return statistics.median(self.wall_s[1:]), statistics.median(self.cpu_s[1:])

    def _cpu_s(self) -> float:
        # the clock of another process, as clock_getcpuclockid(3) makes it on Linux
        return time.process_time() + time.clock_gettime((~self.server_pid << 3) | 2)


class RawSide:
    """The limit: the same frames over two sockets."""

    def __init__(self, stack: ExitStack) -> None:
        process = start_child([sys.executable, "-c", RAW_SERVER], stdout=subprocess.PIPE)
        stack.callback(process.wait, timeout=20)
        stack.callback(process.kill)
        assert process.stdout is not None
        context = stack.enter_context(zmq.Context())
        self._dealer = stack.enter_context(context.socket(zmq.DEALER))
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.RCVTIMEO, 30_000)
        self._dealer.connect(process.stdout.readline().decode().strip())
        self.cost = Cost(process.pid)

    def step(self, payloads: Sequence[Sequence[Frame]]) -> None:
        """Send all, await all acks, get all back."""
        keys = [b"%d" % number for number in range(len(payloads))]
        with self.cost.measured():
            for key, frames in zip(keys, payloads, strict=True):
                self._dealer.send_multipart([key, *frames], copy=False)
            for _ in keys:
                self._dealer.recv_multipart(copy=False)
            for key in keys:
                self._dealer.send(key)
            # kept until all are there, as a step's groups are
            received = [self._dealer.recv_multipart(copy=False) for _ in keys]
        assert same_bytes([frame.buffer for frame in received[-1][1:]], payloads[-1])


class ServerSide:
    """The replay server, with a generator and a trainer."""

    def __init__(self, config: Config, process: "subprocess.Popen[bytes]") -> None:
        dataset = Dataset(fingerprint="bench", num_prompts=1000)
        self.generator = GeneratorClient(config, name="bench", dataset=dataset)
        self.trainer = TrainerClient(config)
        self.cost = Cost(process.pid)
        self._step = 0

    async def claim(self, groups: Sequence[RolloutGroup]) -> None:
        """Give each group the ids of a ticket."""
        for group in groups:
            ticket = await self.generator.claim()
            assert ticket is not None, "no ticket: the window is too small for this benchmark"
            group.group_id, group.attempt = ticket.group_id, ticket.attempt

    async def step(
        self, groups: Sequence[RolloutGroup], payloads: Sequence[Sequence[Frame]]
    ) -> None:
        """Insert all, draw, fetch all. Claims, encoding, decoding and the ack are not measured."""
        with self.cost.measured():
            outcomes = await asyncio.gather(*map(self.generator.insert_frames, groups, payloads))
            drawn = await self.trainer.draw(self._step + 1, self._step)
            received = await asyncio.gather(
                *(self.trainer.fetch_frames(item.group_id, item.attempt) for item in drawn.groups)
            )
        assert set(outcomes) == {InsertOutcome.STORED}, outcomes
        sent = {group.group_id: frames for group, frames in zip(groups, payloads, strict=True)}
        for leased, frames in zip(drawn.groups, received, strict=True):
            assert same_bytes(frames, sent[leased.group_id])
        keys = [(leased.group_id, leased.attempt) for leased in drawn.groups]
        await self.trainer.ack(self._step, self._step + 1, keys)
        self._step += 1


def same_bytes(received: Sequence[Frame], sent: Sequence[Frame]) -> bool:
    """Whether the frames are equal."""
    return [bytes(frame) for frame in received] == [bytes(frame) for frame in sent]


async def measure(options: argparse.Namespace) -> tuple[Cost, Cost]:
    """Both costs."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = bench_config(root, options)
        process = await start_server(config, root)
        stack.callback(process.wait, timeout=20)
        stack.callback(process.terminate)
        raw, through = RawSide(stack), ServerSide(config, process)
        groups = [make_group(COMPLETIONS, options.tokens) for _ in range(options.groups)]
        try:
            await through.generator.connect()
            await through.trainer.connect()
            await go_live(through.generator, through.trainer)
            for _ in range(options.steps):
                await through.claim(groups)
                payloads = [encode_group(group) for group in groups]
                raw.step(payloads)
                await through.step(groups, payloads)
        finally:
            await through.generator.close()
            await through.trainer.close()
        return raw.cost, through.cost


def main() -> int:
    """Measure both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    size = num_bytes(encode_group(make_group(COMPLETIONS, options.tokens)))
    moved = 2 * options.groups * size
    raw, through = (cost.medians() for cost in asyncio.run(measure(options)))
    for name, (wall_s, cpu_s) in (("raw ZeroMQ", raw), ("replay server", through)):
        print(
            f"{name:14} {moved / wall_s / 1e9:.3f} GB/s, {wall_s * 1e3:.1f} ms per step, "
            f"{cpu_s * 1e3:.1f} ms of processor time"
        )
    ratio, cpu_ratio = (limit / ours for limit, ours in zip(raw, through, strict=True))
    print(f"ratio {ratio:.2f} (reach {REACH}), {options.groups} groups of {size} bytes per step")
    print(f"ratio of processor time {cpu_ratio:.2f}")
    return int(ratio < REACH)


if __name__ == "__main__":
    sys.exit(main())
