"""A whole generator against a fake replay server and fake engines, on one event loop."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from async_grpo.config.engine import EngineSection
from async_grpo.config.generation import GenerationSection, OnWeightUpdate
from async_grpo.config.policy import PolicySection
from async_grpo.config.replay import ReplaySection
from async_grpo.config.run import RunSection
from async_grpo.config.schema import Config
from async_grpo.config.task import TaskSection
from async_grpo.config.weights import WeightsSection
from async_grpo.errors import EngineMisconfigured
from async_grpo.generation.client import HttpEngineClient
from async_grpo.generation.sample_log import SampleLog
from async_grpo.generation.witness import WitnessLog
from async_grpo.interfaces import EngineClient, RewardPool
from async_grpo.replay_parts import CellPhase
from async_grpo.roles.generator_loops import Generator
from async_grpo.roles.generator_start import Room
from async_grpo.tasks.held_out import split_task
from async_grpo.tasks.prompts import PromptSource
from async_grpo.tasks.reverse import ReverseTask
from async_grpo.types import Prompt, RewardOutcome
from tests.fakes.fake_engine import EOS, FakeEngine
from tests.fakes.fake_replay import FakeReplay

LETTERS = "abcdefgh>"
FIRST_LETTER_ID = 2


class LetterTokenizer:
    """One id per letter; EOS is the fake engine's."""

    bos_token_id: int | None = None
    eos_token_id: int | None = EOS
    adds_bos = False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [FIRST_LETTER_ID + LETTERS.index(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(
            LETTERS[(token - FIRST_LETTER_ID) % len(LETTERS)]
            for token in token_ids
            if token >= FIRST_LETTER_ID
        )

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], **options: Any
    ) -> str | list[int]:
        return conversation[-1]["content"]


@dataclass
class ScriptedRewards:
    """`interfaces.RewardPool` without processes: by default the members get 0, 1, 2, ..."""

    scores: list[tuple[RewardOutcome, float]] | None = None
    texts: list[list[str]] = field(default_factory=list)
    last_error: str = "prompt 3: on purpose"

    async def score(
        self, completions: Sequence[str], prompt: Prompt
    ) -> list[tuple[RewardOutcome, float, dict[str, float]]]:
        self.texts.append(list(completions))
        scores = self.scores or [
            (RewardOutcome.SCORED, float(member)) for member in range(len(completions))
        ]
        return [(outcome, reward, {}) for outcome, reward in scores]

    async def close(self) -> None:
        pass


class FakeHandle:
    """The "process" of a fake engine."""

    def __init__(self, engine: FakeEngine, *, owned: bool) -> None:
        self.engine = engine
        self.owned = owned
        self.url = engine.url
        self._ended = asyncio.Event()
        self.misconfigured = False

    @property
    def ended(self) -> bool:
        """It was killed or terminated."""
        return self._ended.is_set()

    async def wait(self) -> str:
        await self._ended.wait()
        if self.misconfigured:
            raise EngineMisconfigured("no such flag")
        return "the fake process ended"

    async def kill(self) -> None:
        if self.owned:
            self._ended.set()
            await self.engine.stop()

    async def terminate(self) -> None:
        await self.kill()


class World:
    """What a test holds in its hands.

    Attributes:
        engines: every engine that was started, in order of start.
        failure_expected: the test has seen the generator fail.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_engines: int = 1,
        group_size: int = 4,
        owned: bool = True,
        manual: bool = False,
        slots: int = 64,
        deterministic: bool = False,
        context_length: int = 512,
        rewards: RewardPool | None = None,
        max_restarts: int = 2,
        group_timeout_s: float = 30.0,
        weights_timeout_s: float = 5.0,
        on_weight_update: OnWeightUpdate = OnWeightUpdate.auto,
    ) -> None:
        self.config = Config(
            run=RunSection(output_dir=str(directory), num_train_steps=1),
            policy=PolicySection(model="none"),
            task=TaskSection(name="reverse"),
            generation=GenerationSection(
                group_size=group_size,
                max_new_tokens=8,
                group_timeout_s=group_timeout_s,
                on_weight_update=on_weight_update,
            ),
            engine=EngineSection(max_restarts=max_restarts, control_timeout_s=2.0),
            replay=ReplaySection(heartbeat_s=0.1, peer_timeout_s=1.0),
            weights=WeightsSection(timeout_s=weights_timeout_s),
        )
        self.replay = FakeReplay()
        self.rewards = rewards or ScriptedRewards()
        self.engines: list[FakeEngine] = []
        self.handles: list[FakeHandle] = []
        self._num_engines = num_engines
        self._owned = owned
        self._manual = manual
        self._slots = slots
        self._deterministic = deterministic
        self._context_length = context_length
        self.witness_path = directory / "witness.jsonl"
        self.samples_path = directory / "samples.jsonl"
        self.failure_expected = False
        self.generator: Generator
        self.task: asyncio.Task[str]

    async def _start_engine(self, slot: int, engine_id: str) -> FakeHandle:
        if not self._owned and len(self.engines) > slot:
            engine = self.engines[slot]
        else:
            engine = FakeEngine(
                manual=self._manual,
                max_running_requests=self._slots,
                context_length=self._context_length,
                seed=len(self.engines),
                deterministic=self._deterministic,
            )
            await engine.start()
            self.engines.append(engine)
        handle = FakeHandle(engine, owned=self._owned)
        self.handles.append(handle)
        return handle

    def _make_client(self, url: str) -> EngineClient:
        return HttpEngineClient(url, control_timeout_s=self.config.engine.control_timeout_s)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["World"]:
        """The generator runs inside the block; its failure is raised at the end."""
        tokenizer = LetterTokenizer()
        train_task, held_out = split_task(ReverseTask(seed=0), self.config.eval, seed=0)
        prompts = PromptSource(train_task, tokenizer, held_out=held_out)
        samples = SampleLog(self.samples_path, generator="gen", max_per_version=4)
        with WitnessLog(self.witness_path) as witness, samples:
            self.generator = Generator(
                self.config,
                "gen",
                run="run",
                replay=self.replay,
                start_engines=[
                    partial(self._start_engine, slot) for slot in range(self._num_engines)
                ],
                make_client=self._make_client,
                prompts=prompts,
                room=Room(self.config, prompts),
                tokenizer=tokenizer,
                rewards=self.rewards,
                witness=witness,
                samples=samples,
            )
            self.task = asyncio.create_task(self.generator.run())
            try:
                yield self
            finally:
                if not self.task.done():
                    self.task.cancel()
                await asyncio.wait([self.task])
                for engine in self.engines:
                    await engine.stop()
            if not self.task.cancelled() and not self.failure_expected:
                self.task.result()

    async def publish_by_hand(
        self, weights: str, engine_id: str, *, fresh: bool = True
    ) -> FakeEngine:
        """An update of an engine that samples only when told; returns the engine."""
        sequence = await self.replay.order(weights, [engine_id], fresh=fresh)
        await self.replay.phase_of(sequence, engine_id, CellPhase.BEGUN)
        engine = next(engine for engine in self.engines if engine.session_open)
        await self.replay.go(sequence)
        probe = f"probe-{sequence}-{engine_id}"
        await engine.until(lambda: probe in engine.running)
        # the probe alone: members in flight stay where they are
        engine._advance(engine._running[probe], 1)
        await self.replay.phase_of(sequence, engine_id, CellPhase.COMMITTED)
        return engine
