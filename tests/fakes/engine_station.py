"""An engine, and the parts of a generator that drive it through weight updates.

Every token that is in flight meanwhile is judged by a plain forward of the weights that its segment
names.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import torch
from transformers import DynamicCache, PreTrainedModel

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.config.generation import GenerationSection, OnWeightUpdate
from async_grpo.config.policy import DType
from async_grpo.config.weights import WeightsSection
from async_grpo.engine_api import GenerateReply, GenerateRequest
from async_grpo.generation.client import HttpEngineClient
from async_grpo.generation.engines import Engine
from async_grpo.generation.names import GivenNames, Holder
from async_grpo.generation.routing import Placement, Router
from async_grpo.generation.sampler import GroupRequest, Sampled, Sampler
from async_grpo.generation.update_modes import kv_tokens
from async_grpo.generation.weight_driver import WeightDriver
from async_grpo.replay_parts import BucketSpec, CellPhase, Rendezvous, UpdateOrder
from async_grpo.types import Completion, Prompt, Ticket, WeightsName
from async_grpo.weights.flatten import digests
from async_grpo.weights.group import join_group, listen
from tests.contracts.engine.conftest import make_model
from tests.contracts.engine.update_tools import reference_logprobs
from tests.fakes.fake_engine import probe_of
from tests.fakes.fake_replay import FakeReplay

TOLERANCE = 1e-5
PROMPT = [3, 4, 5, 6]
NUM_TOKENS = 400
PROBE_IDS = [7, 9, 11, 13]


class Tireless(HttpEngineClient):
    """Completions go on until their budget is used up."""

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> GenerateReply:
        params = msgspec.structs.replace(request.sampling_params, ignore_eos=True)
        endless = msgspec.structs.replace(request, sampling_params=params)
        return await super().generate(endless, timeout_s=timeout_s)


class Station:
    """One engine and the parts of a generator that drive it."""

    def __init__(self, client: HttpEngineClient, engine: Engine, mode: OnWeightUpdate) -> None:
        self.engine = engine
        self.replay = FakeReplay()
        self.router = Router(lambda: [engine], on_change=lambda: None)
        self.sampler = Sampler(
            self.router, GenerationSection(max_new_tokens=NUM_TOKENS), stop_token_ids=[]
        )
        self.tasks: set[asyncio.Task[None]] = set()
        self.driver = WeightDriver(
            self.replay,
            lambda: [engine],
            lambda work: self.tasks.add(asyncio.create_task(work)),
            WeightsSection(timeout_s=30.0),
            on_weight_update=mode,
            dtype=DType.float32,
        )
        self._client = client
        self._publish_sequence = 0

    async def publish(self, model: PreTrainedModel, weights: WeightsName) -> None:
        """A whole update, with the trainer's side of it."""
        self._publish_sequence += 1
        tensors = dict(model.named_parameters())
        order = UpdateOrder(
            publish_sequence=self._publish_sequence,
            weights=weights,
            cell_id=0,
            engine_ids=["e"],
            ranks=[1],
            buckets=[
                BucketSpec(
                    names=list(tensors),
                    dtypes=["float32"] * len(tensors),
                    shapes=[list(tensor.shape) for tensor in tensors.values()],
                )
            ],
            probe=probe_of(
                PROBE_IDS,
                reference_logprobs(model, PROBE_IDS[:1], PROBE_IDS[1:]).tolist(),
                TOLERANCE,
            ),
            digests=digests({name: tensor.detach() for name, tensor in tensors.items()}),
        )
        self.driver.on_orders([order])
        await self.replay.phase_of(self._publish_sequence, "e", CellPhase.BEGUN)
        store, port = listen("127.0.0.1")
        name = f"station-{id(self)}-{self._publish_sequence}"
        # too small a world would leave out a rank of the server, and the server would say 200
        size = 1 + self.engine.info.tp_size
        meeting = Rendezvous(
            group_name=name,
            host="127.0.0.1",
            port=port,
            world_size=size,
            backend="gloo",
            fresh=True,
        )
        self.driver.on_orders([msgspec.structs.replace(order, go=True, rendezvous=meeting)])
        flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors.values()])

        def send() -> None:
            group = join_group(
                host="127.0.0.1", port=port, rank=0, world_size=size, group_name=name,
                backend="gloo", timeout_s=30, store=store,
            )  # fmt: skip
            group.broadcast(flat)
            group.close()

        await asyncio.to_thread(send)
        end = await self.replay.phase_of(
            self._publish_sequence, "e", CellPhase.COMMITTED, CellPhase.FAILED
        )
        assert end is CellPhase.COMMITTED, self.replay.phases[-1]
        self.driver.on_orders([])
        self.router.dispatch()

    def sample(self, number: int) -> "asyncio.Task[Sampled]":
        request = GroupRequest(Ticket(number, 1, 0), Prompt(0, "", PROMPT, ""))
        placement = Placement()
        place = self.router.enqueue(placement)
        return asyncio.create_task(self.sampler.sample(request, 0, place, placement))

    async def until_running(self, count: int) -> None:
        """Until so many requests are in flight."""
        async with asyncio.timeout(20):
            while self.engine.num_running < count:
                await self._client.load()

    async def until_sampled(self, count: int) -> None:
        """Until three requests in flight hold so many tokens besides their prompts."""
        async with asyncio.timeout(60):
            while kv_tokens(await self._client.load()) < count + 3 * len(PROMPT):
                pass


@asynccontextmanager
async def station(
    url: str, mode: OnWeightUpdate, keys: EngineKeys, *, vocab_size: int | None = None
) -> AsyncIterator[Station]:
    """`vocab_size`: of the policy, for a server that does not tell its own."""
    client = Tireless(url, control_timeout_s=20, keys=keys, vocab_size=vocab_size)
    try:
        info = await client.server_info(timeout_s=20)
        names = GivenNames(Holder("station", "0"))
        yield Station(client, Engine("e", client, info, lambda: None, names), mode)
    finally:
        await client.close()


async def fly_through_updates(
    at: Station, *, incarnation: int, mode: OnWeightUpdate, num_updates: int = 2, every: int = 40
) -> None:
    """Three requests and some updates: all are in flight before and after each, no token is lost.

    Args:
        at: where.
        incarnation: of the weights.
        mode: of the updates.
        num_updates: after the first weights.
        every: tokens that all requests together sample between two updates.
    """
    models = {
        WeightsName(incarnation, version): make_model(60 + version)
        for version in range(num_updates + 1)
    }
    first, *later = models
    await at.publish(models[first], first)
    running = [at.sample(number) for number in range(3)]
    for weights in later:
        await at.until_sampled(2 * every * weights.policy_version - every)
        assert at.engine.num_running == 3
        await at.publish(models[weights], weights)
        await at.until_running(3)  # after an abort each request is sent again, in its own time
        assert not any(task.done() for task in running)
        await at.until_sampled(2 * every * weights.policy_version)
    completions = [(await task).completion for task in running]
    assert at.sampler.num_retries == 0
    num_parts = 3 * num_updates if mode is OnWeightUpdate.abort else 0
    assert at.sampler.num_continued == num_parts
    for completion in completions:
        if mode is OnWeightUpdate.in_place:
            _judge_mixed(completion, models)
        else:
            _judge(completion, models)


def _judge(completion: Completion, models: dict[WeightsName, PreTrainedModel]) -> None:
    """Each token is that of a plain forward of its segment's weights."""
    ids = completion.token_ids.tolist()
    assert len(ids) == NUM_TOKENS == len(completion.behavior_logprobs)
    assert [segment.weights for segment in completion.segments] == list(models)
    found = torch.from_numpy(completion.behavior_logprobs)
    weights_before = next(iter(models))
    start = 0
    for segment in completion.segments:
        end = start + segment.num_tokens
        expected = reference_logprobs(models[segment.weights], PROMPT, ids)
        gap = (found - expected)[start:end].abs().max()
        assert not segment.kv_mixed
        assert gap < TOLERANCE
        if start:  # the first token of other weights already differs: nobody is off by one
            before = reference_logprobs(models[weights_before], PROMPT, ids)
            assert (found - before)[start].abs() > 100 * TOLERANCE
        weights_before, start = segment.weights, end
    assert start == NUM_TOKENS


def _judge_mixed(completion: Completion, models: dict[WeightsName, PreTrainedModel]) -> None:
    """Each token is that of its segment's weights, on the KV that the weights before left."""
    ids = completion.token_ids.tolist()
    assert len(ids) == NUM_TOKENS == len(completion.behavior_logprobs)
    assert [segment.weights for segment in completion.segments] == list(models)
    found = torch.from_numpy(completion.behavior_logprobs)
    inputs = torch.tensor([PROMPT + ids[:-1]])
    kept, read, start = DynamicCache(), 0, 0
    for number, segment in enumerate(completion.segments):
        end = start + segment.num_tokens
        model = models[segment.weights]
        last = len(PROMPT) + end - 1  # its forward samples token `end` - 1
        with torch.no_grad():
            logits = model(input_ids=inputs[:, read:last], cache=kept).logits[0]
        sampled = torch.tensor(ids[start:end])[:, None]
        expected = logits[start - end :].log_softmax(-1).gather(1, sampled)[:, 0]
        assert (found[start:end] - expected).abs().max() < TOLERANCE, segment
        assert segment.kv_mixed == (number > 0)
        if number:  # the first already differs from a forward that has no KV of other weights
            alone = reference_logprobs(model, PROMPT, ids)
            assert (found - alone)[start].abs() > 100 * TOLERANCE
        start, read = end, last
    assert start == NUM_TOKENS
