"""Requests in flight across an update in each pause mode; plain tensors; updates from a disk."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.contracts.engine.conftest import Subject, make_model
from tests.contracts.engine.update_tools import (
    TOLERANCE,
    Sender,
    checksum_of,
    gap,
    reference_logprobs,
    version_of,
)

pytestmark = pytest.mark.timeout(180)  # a process that imports torch on a busy machine


async def in_flight(engine: Subject, version: str) -> list[asyncio.Task[dict[str, Any]]]:
    return [await engine.start_long(f"flight-{i}", extra_key=version) for i in range(3)]


async def test_after_retract_every_token_is_that_of_one_model(sender: Sender) -> None:
    """The whole prefix is computed afresh: new tokens equal a plain forward of the new weights."""
    engine = sender.engine
    first, second = make_model(40), make_model(41)
    await sender.publish(first, "20.0")
    running = await in_flight(engine, "20.0")
    await engine.post("/pause_generation", {"mode": "retract"})
    await sender.publish(second, "20.1", flush_cache=True)
    assert (await engine.post("/flush_cache"))[0] == 200
    await engine.post("/continue_generation")
    await engine.generate(40)
    assert not any(task.done() for task in running)
    await engine.post("/abort_request", {"abort_all": True})
    for reply in await asyncio.gather(*running):
        (before, after) = reply["meta_info"]["weight_versions"]
        assert (before["version"], after["version"]) == ("20.0", "20.1")
        switch = before["end"]
        assert switch == after["start"] >= 8
        assert after["end"] == len(reply["output_ids"]) > switch + 8
        assert gap(reply, first)[:switch].max() < TOLERANCE
        assert gap(reply, second)[switch:].max() < TOLERANCE
        assert reply["meta_info"]["num_retractions"] == 1


async def test_in_place_keeps_the_kv_of_the_weights_before(sender: Sender) -> None:
    """What `kv_mixed` stands for: no single model reproduces the tokens after the switch."""
    engine = sender.engine
    first, second = make_model(40), make_model(41)
    await sender.publish(first, "21.0")
    running = await engine.start_long("mixed", extra_key="21.0")
    await engine.post("/pause_generation", {"mode": "in_place"})
    await sender.publish(second, "21.1")
    await engine.post("/continue_generation")
    await engine.generate(20)
    await engine.post("/abort_request", {"rid": "mixed"})
    reply = await running
    switch = reply["meta_info"]["weight_versions"][0]["end"] + engine.traits.late_tokens
    assert gap(reply, first)[:switch].max() < TOLERANCE
    assert gap(reply, second)[switch:].max() > 100 * TOLERANCE
    assert reply["meta_info"]["num_retractions"] == 0


async def test_what_an_abort_returned_can_be_continued_exactly(sender: Sender) -> None:
    engine = sender.engine
    first, second = make_model(42), make_model(43)
    await sender.publish(first, "22.0")
    running = await in_flight(engine, "22.0")
    assert (await engine.post("/pause_generation", {"mode": "abort"}))[0] == 200
    parts = await asyncio.gather(*running)
    await sender.publish(second, "22.1")
    await engine.post("/flush_cache")
    await engine.post("/continue_generation")
    for part in parts:
        assert gap(part, first).max() < TOLERANCE
        (span,) = part["meta_info"]["weight_versions"]
        assert (span["version"], span["end"]) == ("22.0", len(part["output_ids"]))
        prefix = [3, 4, 5, 6, *part["output_ids"]]
        rest = await engine.generate(30, input_ids=prefix, extra_key="22.1")
        found = torch.tensor([pair[0] for pair in rest["meta_info"]["output_token_logprobs"]])
        expected = reference_logprobs(second, prefix, rest["output_ids"])
        assert (found - expected).abs().max() < TOLERANCE


async def test_an_update_may_abort_everything_itself(sender: Sender) -> None:
    engine = sender.engine
    await sender.publish(make_model(42), "23.0")
    running = await in_flight(engine, "23.0")
    await engine.post("/pause_generation", {"mode": "in_place"})
    await sender.publish(make_model(43), "23.1", abort_all_requests=True)
    await engine.post("/continue_generation")
    for reply in await asyncio.gather(*running):
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"


async def test_plain_tensors_are_broadcast_one_by_one(sender: Sender) -> None:
    engine, model = sender.engine, make_model(44)
    await sender.publish(make_model(45), "24.0")
    by_bucket = await checksum_of(engine)
    await sender.publish(model, "24.1", load_format=None)
    assert gap(await engine.generate(20, extra_key="24.1"), model).max() < TOLERANCE
    await sender.publish(make_model(45), "24.2", load_format=None)
    assert await checksum_of(engine) == by_bucket


async def test_plain_tensors_that_do_not_fit_change_nothing(sender: Sender) -> None:
    engine = sender.engine
    if not engine.traits.update_is_atomic:
        pytest.skip("this server copies what it can")
    await sender.publish(make_model(44), "25.0")
    before = await checksum_of(engine)
    await engine.post("/begin_weight_update")
    tensors = {"model.norm.weight": torch.zeros(32), "model.no_such.weight": torch.zeros(2, 3)}
    status, reply = await sender.send(tensors, "25.1", load_format=None)
    assert (status, reply["success"]) == (400, False)
    await engine.post("/end_weight_update")
    assert (await checksum_of(engine), await version_of(engine)) == (before, "25.0")


# ---- from a disk


async def load(engine: Subject, path: Path, version: str | None, **fields: Any) -> tuple[int, Any]:
    return await engine.post(
        "/update_weights_from_disk", {"model_path": str(path), "weight_version": version} | fields
    )


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"], ids=["one file", "shards"])
async def test_weights_from_a_directory(sender: Sender, tmp_path: Path, shard_size: str) -> None:
    engine, model = sender.engine, make_model(46)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    status, reply = await load(engine, tmp_path, "26.1")
    assert (status, reply["success"]) == (200, True), reply
    assert await version_of(engine) == "26.1"
    assert gap(await engine.generate(20, extra_key="26.1"), model).max() < TOLERANCE


async def test_a_directory_read_while_requests_run_mixes_nothing(
    sender: Sender, tmp_path: Path
) -> None:
    engine, first, second = sender.engine, make_model(46), make_model(47)
    if engine.traits.begin_waits:
        pytest.skip("this server waits for the end of running requests")
    await sender.publish(first, "27.0")
    second.save_pretrained(tmp_path)
    running = await engine.start_long("surprised", extra_key="27.0")
    assert (await load(engine, tmp_path, "27.1"))[0] == 200
    await engine.generate(20)
    await engine.post("/abort_request", {"rid": "surprised"})
    reply = await running
    before, after = reply["meta_info"]["weight_versions"]
    assert (before["version"], after["version"]) == ("27.0", "27.1")
    assert gap(reply, first)[: before["end"]].max() < TOLERANCE
    assert gap(reply, second)[before["end"] :].max() < TOLERANCE


async def test_a_paused_engine_stays_paused_while_it_reads(sender: Sender, tmp_path: Path) -> None:
    engine, model = sender.engine, make_model(48)
    model.save_pretrained(tmp_path)
    running = await engine.start_long("paused")
    await engine.post("/pause_generation", {"mode": "in_place"})
    status, reply = await load(engine, tmp_path, "28.0", flush_cache=False)
    assert (status, reply["success"]) == (200, True)
    assert (await engine.get("/ready"))[0] == 503
    status, reply = await load(engine, tmp_path, "28.1")
    assert status == 400
    assert "not flushed" in reply["message"]
    if engine.traits.update_is_atomic:  # a real one names the new weights like those before
        assert await version_of(engine) == "28.1"
    await engine.post("/continue_generation")
    assert not running.done()


def _without(path: Path, name: str) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors[name]
    save_file(tensors, path / "model.safetensors")


def _with(path: Path, name: str, tensor: torch.Tensor) -> None:
    save_file(load_file(path / "model.safetensors") | {name: tensor}, path / "model.safetensors")


def _cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


NORM = "model.norm.weight"
DAMAGES = [
    (lambda path: _without(path, NORM), NORM),
    (lambda path: _with(path, NORM, torch.zeros(31)), NORM),
    (lambda path: _with(path, "extra.weight", torch.zeros(3)), "extra.weight"),
    (_cut, "model.safetensors"),
    (lambda path: (path / "model.safetensors").write_bytes(b"no"), "model.safetensors"),
    (lambda path: (path / "model.safetensors").unlink(), "safetensors"),
    (lambda path: (path / "model.safetensors.index.json").write_text("{}"), "index"),
]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    DAMAGES,
    ids=["missing", "shape", "unknown", "cut", "garbage", "no file", "index"],
)
async def test_a_wrong_directory_leaves_the_weights_alone(
    sender: Sender, tmp_path: Path, damage: Any, complaint: str
) -> None:
    engine = sender.engine
    if not engine.traits.update_is_atomic:
        pytest.skip("this server copies what it can")
    await sender.publish(make_model(48), "29.0")
    before = await checksum_of(engine)
    make_model(49).save_pretrained(tmp_path)
    damage(tmp_path)
    status, reply = await load(engine, tmp_path, "29.1")
    assert (status, reply["success"]) == (400, False)
    assert complaint in reply["message"]
    assert (await checksum_of(engine), await version_of(engine)) == (before, "29.0")


async def test_a_directory_without_a_version_leaves_none(sender: Sender, tmp_path: Path) -> None:
    engine = sender.engine
    if not engine.traits.update_is_atomic:
        pytest.skip("this server keeps the name of the weights it had")
    make_model(48).save_pretrained(tmp_path)
    assert (await load(engine, tmp_path, None))[0] == 200
    assert await version_of(engine) == "unversioned"


async def test_no_directory_is_read_during_a_session(sender: Sender, tmp_path: Path) -> None:
    engine = sender.engine
    if not engine.traits.update_is_atomic:
        pytest.skip("not known of this server")
    make_model(48).save_pretrained(tmp_path)
    await engine.post("/begin_weight_update")
    assert (await load(engine, tmp_path, "30.0"))[0] == 400
    assert (await engine.post("/end_weight_update"))[0] == 200
