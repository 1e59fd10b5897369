"""All checks of one engine, started as a generator would or attached to.

A check that fails does not end the others, unless they build on it or the engine is gone. An
attached engine is looked at before it is touched: attaching aborts whatever runs on it.
"""

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from async_grpo.config.schema import Config
from async_grpo.doctor.report import Finding, Verdict, fail, ok, skipped
from async_grpo.doctor.sampling_checks import (
    check_distribution,
    check_logprobs,
    check_noise,
    other_temperature,
    take_samples,
)
from async_grpo.doctor.subject import Subject
from async_grpo.doctor.text_checks import (
    Texts,
    check_text,
    check_vocabulary,
    trial_prompts,
)
from async_grpo.doctor.two_policies import TwoPolicies
from async_grpo.doctor.update_checks import Updates
from async_grpo.doctor.weight_link import WeightLink
from async_grpo.engine_api import ModelInfo, ServerInfo
from async_grpo.errors import GenerationError, WeightSyncError
from async_grpo.generation.engines import Engine
from async_grpo.generation.handles import StartEngine
from async_grpo.generation.handshake import identify, shake_hands
from async_grpo.generation.holding import ANSWER_S, BUSY_S, let_go
from async_grpo.generation.lifecycle import EngineSlot, MakeClient
from async_grpo.generation.names import Holder
from async_grpo.interfaces import EngineClient
from async_grpo.tasks.tokenizer import FastTokenizer

logger = logging.getLogger(__name__)

NAME = "doctor"
"""Of the generator that it stands for, in names of logs."""
_START_ADVICE = (
    "is it started, and its address right? One that is started here logs to "
    "logs/doctor.engine0.log in the run directory"
)
_UPDATE_ADVICE = (
    "see the engine's log; both ends must reach each other at weights.host, serve the same model "
    "and speak the same backend (weights.backend)"
)
_ENGINE_ADVICE = "see the engine's log"
ENGINE_CHECKS = (
    "reach", "vocabulary", "log-probs", "distribution", "noise floor", "text", "weights",
    "prefix cache", "spans",
)  # fmt: skip
"""In their order; a check's name may go on behind it."""

_NO_LOGPROBS = "log-probs differ, and every line here compares them"
_LOAD_QUESTIONS, _LOAD_INTERVAL_S = 4, 0.5


class _Gone(Exception):  # noqa: N818 -- an outcome: what is left of the examination makes no sense
    """The engine does not answer."""


@dataclass(frozen=True)
class ExaminedPolicy:
    """What engines are compared with."""

    policies: TwoPolicies
    tokenizer: FastTokenizer | None
    texts: Texts | None


class Examination:
    """Of one engine.

    Args:
        config: of the run.
        policy: what the engine should serve.
        make_client: connections to an engine.
        start: starts it or attaches to it.
        url: of an attached one; empty: it is started.
    """

    def __init__(
        self,
        config: Config,
        policy: ExaminedPolicy,
        make_client: MakeClient,
        start: StartEngine,
        url: str,
    ) -> None:
        self._config, self._policy = config, policy
        self._make_client, self._start, self._url = make_client, start, url
        # the same each time, so that what an examination leaves behind is its own to clean up
        directory = Path(config.run.output_dir).resolve()
        self._run = f"{NAME}-{zlib.crc32(str(directory).encode()):08x}"
        self.findings: list[Finding] = []

    async def run(self) -> bool:
        """All checks; whether the engine was there until the end."""
        try:
            if self._url and (reason := await self._left_alone()):
                self._skip_the_rest(reason)
                return True
            async with self._engine() as engine:
                await self._examine(engine)
        except _Gone as gone:
            self._add(fail("reach", str(gone), _START_ADVICE))
            return False
        except GenerationError as error:
            self._add(fail("attach", str(error), _ENGINE_ADVICE))
            self._skip_the_rest("it was not attached to")
        return True

    def _add(self, finding: Finding) -> None:
        self.findings.append(replace(finding, engine=self._url or "not started"))

    def _skip_the_rest(self, reason: str) -> None:
        """Say of each check that was not done why not."""
        done = [finding.check for finding in self.findings]
        for check in ENGINE_CHECKS:
            if not any(name.startswith(check) for name in done):
                self._add(skipped(check, reason))

    async def _left_alone(self) -> str:
        """Look at an attached engine without touching it.

        Returns:
            Why it must not be touched; empty: it may be.

        Raises:
            _Gone: it does not answer.
        """
        client = self._make_client(self._url)
        try:
            timeout_s = self._config.engine.control_timeout_s
            info = await identify(client, attached=True, timeout_s=timeout_s)
            model_info, count = await client.model_info(), await _num_in_flight(client)
        except GenerationError as error:
            raise _Gone(str(error)) from error
        finally:
            await client.close()
        self._look(info, model_info)
        if any(finding.verdict is Verdict.FAIL for finding in self.findings):
            return "this is no engine for the policy"
        return f"{count} requests of somebody else are in flight" if count else ""

    def _look(self, info: ServerInfo, model_info: ModelInfo) -> None:
        """What it says of itself."""
        self._add(_reach(info, model_info))
        model, texts = self._policy.policies.model, self._policy.texts
        self._add(check_vocabulary(info, model_info, model, texts))

    @asynccontextmanager
    async def _engine(self) -> AsyncIterator[Engine]:
        """The engine, started or attached to as a generator does; ended if it was started.

        Raises:
            _Gone: it does not answer in time.
            GenerationError: it answers, but is not for this run.
        """
        section = replace(self._config.engine, max_restarts=0)
        attached = bool(self._url)
        changed = asyncio.Event()
        slot = EngineSlot(
            f"{NAME}/0",
            self._start,
            self._client_of,
            section,
            liveness_s=self._config.replay.heartbeat_s,
            on_change=changed.set,
            run=self._run,
        )
        work = asyncio.create_task(slot.run())
        patience_s = section.control_timeout_s + (
            ANSWER_S + BUSY_S if attached else section.start_timeout_s
        )
        engine: Engine | None = None
        try:
            engine = await _first_life(slot, changed, patience_s, attached=attached)
            yield engine
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if attached and engine is not None:
                await self._leave(engine.update_group)

    def _client_of(self, url: str) -> EngineClient:
        self._url = url
        return self._make_client(url)

    async def _examine(self, engine: Engine) -> None:
        policies, tokenizer = self._policy.policies, self._policy.tokenizer
        end = None if tokenizer is None else tokenizer.eos_token_id
        subject = Subject(
            config=self._config,
            url=self._url,
            engine=engine,
            policies=policies,
            prompts=trial_prompts(self._policy.texts, policies.model, seed=self._config.run.seed),
            stop_token_ids=[] if end is None else [end],
        )
        link = WeightLink(subject)
        try:
            if not self.findings:  # started here
                self._look(engine.info, await engine.client.model_info())
            async for finding in self._checks(subject, Updates(subject, link)):
                self._add(finding)
            self._skip_the_rest(_NO_LOGPROBS)
        except WeightSyncError as error:
            self._add(fail("weights", str(error), _UPDATE_ADVICE))
            self._skip_the_rest("the engine does not hold the policy's weights")
        except GenerationError as error:
            await self._require_alive()
            self._add(fail("requests", str(error), _ENGINE_ADVICE))
            self._skip_the_rest("the engine failed a request")
        finally:
            await link.close()

    async def _require_alive(self) -> None:
        """Raises _Gone."""
        client = self._make_client(self._url)
        try:
            await client.server_info(timeout_s=self._config.engine.control_timeout_s)
        except GenerationError as error:
            raise _Gone(str(error)) from error
        finally:
            await client.close()

    async def _leave(self, group: str) -> None:
        """Leave somebody's server as a run finds one: out of the update group, not paused."""
        client = self._make_client(self._url)
        try:
            greeted = await shake_hands(
                client,
                me=Holder.of(self._run, f"{NAME}/0"),
                attached=True,
                left_group=group,
                timeout_s=self._config.engine.control_timeout_s,
            )
            await let_go(client, greeted.names)
        except GenerationError as error:
            logger.warning("could not leave %s as it was: %s", self._url, error)
        finally:
            await client.close()

    async def _checks(self, subject: Subject, updates: Updates) -> AsyncIterator[Finding]:
        """In the order in which they build on each other."""
        start = await updates.start()
        temperature = self._config.generation.temperature
        samples = await take_samples(subject, temperature)
        finding, gap = await check_logprobs(subject, samples, temperature)
        yield finding
        other = other_temperature(temperature)
        second, _ = await check_logprobs(subject, await take_samples(subject, other), other)
        yield second
        if Verdict.FAIL in (finding.verdict, second.verdict):
            yield check_text(samples, self._policy.tokenizer)
            return
        yield await check_distribution(subject, samples)
        yield await check_noise(subject, samples, gap)
        yield check_text(samples, self._policy.tokenizer)
        async for finding in updates.check(start):
            yield finding


def _reach(info: ServerInfo, model_info: ModelInfo) -> Finding:
    check = "reach"
    figure = (
        f"{info.engine} {info.version}, {model_info.model_path}, {info.dtype}, tp {info.tp_size}, "
        f"{info.max_running_requests or 'unknown'} slots, weights {model_info.weight_version}"
    )
    if info.dp_size != 1 or info.pp_size != 1:
        return fail(
            check,
            f"{figure}, dp {info.dp_size}, pp {info.pp_size}",
            "weight updates need --dp-size 1 and --pp-size 1: start several engines instead",
        )
    return ok(check, figure, {"tp_size": float(info.tp_size)})


async def _num_in_flight(client: EngineClient) -> int:
    """Unfinished requests; the figure may lag, so only one that lasts is believed."""
    for _ in range(_LOAD_QUESTIONS):
        load = await client.load()
        if not (count := load.num_running_reqs + load.num_waiting_reqs):
            break
        await asyncio.sleep(_LOAD_INTERVAL_S)
    return count


async def _first_life(
    slot: EngineSlot, changed: asyncio.Event, patience_s: float, *, attached: bool
) -> Engine:
    """The slot's engine, once it is ready.

    Raises:
        _Gone: not within `patience_s`, or it ended before.
        GenerationError: an attached one answers, but is not for this run.
    """
    try:
        async with asyncio.timeout(patience_s):
            while slot.engine is None and not slot.failed and not slot.refused:
                changed.clear()
                await changed.wait()
    except TimeoutError:
        problem = slot.last_error or "no answer"
        raise _Gone(f"not there within {patience_s:g} s: {problem}") from None
    if slot.engine is None and attached:
        raise GenerationError(slot.last_error, retryable=False)
    if slot.engine is None:
        raise _Gone(slot.last_error)
    return slot.engine
