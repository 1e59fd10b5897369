"""Backends of the engine contract: the fake, the embedded engine, and real SGLang servers.

The real ones, with one rank and with two, take part in `make test-sglang`.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from async_grpo.config.engine_keys import EngineKeys
from tests.fakes.fake_engine import EOS, FakeEngine
from tests.sglang.real_server import NO_KEYS, RealServer

if TYPE_CHECKING:
    from tests.contracts.engine.update_tools import Sender

VOCAB_SIZE = 50
CONTEXT_LENGTH = 4096
REPOSITORY = Path(__file__).parents[3]
REAL_MARKS = [pytest.mark.sglang, pytest.mark.timeout(700)]
"""The first test waits for two servers to start."""
BACKENDS = [
    "fake",
    "embedded",
    pytest.param("sglang", marks=REAL_MARKS),
    pytest.param("sglang-tp2", marks=REAL_MARKS),
]


@dataclass(frozen=True)
class Traits:
    """Where backends differ on purpose."""

    real_weights: bool = True
    """Log-probs come from a model, and updates from a collective."""
    begin_waits: bool = False
    """An update that begins unpaused waits for running requests. (Ours stops decoding.)"""
    refuses_unknown_tensors: bool = True
    """SGLang answers 200 and silently ignores a tensor it does not know."""
    update_is_atomic: bool = True
    """A refused bucket changes nothing. SGLang has copied what came before the bad tensor."""
    validates_ids: bool = True
    """SGLang's scheduler dies of a token id beyond the vocabulary."""
    truncated_sampling_refused: bool = True
    """top_p, top_k, min_p, n other than the full single sample are refused."""
    knows_held_requests: bool = True
    """A request that came during a pause can be aborted. SGLang holds it at the door, nameless."""
    load_is_live: bool = True
    """/v1/loads while paused is of that moment. SGLang's is of the last step before."""
    late_tokens: int = 0
    """Tokens at the head of a span that `in_place` opened which the weights before had sampled.
    SGLang's scheduler computes one step ahead, and counts the pending token when it goes on."""


REAL_TRAITS = Traits(
    begin_waits=True,
    refuses_unknown_tensors=False,
    update_is_atomic=False,
    validates_ids=False,
    truncated_sampling_refused=False,
    knows_held_requests=False,
    load_is_live=False,
    late_tokens=1,
)


@dataclass
class Subject:
    """One engine under test."""

    url: str
    traits: Traits
    http: aiohttp.ClientSession
    keys: EngineKeys = NO_KEYS
    model_path: Path | None = None
    tp_size: int = 1
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    def request(self, method: str, path: str, **how: Any) -> Any:
        """One call with the key that it needs; a context manager."""
        key = self.keys.for_path(path.partition("?")[0])
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self.http.request(method, self.url + path, headers=headers, **how)

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        """(status, JSON or text)."""
        async with self.request("POST", path, json={} if body is None else body) as reply:
            return reply.status, _content(await reply.text())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.request("GET", path) as reply:
            return reply.status, _content(await reply.text())

    async def generate(self, num_tokens: int, **fields: Any) -> dict[str, Any]:
        """A completion of exactly `num_tokens`; `sampling` adds sampling parameters."""
        status, reply = await self.post("/generate", body_of(num_tokens, **fields))
        assert status == 200, reply
        return reply

    async def start_long(self, rid: str, **fields: Any) -> "asyncio.Task[dict[str, Any]]":
        """A request that has sampled some tokens and will go on for thousands."""
        task = asyncio.create_task(self.generate(CONTEXT_LENGTH - 100, rid=rid, **fields))
        self.tasks.append(task)
        await self.generate(8)  # one may overtake the other by a step or two, not by eight
        await self.generate(8)
        return task


def body_of(num_tokens: int, *, sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Body of /generate."""
    return {
        "input_ids": [3, 4, 5, 6],
        "sampling_params": {
            "max_new_tokens": num_tokens,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "ignore_eos": True,
        }
        | (sampling or {}),
        "return_logprob": True,
    } | fields


def logprobs_of(reply: dict[str, Any]) -> list[float]:
    """Of the sampled tokens."""
    return [pair[0] for pair in reply["meta_info"]["output_token_logprobs"]]


def check_partial(reply: dict[str, Any]) -> None:
    """An abort with what was sampled until then."""
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    count = len(reply["output_ids"])
    assert 8 <= count < CONTEXT_LENGTH - 100
    assert len(logprobs_of(reply)) == count
    assert reply["meta_info"]["weight_versions"][-1]["end"] == count


async def until_idle(engine: Subject) -> None:
    """The API has no notice of idleness, so it must be asked."""
    async with asyncio.timeout(10):
        while (await engine.get("/flush_cache"))[0] != 200:
            await engine.get("/model_info")


def _content(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def make_model(seed: int) -> Qwen3ForCausalLM:
    """A tiny policy; far enough from uniform for log-probs to tell two apart."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            max_position_embeddings=CONTEXT_LENGTH, tie_word_embeddings=True,
            eos_token_id=EOS, pad_token_id=0, bos_token_id=None, initializer_range=0.3,
        )
    )  # fmt: skip
    return model.eval().requires_grad_(False)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One word for each id, for servers that want a tokenizer beside the model."""
    words = {"<pad>": 0, "<eos>": EOS} | {f"w{i}": i for i in range(2, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def serve(config: Path, *overrides: str) -> tuple[subprocess.Popen[str], str]:
    """A process that runs `engine.server.main`; (process, URL)."""
    script = (
        "import sys; from async_grpo.config.load import load_config;"
        "from async_grpo.engine.server import main;"
        "main(load_config(sys.argv[1], sys.argv[2:]), port=0)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(config), *overrides],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the engine ended with {process.wait(30)}"
    return process, json.loads(line)["url"]


@pytest.fixture(scope="session")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engine")
    make_model(0).save_pretrained(directory / "model")
    content = {
        "run": {"output_dir": str(directory / "run"), "num_train_steps": 1},
        "policy": {"model": str(directory / "model")},
        "task": {"name": "reverse"},
        "engine": {"max_running_requests": 8},
        "weights": {"timeout_s": 15.0},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="session")
def embedded_url(config_path: Path) -> Iterator[str]:
    process, url = serve(config_path)
    yield url
    process.terminate()
    assert process.wait(20) == 0
    process.stdout.close()


async def _pump(engine: FakeEngine) -> None:
    """Let the fake sample as a real engine does: by itself, one token at a time."""
    while True:
        await engine.step()
        await asyncio.sleep(0.001)


@asynccontextmanager
async def _fake_url() -> AsyncIterator[str]:
    engine = FakeEngine(vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH, manual=True)
    async with engine:
        pump = asyncio.create_task(_pump(engine))
        yield engine.url
        pump.cancel()


@asynccontextmanager
async def _subject(url: str, traits: Traits, **about: Any) -> AsyncIterator[Subject]:
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        subject = Subject(url, traits, http, **about)
        yield subject
        await subject.post("/pause_generation", {"mode": "in_place"})  # else `end` may wait
        await subject.post("/end_weight_update")
        await subject.post("/abort_request", {"abort_all": True})
        await subject.post("/continue_generation")
        await asyncio.gather(*subject.tasks, return_exceptions=True)


@asynccontextmanager
async def real_subject(server: RealServer) -> AsyncIterator[Subject]:
    """A real SGLang server under test."""
    about = {"keys": server.keys, "model_path": server.model, "tp_size": server.tp_size}
    async with _subject(server.url, REAL_TRAITS, **about) as subject:
        yield subject


@pytest.fixture(params=BACKENDS)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """Each backend in turn."""
    if request.param == "fake":
        async with _fake_url() as url, _subject(url, Traits(real_weights=False)) as subject:
            yield subject
    elif request.param == "embedded":
        config: Path = request.getfixturevalue("config_path")
        url = request.getfixturevalue("embedded_url")
        async with _subject(url, Traits(), model_path=config.parent / "model") as subject:
            yield subject
    else:
        servers: dict[str, RealServer] = request.getfixturevalue("real_servers")
        async with real_subject(servers[request.param]) as subject:
            yield subject


@pytest.fixture
async def sender(engine: Subject) -> AsyncIterator["Sender"]:
    """A trainer in an update group with the engine."""
    from tests.contracts.engine.update_tools import Sender  # which needs this module

    if not engine.traits.real_weights:
        pytest.skip("has no weights")
    sender = Sender(engine)
    await sender.join()
    yield sender
    await sender.leave()
