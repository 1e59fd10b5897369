"""The trainer's side of an update, and what a model's own forward says about a reply."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from async_grpo.weights.group import UpdateGroup, join_group, listen
from tests.contracts.engine.conftest import Subject

TOLERANCE = 2e-5
"""nats; the random model's log-probs reach -20, where one float32 step is 2e-6"""
_GROUP_NUMBERS = itertools.count()


def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], ids: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """[num_tokens] log-probs of `ids` after `prompt` by one plain forward."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    scaled = torch.log_softmax(logits.float() / temperature, dim=-1)
    return scaled.gather(1, torch.tensor(ids)[:, None])[:, 0]


def gap(
    reply: dict[str, Any],
    model: PreTrainedModel,
    temperature: float = 1.0,
    prompt: Sequence[int] = (3, 4, 5, 6),
) -> torch.Tensor:
    """[num_tokens] |engine's - model's|."""
    engine = torch.tensor([pair[0] for pair in reply["meta_info"]["output_token_logprobs"]])
    expected = reference_logprobs(model, list(prompt), reply["output_ids"], temperature)
    return (engine - expected).abs()


class Sender:
    """The trainer's side of one update group."""

    def __init__(self, engine: Subject) -> None:
        self.engine = engine
        self.group_name = f"contract-{next(_GROUP_NUMBERS)}"
        self._group: UpdateGroup | None = None

    async def join(self) -> None:
        store, port = listen("127.0.0.1")
        size = 1 + self.engine.tp_size
        body = {
            "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1,
            "world_size": size, "group_name": self.group_name, "backend": "gloo",
        }  # fmt: skip
        (status, reply), self._group = await asyncio.gather(
            self.engine.post("/init_weights_update_group", body),
            asyncio.to_thread(
                join_group, host="127.0.0.1", port=port, rank=0, world_size=size,
                group_name=self.group_name, backend="gloo", timeout_s=15, store=store,
            ),
        )  # fmt: skip
        assert (status, reply["success"]) == (200, True), reply

    async def send(
        self, tensors: dict[str, torch.Tensor], version: str | None, **changes: Any
    ) -> tuple[int, Any]:
        """One bucket, or with load_format=None one broadcast per tensor; (status, reply)."""
        body = {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": self.group_name,
            "flush_cache": False,
            "load_format": "flattened_bucket",
            "weight_version": version,
        } | changes
        payloads = [t.contiguous() for t in tensors.values()]
        if body["load_format"] is not None:
            payloads = [torch.cat([t.view(-1).view(torch.uint8) for t in payloads])]
        answer, _ = await asyncio.gather(
            self.engine.post("/update_weights_from_distributed", body),
            asyncio.to_thread(self._broadcast, payloads),
        )
        return answer

    def _broadcast(self, payloads: list[torch.Tensor]) -> None:
        for payload in payloads:
            self._group.broadcast(payload)

    async def publish(self, model: PreTrainedModel, version: str, **changes: Any) -> None:
        """A whole session over two buckets, without pausing; `changes` for each request."""
        tensors = dict(model.named_parameters())
        names = list(tensors)
        half = len(names) // 2
        assert (await self.engine.post("/begin_weight_update"))[0] == 200
        for part, label in ((names[:half], None), (names[half:], version)):
            status, reply = await self.send(
                {name: tensors[name] for name in part}, label, **changes
            )
            assert (status, reply["success"]) == (200, True), reply
        assert (await self.engine.post("/end_weight_update"))[0] == 200

    async def leave(self) -> None:
        if self._group is not None:
            await self.engine.post("/destroy_weights_update_group", {"group_name": self.group_name})
            self._group.close()


async def checksum_of(engine: Subject) -> str:
    """Over all weights."""
    return (await engine.get("/weights_checker?action=checksum"))[1]["per_engine_checksum"]


async def version_of(engine: Subject) -> str:
    """Name of the present weights."""
    return (await engine.get("/model_info"))[1]["weight_version"]
