"""The embedded engine's end of an update group."""

import pytest
import torch

from async_grpo.engine.admission import RequestRefused
from async_grpo.engine.weight_loader import WeightLoader
from async_grpo.engine_api import FLATTENED_BUCKET, NOT_RECEIVED, UpdateFromDistributedRequest
from tests.fakes.fake_collectives import FakeBackend, fake_group
from tests.fakes.tiny_policy import tiny_module

CPU = torch.device("cpu")
NAME = "model.norm.weight"


@pytest.mark.parametrize("load_format", [FLATTENED_BUCKET, None])
def test_without_memory_for_a_bucket_the_broadcast_is_not_entered(monkeypatch, load_format):
    module, backend = tiny_module(dtype=torch.float32), FakeBackend()
    loader = WeightLoader(module, CPU, 1.0)
    loader._groups["cell"] = (fake_group(backend), CPU)
    before = module.get_parameter(NAME).clone()
    request = UpdateFromDistributedRequest(
        names=[NAME], dtypes=["float32"], shapes=[list(before.shape)], group_name="cell",
        load_format=load_format,
    )  # fmt: skip

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        with pytest.raises(RequestRefused) as caught:
            loader.load(request)
    assert caught.value.message == (
        f"{NOT_RECEIVED}: no memory for a bucket: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert backend.calls == []
    assert torch.equal(module.get_parameter(NAME), before)
    loader.load(request)  # there is memory again, and nothing is broken
    assert backend.calls == ["broadcast"]
    loader.close()
