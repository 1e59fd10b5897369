"""A generator that delivers recorded groups, with one engine that only receives weights.

Speaks the whole protocol of a generator to a real replay server; its engine is
`tests.fakes.gloo_receiver` in another process. Runs on the caller's event loop.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from async_grpo.config.schema import Config
from async_grpo.replay.generator_client import GeneratorClient
from async_grpo.replay_parts import (
    CellPhase,
    Dataset,
    EngineState,
    EngineStatus,
    RoleStatus,
    UpdateOrder,
)
from async_grpo.types import InsertOutcome, RolloutGroup, Ticket, WeightsName

ROOT = Path(__file__).parents[2]
STATUS = RoleStatus(state="working", seconds={"working": 1.0, "waiting": 1.0})


class ScriptedGenerator:
    """`group_for(ticket, weights)` gives the group of each ticket; `refusal` refuses updates."""

    def __init__(
        self,
        config: Config,
        group_for: Callable[[Ticket, WeightsName], RolloutGroup],
        refusal: str = "",
    ) -> None:
        self._refusal = refusal
        dataset = Dataset(fingerprint="recorded", num_prompts=1000)
        self._client = GeneratorClient(config, name="g0", dataset=dataset)
        self._group_for = group_for
        self._weights: WeightsName | None = None
        self._sequence = 0
        self._claims: list[tuple[int, int]] = []
        self.outcomes: list[InsertOutcome] = []
        self.published: list[WeightsName] = []

    async def run(self) -> None:
        """Until the replay server says that the run is over."""
        self._engine = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.fakes.gloo_receiver",
            cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24,
        )  # fmt: skip
        try:
            await self._client.connect()
            tasks = [asyncio.create_task(work) for work in (self._beat(), self._claim())]
            try:
                await self._watch()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            try:
                self._engine.kill()
                await self._engine.communicate()
            finally:
                await self._client.close()

    async def _heartbeat(self) -> None:
        engine = EngineStatus(
            engine_id="g0/0#1",
            state=EngineState.SERVING,
            weights=self._weights,
            publish_sequence=self._sequence,
            wants_sync=self._weights is None,
        )
        await self._client.heartbeat([engine], list(self._claims), STATUS)

    async def _beat(self) -> None:
        while True:
            await self._heartbeat()
            await asyncio.sleep(0.2)

    async def _claim(self) -> None:
        while True:
            ticket = await self._client.claim()
            if ticket is None:
                continue
            assert self._weights is not None, "a ticket before any weights"
            self._claims.append((ticket.group_id, ticket.attempt))
            group = self._group_for(ticket, self._weights)
            self.outcomes.append(await self._client.insert(group))
            self._claims.remove((ticket.group_id, ticket.attempt))

    async def _watch(self) -> None:
        seen = 0
        while True:
            reply = await self._client.watch(seen)
            seen = reply.revision
            if reply.stop:
                return
            for order in reply.orders:
                await self._update(order)

    async def _update(self, order: UpdateOrder) -> None:
        (engine_id,) = order.engine_ids
        report = self._client.report_phase
        sequence, cell = order.publish_sequence, order.cell_id
        if self._refusal:
            await report(sequence, cell, engine_id, CellPhase.FAILED, self._refusal)
            return
        if not order.go:
            await report(sequence, cell, engine_id, CellPhase.BEGUN, "")
            return
        sizes = [
            sum(8 * torch.Size(shape).numel() for shape in bucket.shapes)
            for bucket in order.buckets
        ]
        request = {"rendezvous": msgspec.to_builtins(order.rendezvous), "sizes": sizes}
        self._engine.stdin.write(json.dumps(request).encode() + b"\n")
        received = json.loads(await self._engine.stdout.readline())
        assert len(received) * 4 == sum(sizes), received
        self._weights, self._sequence = order.weights, sequence
        self.published.append(order.weights)
        await report(sequence, cell, engine_id, CellPhase.COMMITTED, "")
        await self._heartbeat()
