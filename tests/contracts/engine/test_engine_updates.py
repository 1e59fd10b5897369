"""Weight updates over a real gloo group, judged by log-probs of a plain transformers forward."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.contracts.engine.conftest import CONTEXT_LENGTH, make_model
from tests.contracts.engine.update_tools import (
    TOLERANCE,
    Sender,
    checksum_of,
    gap,
    reference_logprobs,
    version_of,
)

pytestmark = pytest.mark.timeout(180)  # a process that imports torch on a busy machine


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_the_model(sender: Sender, temperature: float) -> None:
    engine, model = sender.engine, make_model(1)
    await sender.publish(model, "1.1")
    replies = await asyncio.gather(
        *(
            engine.generate(n, sampling={"temperature": temperature}, extra_key="1.1")
            for n in (5, 40, 90)
        )
    )
    for reply in replies:
        assert gap(reply, model, temperature).max() < TOLERANCE
        if temperature != 1:
            assert gap(reply, model, 1.0).max() > 0.01


async def test_temperatures_mix_in_one_batch(sender: Sender) -> None:
    engine, model = sender.engine, make_model(1)
    await sender.publish(model, "1.1")
    temperatures = [0.5, 1.0, 2.0, 0.7]
    replies = await asyncio.gather(
        *(engine.generate(30, sampling={"temperature": t}, extra_key="mix") for t in temperatures)
    )
    for reply, temperature in zip(replies, temperatures, strict=True):
        assert gap(reply, model, temperature).max() < TOLERANCE


async def test_prompt_logprobs_are_those_of_the_model(sender: Sender) -> None:
    engine, model = sender.engine, make_model(2)
    await sender.publish(model, "1.2")
    ids = [9, 8, 7, 40, 41, 2]
    reply = await engine.generate(1, input_ids=ids, logprob_start_len=0, extra_key="probe-1.2")
    found = torch.tensor([pair[0] for pair in reply["meta_info"]["input_token_logprobs"][1:]])
    assert (found - reference_logprobs(model, ids[:1], ids[1:])).abs().max() < TOLERANCE


async def test_the_start_weights_are_the_checkpoint(sender: Sender) -> None:
    engine = sender.engine
    model = AutoModelForCausalLM.from_pretrained(engine.model_path)
    await sender.publish(model, "1.0")
    assert gap(await engine.generate(20, extra_key="1.0"), model).max() < TOLERANCE


async def test_checksums_tell_weights_apart(sender: Sender) -> None:
    engine = sender.engine
    await sender.publish(make_model(1), "1.1")
    first = await checksum_of(engine)
    await sender.publish(make_model(2), "1.2")
    second = await checksum_of(engine)
    await sender.publish(make_model(1), "1.3")
    assert await checksum_of(engine) == first != second
    assert await version_of(engine) == "1.3"


@pytest.mark.parametrize("num_updates", [1, 3])
async def test_spans_are_exact_to_the_token(sender: Sender, num_updates: int) -> None:
    engine = sender.engine
    models = [make_model(seed) for seed in range(10, 11 + num_updates)]
    await sender.publish(models[0], "2.0")
    running = [await engine.start_long(f"span-{i}", extra_key="2.0") for i in range(3)]
    for number, model in enumerate(models[1:], start=1):
        await engine.post("/pause_generation", {"mode": "in_place"})
        await sender.publish(model, f"2.{number}")
        await engine.post("/continue_generation")
        await engine.generate(25)
    await engine.post("/abort_request", {"abort_all": True})
    for reply in await asyncio.gather(*running):
        spans = reply["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == [f"2.{i}" for i in range(num_updates + 1)]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == len(reply["output_ids"])
        assert reply["meta_info"]["weight_version"] == f"2.{num_updates}"
        # The first token of the new weights already differs: nobody is off by one.
        switch = spans[0]["end"] + engine.traits.late_tokens
        assert switch >= 8
        assert gap(reply, models[0])[:switch].max() < TOLERANCE
        assert gap(reply, models[0])[switch] > 100 * TOLERANCE


async def test_unpaused_requests_never_sample_from_half_updated_weights(sender: Sender) -> None:
    engine = sender.engine
    if engine.traits.begin_waits:
        pytest.skip("begin waits for running requests there")
    first, second = make_model(20), make_model(21)
    await sender.publish(first, "3.0")
    running = await engine.start_long("unpaused")
    await sender.publish(second, "3.1")
    await engine.generate(10)
    await engine.post("/abort_request", {"rid": "unpaused"})
    spans = (await running)["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["3.0", "3.1"]
    assert gap(await running, first)[: spans[0]["end"]].max() < TOLERANCE


async def test_requests_that_wait_out_an_update_are_of_the_new_weights(sender: Sender) -> None:
    engine, model = sender.engine, make_model(31)
    await sender.publish(make_model(30), "4.0")
    await engine.post("/pause_generation", {"mode": "in_place"})
    waiting = asyncio.create_task(engine.generate(10, logprob_start_len=0, extra_key="4.1"))
    await sender.publish(model, "4.1")
    await engine.post("/continue_generation")
    reply = await waiting
    assert reply["meta_info"]["weight_versions"] == [{"version": "4.1", "start": 0, "end": 10}]
    assert gap(reply, model).max() < TOLERANCE
    pairs = reply["meta_info"]["input_token_logprobs"][1:]
    found = torch.tensor([pair[0] for pair in pairs])
    assert (found - reference_logprobs(model, [3], [4, 5, 6])).abs().max() < TOLERANCE


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({NORM: torch.ones(16)}, "shape"),
        ({NORM: torch.ones(32, dtype=torch.bfloat16)}, "bfloat16"),
        ({"model.no_such.weight": torch.ones(3)}, "no_such"),
        ({"model.layers.0.input_layernorm.weight": torch.zeros(32), NORM: torch.ones(31)}, NORM),
    ],
    ids=["shape", "dtype", "name", "second of two"],
)
async def test_refused_buckets_change_nothing(
    sender: Sender, tensors: dict[str, torch.Tensor], complaint: str
) -> None:
    engine = sender.engine
    if not (engine.traits.update_is_atomic and engine.traits.refuses_unknown_tensors):
        pytest.skip("this server copies what it can")
    await sender.publish(make_model(1), "5.0")
    before = await checksum_of(engine)
    await engine.post("/begin_weight_update")
    status, reply = await sender.send(tensors, "5.1")
    assert (status, reply["success"]) == (400, False)
    assert complaint in reply["message"]
    assert (await engine.post("/end_weight_update"))[0] == 200
    assert await checksum_of(engine) == before
    assert await version_of(engine) == "5.0"
    await sender.publish(make_model(2), "5.2")
    assert gap(await engine.generate(10, extra_key="5.2"), make_model(2)).max() < TOLERANCE


async def test_a_session_that_names_no_version_leaves_none(sender: Sender) -> None:
    engine = sender.engine
    if not engine.traits.update_is_atomic:
        pytest.skip("this server keeps the name of the weights it had")
    await sender.publish(make_model(1), "6.0")
    await engine.post("/begin_weight_update")
    assert (await sender.send({NORM: torch.ones(32)}, None))[0] == 200
    await engine.post("/end_weight_update")
    assert await version_of(engine) == "unversioned"


async def test_flushing_while_requests_run_is_reported_after_loading(sender: Sender) -> None:
    engine = sender.engine
    await sender.publish(make_model(1), "7.0")
    await engine.start_long("running")
    await engine.post("/pause_generation", {"mode": "in_place"})
    await engine.post("/begin_weight_update")
    model = dict(make_model(2).named_parameters())
    status, reply = await sender.send(model, "7.1", flush_cache=True)
    assert status == 400
    assert "not flushed" in reply["message"]
    await engine.post("/end_weight_update")
    await engine.post("/continue_generation")
    reply = await engine.generate(10, extra_key="7.1")
    assert gap(reply, make_model(2)).max() < TOLERANCE


async def test_a_group_name_is_free_again_after_destroy(sender: Sender) -> None:
    await sender.publish(make_model(1), "8.0")
    await sender.leave()
    again = Sender(sender.engine)
    again.group_name = sender.group_name
    await again.join()
    await again.publish(make_model(2), "8.1")
    assert await version_of(sender.engine) == "8.1"
    await again.leave()
    sender._group = None


async def test_long_prompts_are_read_in_chunks(sender: Sender) -> None:
    engine, model = sender.engine, make_model(1)
    await sender.publish(model, "9.0")
    prompt = [2 + i % 40 for i in range(CONTEXT_LENGTH - 500)]
    reply = await engine.generate(4, input_ids=prompt)
    found = torch.tensor([pair[0] for pair in reply["meta_info"]["output_token_logprobs"]])
    assert (found - reference_logprobs(model, prompt, reply["output_ids"])).abs().max() < 1e-4
