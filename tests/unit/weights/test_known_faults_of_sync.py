"""Faults of weight sync that users of other engines met; see docs/sglang.md."""

import multiprocessing
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from async_grpo.config.algorithm import AlgorithmSection
from async_grpo.config.trainer import TrainerSection
from async_grpo.config.weights import WeightsSection
from async_grpo.engine.admission import RequestRefused
from async_grpo.engine.weight_loader import WeightLoader
from async_grpo.training.feed import LoopThread
from async_grpo.training.step import TrainStep
from async_grpo.training.weight_source import PolicyWeights
from async_grpo.types import WeightsName
from async_grpo.weights.flatten import dtype_name, empty_buckets, flatten
from async_grpo.weights.group import join_group, listen
from async_grpo.weights.plan import TensorSpec, make_plan
from async_grpo.weights.publisher import WeightPublisher
from tests.fakes.fake_trainer_replay import FakeTrainerReplay
from tests.fakes.tiny_policy import random_groups, tiny_module, tiny_policy

CPU = torch.device("cpu")
TIMEOUT_S = 30.0


def source_of(policy):
    return PolicyWeights(policy, WeightsSection(), seed=0)


def train(policy, *, num_steps=1):
    step = TrainStep(policy, AlgorithmSection(), TrainerSection(lr=1e-2), num_train_steps=num_steps)
    for version in range(num_steps):
        step.apply(random_groups(2, version=version), version)


def other_rank(pipe: Connection, directory: Path) -> None:
    """Rank 0 of the trainer's default group, and rank 1 of the update group."""
    torch.set_num_threads(1)
    meet_by_default(directory, rank=0)
    port = pipe.recv()
    group = join_group(
        host="127.0.0.1", port=port, rank=1, world_size=2, group_name="cell", backend="gloo",
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    payload = torch.zeros(3, dtype=torch.uint8)
    group.broadcast(payload)
    pipe.send(payload.tolist())
    group.close()
    dist.destroy_process_group()


def meet_by_default(directory: Path, *, rank: int) -> None:
    where = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)


def test_b080_the_sender_is_rank_0_of_the_update_group_whatever_rank_it_has_elsewhere(tmp_path):
    """SGLang receives from rank 0 only; here the default group counts the other way round."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=other_rank, args=(theirs, tmp_path), daemon=True)
    process.start()
    try:
        meet_by_default(tmp_path, rank=1)
        store, port = listen("127.0.0.1")
        ours.send(port)
        group = join_group(
            host="127.0.0.1", port=port, rank=0, world_size=2, group_name="cell", backend="gloo",
            timeout_s=TIMEOUT_S, store=store,
        )  # fmt: skip
        group.broadcast(torch.tensor([7, 8, 9], dtype=torch.uint8))
        assert ours.recv() == [7, 8, 9]
        group.close()
        dist.destroy_process_group()
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    finally:
        process.kill()


def test_b085_every_rendezvous_has_a_port_of_its_own_that_is_bound_before_it_is_told():
    listening = [listen("127.0.0.1") for _ in range(8)]
    assert len({port for _, port in listening}) == 8
    for _, port in listening:
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S):
            pass


def test_b087_what_is_sent_has_the_dtype_that_is_declared_and_that_engines_have():
    """A bfloat16 policy with float32 masters."""
    policy = tiny_policy(dtype=torch.bfloat16)
    train(policy)
    tensors = dict(source_of(policy).named_tensors())
    plan = make_plan([TensorSpec(n, dtype_name(t), tuple(t.shape)) for n, t in tensors.items()], 1)
    assert {spec.dtypes[0] for spec in plan.specs()} == {"bfloat16"}
    for bucket, payload in zip(plan.buckets, empty_buckets(plan, CPU), strict=True):
        flatten(bucket, tensors, payload)
        (spec,) = bucket
        assert payload.numel() == 2 * tensors[spec.name].numel()
        assert torch.equal(payload.view(torch.bfloat16).view(spec.shape), tensors[spec.name])
    (bucket, *_), payload = plan.buckets, empty_buckets(plan, CPU)[0]
    with pytest.raises(ValueError, match="is not the bfloat16"):
        flatten(bucket, {name: tensor.float() for name, tensor in tensors.items()}, payload)


@pytest.mark.parametrize("is_tied", [True, False])
def test_b089_a_tied_head_is_sent_once_and_is_the_new_one(tmp_path, is_tied):
    """Where the engine has a head of its own instead, one that was not sent is missed."""
    policy = tiny_policy(dtype=torch.float32)
    before = policy.module.lm_head.weight.detach().clone()
    train(policy)
    sent = {name: tensor.clone() for name, tensor in source_of(policy).named_tensors()}
    assert "lm_head.weight" not in sent
    save_file(sent, tmp_path / "model.safetensors")
    module = tiny_module(dtype=torch.float32, seed=5, tie_word_embeddings=is_tied)
    loader = WeightLoader(module, CPU, TIMEOUT_S)
    if not is_tied:
        with pytest.raises(RequestRefused, match=r"lm_head\.weight is missing"):
            loader.open_directory(str(tmp_path))
        return
    loader.load_directory(loader.open_directory(str(tmp_path)))
    assert torch.equal(module.lm_head.weight, policy.module.lm_head.weight)
    assert not torch.equal(module.lm_head.weight, before)
    ids = torch.arange(7)[None]
    torch.testing.assert_close(module(ids).logits, policy.module(ids).logits, rtol=0, atol=0)


def test_every_publish_uses_the_memory_of_the_first(tmp_path):
    loop = LoopThread("test")
    policy = tiny_policy(dtype=torch.float32)
    publisher = WeightPublisher(
        FakeTrainerReplay(),
        loop.call,
        WeightsSection(bucket_bytes=1 << 10, timeout_s=TIMEOUT_S),
        run_directory=tmp_path,
    )
    places = set()
    for version in range(5):
        publisher.publish(WeightsName(1, version), source_of(policy))
        places.add(tuple(bucket.data_ptr() for bucket in publisher._snapshot.buckets))
    publisher.close()
    loop.close()
    assert len(places) == 1
