"""Requests in flight across real weight updates: sampler, driver, HTTP, gloo and a real model.

Every token is judged by a plain forward of the weights that its segment names.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import torch
import yaml
from transformers import PreTrainedModel

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.config.generation import GenerationSection, OnWeightUpdate
from async_grpo.config.weights import WeightsSection
from async_grpo.generation.client import HttpEngineClient
from async_grpo.generation.engines import Engine
from async_grpo.generation.routing import Placement, Router
from async_grpo.generation.sampler import GroupRequest, Sampled, Sampler
from async_grpo.generation.update_modes import kv_tokens
from async_grpo.generation.weight_driver import WeightDriver
from async_grpo.replay_parts import BucketSpec, CellPhase, Probe, Rendezvous, UpdateOrder
from async_grpo.types import Prompt, Ticket, WeightsName
from async_grpo.weights.group import join_group, listen
from tests.contracts.engine.conftest import make_model, serve
from tests.contracts.engine.update_tools import reference_logprobs
from tests.fakes.fake_replay import FakeReplay

pytestmark = pytest.mark.timeout(180)  # loads a model on a busy machine

TOLERANCE = 1e-5
PROMPT = [3, 4, 5, 6]
NUM_TOKENS = 400
PROBE_IDS = [7, 9, 11, 13]
KEYS = EngineKeys("api", "admin")


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
            probe=Probe(
                token_ids=PROBE_IDS,
                logprobs=reference_logprobs(model, PROBE_IDS[:1], PROBE_IDS[1:]).tolist(),
                tolerance=TOLERANCE,
            ),
        )
        self.driver.on_orders([order])
        await self.replay.phase_of(self._publish_sequence, "e", CellPhase.BEGUN)
        store, port = listen("127.0.0.1")
        name = f"station-{id(self)}-{self._publish_sequence}"
        meeting = Rendezvous(
            group_name=name, host="127.0.0.1", port=port, world_size=2, backend="gloo", fresh=True
        )
        self.driver.on_orders([msgspec.structs.replace(order, go=True, rendezvous=meeting)])
        flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors.values()])

        def send() -> None:
            group = join_group(
                host="127.0.0.1", port=port, rank=0, world_size=2, group_name=name,
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

    async def until_sampled(self, count: int) -> None:
        """Until three requests in flight hold so many tokens besides their prompts."""
        async with asyncio.timeout(60):
            while kv_tokens(await self._client.load()) < count + 3 * len(PROMPT):
                pass


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A process: both ends of an update group must not be in one."""
    directory = tmp_path_factory.mktemp("embedded")
    model = make_model(0)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(directory / "model")
    for name, key in (("api", KEYS.api), ("admin", KEYS.admin)):
        (directory / name).write_text(key)
    content = {
        "run": {"output_dir": str(directory / "run"), "num_train_steps": 1},
        "policy": {"model": str(directory / "model")},
        "task": {"name": "reverse"},
        "engine": {
            "max_running_requests": 8,
            "api_key_file": str(directory / "api"),
            "admin_api_key_file": str(directory / "admin"),
        },
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(content))
    process, url = serve(directory / "config.yaml")
    yield url
    process.terminate()
    assert process.wait(20) == 0
    process.stdout.close()


@asynccontextmanager
async def station(url: str, mode: OnWeightUpdate) -> AsyncIterator[Station]:
    client = HttpEngineClient(url, control_timeout_s=20, keys=KEYS)
    try:
        info = await client.server_info(timeout_s=20)
        yield Station(client, Engine("e", client, info, lambda: None), mode)
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("mode", "exact"),
    [
        (OnWeightUpdate.retract, True),
        (OnWeightUpdate.in_place, False),
        (OnWeightUpdate.abort, True),
        (OnWeightUpdate.auto, True),
    ],
)
async def test_requests_in_flight_outlast_two_updates(
    engine_url: str, mode: OnWeightUpdate, exact: bool
) -> None:
    incarnation = list(OnWeightUpdate).index(mode) + 1
    models = {WeightsName(incarnation, version): make_model(60 + version) for version in range(3)}
    first, *later = models
    async with station(engine_url, mode) as at:
        await at.publish(models[first], first)
        running = [at.sample(number) for number in range(3)]
        for weights in later:
            await at.until_sampled(40)
            assert at.engine.num_running == 3
            await at.publish(models[weights], weights)
            assert at.engine.num_running == 3
            assert not any(task.done() for task in running)
            await at.until_sampled(80 * weights.policy_version)
        completions = [(await task).completion for task in running]
        assert at.sampler.num_retries == 0
        assert at.sampler.num_continued == (6 if mode is OnWeightUpdate.abort else 0)
    for completion in completions:
        ids = completion.token_ids.tolist()
        assert len(ids) == NUM_TOKENS == len(completion.behavior_logprobs)
        assert [segment.weights for segment in completion.segments] == list(models)
        found = torch.from_numpy(completion.behavior_logprobs)
        start = 0
        for segment in completion.segments:
            end = start + segment.num_tokens
            expected = reference_logprobs(models[segment.weights], PROMPT, ids)
            gap = (found - expected)[start:end].abs().max()
            assert segment.kv_mixed == (not exact and segment.weights != first)
            assert (gap < TOLERANCE) == (not segment.kv_mixed), gap
            start = end
        assert start == NUM_TOKENS
