"""What every engine must do, over HTTP.

Pause modes are in test_engine_pauses.py, weight updates in test_engine_updates.py.
"""

import asyncio
from typing import Any

import pytest

from tests.contracts.engine.conftest import (
    CONTEXT_LENGTH,
    VOCAB_SIZE,
    Subject,
    body_of,
    check_partial,
    logprobs_of,
    until_idle,
)

pytestmark = pytest.mark.timeout(180)  # a process that imports torch on a busy machine


# ---- /generate


async def test_ids_and_logprobs_come_in_pairs(engine: Subject) -> None:
    reply = await engine.generate(12, rid="pairs")
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == 12 == meta["completion_tokens"]
    assert [pair[1:] for pair in meta["output_token_logprobs"]] == [
        [token, None] for token in reply["output_ids"]
    ]
    assert all(-30 < logprob < 0 for logprob in logprobs_of(reply))
    assert all(0 <= token < VOCAB_SIZE for token in reply["output_ids"])
    assert meta["finish_reason"]["type"] == "length"
    assert meta["id"] == "pairs"
    assert meta["prompt_tokens"] == 4
    assert meta["input_token_logprobs"] == []


async def test_without_return_logprob_there_are_none(engine: Subject) -> None:
    reply = await engine.generate(3, return_logprob=False)
    assert len(reply["output_ids"]) == 3
    assert not reply["meta_info"].get("output_token_logprobs")


async def test_one_version_covers_a_quiet_completion(engine: Subject) -> None:
    _, info = await engine.get("/model_info")
    meta = (await engine.generate(5))["meta_info"]
    assert meta["weight_version"] == info["weight_version"]
    assert meta["weight_versions"] == [{"version": info["weight_version"], "start": 0, "end": 5}]


async def test_the_stop_token_is_part_of_the_output(engine: Subject) -> None:
    every_token = list(range(VOCAB_SIZE))
    sampling = {"stop_token_ids": every_token, "ignore_eos": False}
    reply = await engine.generate(20, sampling=sampling)
    assert len(reply["output_ids"]) == 1 == len(logprobs_of(reply))
    assert reply["meta_info"]["finish_reason"]["type"] == "stop"
    assert reply["meta_info"]["finish_reason"]["matched"] == reply["output_ids"][0]


async def test_ignoring_eos_ignores_stop_tokens_too(engine: Subject) -> None:
    reply = await engine.generate(5, sampling={"stop_token_ids": list(range(VOCAB_SIZE))})
    assert len(reply["output_ids"]) == 5


async def test_eos_ends_unless_ignored(engine: Subject) -> None:
    replies = await asyncio.gather(
        *(engine.generate(300, sampling={"ignore_eos": False}) for _ in range(8))
    )
    stopped = [r for r in replies if r["meta_info"]["finish_reason"]["type"] == "stop"]
    assert stopped, "300 tokens of a vocabulary of 50, 8 times, without eos"
    for reply in stopped:
        assert reply["output_ids"][-1] == 1
        assert 1 not in reply["output_ids"][:-1]


async def test_samples_differ(engine: Subject) -> None:
    first, second = await asyncio.gather(engine.generate(30), engine.generate(30))
    assert first["output_ids"] != second["output_ids"]


async def test_prompt_logprobs_do_not_depend_on_temperature(engine: Subject) -> None:
    ids = [7, 3, 9, 30, 2]
    replies = [
        await engine.generate(
            1, input_ids=ids, logprob_start_len=0, extra_key=f"k{t}", sampling={"temperature": t}
        )
        for t in (1.0, 0.5)
    ]
    pairs = [reply["meta_info"]["input_token_logprobs"] for reply in replies]
    assert [pair[1] for pair in pairs[0]] == ids
    assert pairs[0][0][0] is None
    for a, b in zip(pairs[0][1:], pairs[1][1:], strict=True):
        assert a[0] == pytest.approx(b[0], abs=1e-5)


async def test_unknown_top_level_fields_are_ignored(engine: Subject) -> None:
    reply = await engine.generate(2, no_such_field=1)
    assert len(reply["output_ids"]) == 2


@pytest.mark.parametrize(
    ("changes", "sampling"),
    [
        ({"input_ids": []}, {}),
        ({"input_ids": list(range(10)) * (CONTEXT_LENGTH // 10 + 1)}, {}),
        ({}, {"max_new_tokens": CONTEXT_LENGTH}),
    ],
    ids=["empty", "prompt too long", "budget too long"],
)
async def test_impossible_requests(engine: Subject, changes: Any, sampling: Any) -> None:
    status, reply = await engine.post("/generate", body_of(4, sampling=sampling, **changes))
    assert status == 400
    assert reply["error"]["message"]


async def test_unknown_sampling_parameters_are_refused(engine: Subject) -> None:
    status, reply = await engine.post("/generate", body_of(4, sampling={"no_such_thing": 1}))
    assert status == 400
    assert "unknown field" in str(reply["error"])


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
async def test_ids_outside_the_vocabulary_are_refused(engine: Subject, token: int) -> None:
    if not engine.traits.validates_ids:
        pytest.skip("would kill this server")
    status, reply = await engine.post("/generate", body_of(4, input_ids=[3, token]))
    assert status == 400
    assert "input_ids" in reply["error"]["message"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"n": 2},
        {"temperature": 0.0},
        {"frequency_penalty": 0.1},
        {"presence_penalty": 0.1},
        {"repetition_penalty": 1.1},
    ],
    ids=str,
)
async def test_truncated_sampling_is_refused(engine: Subject, sampling: dict[str, Any]) -> None:
    if not engine.traits.truncated_sampling_refused:
        pytest.skip("this server samples so, with log-probs of the full distribution")
    status, reply = await engine.post("/generate", body_of(4, sampling=sampling))
    assert status == 400
    assert next(iter(sampling)) in reply["error"]["message"]


async def test_a_body_that_is_no_json_is_refused(engine: Subject) -> None:
    async with engine.request("POST", "/generate", data=b"{") as reply:
        assert 400 <= reply.status < 500


# ---- questions


async def test_model_and_server_say_who_they_are(engine: Subject) -> None:
    status, model = await engine.get("/model_info")
    assert status == 200
    assert model["model_path"]
    assert isinstance(model["weight_version"], str)
    status, server = await engine.get("/server_info")
    assert status == 200
    assert server["version"]
    assert (server["tp_size"], server["dp_size"]) == (engine.tp_size, 1)


async def test_healthy_and_ready(engine: Subject) -> None:
    assert (await engine.get("/ready"))[0] == 200
    assert (await engine.get("/health"))[0] == 200


async def test_the_checksum_is_stable_and_has_two_methods(engine: Subject) -> None:
    status, first = await engine.post("/weights_checker", {"action": "checksum"})
    assert status == 200
    status, second = await engine.get("/weights_checker?action=checksum")
    assert status == 200
    assert first["per_engine_checksum"] == second["per_engine_checksum"]


# ---- aborting


async def test_an_aborted_request_returns_what_it_has(engine: Subject) -> None:
    running = await engine.start_long("victim")
    async with engine.request("POST", "/abort_request", json={"rid": "victim"}) as reply:
        assert reply.status == 200
        assert await reply.read() == b""
    check_partial(await running)


async def test_unknown_rids_are_no_error(engine: Subject) -> None:
    assert (await engine.post("/abort_request", {"rid": "nobody"}))[0] == 200


async def test_abort_all(engine: Subject) -> None:
    running = [await engine.start_long(f"all-{i}") for i in range(3)]
    assert (await engine.post("/abort_request", {"abort_all": True}))[0] == 200
    for reply in await asyncio.gather(*running):
        check_partial(reply)


async def test_abort_while_paused(engine: Subject) -> None:
    running = await engine.start_long("frozen")
    await engine.post("/pause_generation", {"mode": "in_place"})
    assert (await engine.post("/abort_request", {"rid": "frozen"}))[0] == 200
    await engine.post("/continue_generation")
    check_partial(await running)


async def test_abort_of_a_request_that_a_pause_holds(engine: Subject) -> None:
    """A real server does not know it yet; only a lost connection ends it there."""
    await engine.post("/pause_generation", {"mode": "in_place"})
    waiting = asyncio.create_task(engine.generate(5, rid="waiting"))
    if engine.traits.knows_held_requests:
        async with asyncio.timeout(10):
            while not waiting.done():  # the first ones may come before the request itself
                await engine.post("/abort_request", {"rid": "waiting"})
        assert (await waiting)["meta_info"]["finish_reason"]["type"] == "abort"
    else:
        await engine.post("/abort_request", {"rid": "waiting"})
        waiting.cancel()
    await engine.post("/continue_generation")
    await until_idle(engine)


async def test_a_lost_client_aborts_its_request(engine: Subject) -> None:
    running = await engine.start_long("lost")
    assert (await engine.get("/flush_cache"))[0] == 400
    running.cancel()
    await until_idle(engine)


async def test_flush_needs_an_idle_engine(engine: Subject) -> None:
    await engine.start_long("busy")
    for ask in (engine.get, engine.post):
        status, text = await ask("/flush_cache")
        assert status == 400
        assert isinstance(text, str)
    await engine.post("/abort_request", {"abort_all": True})
    await until_idle(engine)
    assert (await engine.post("/flush_cache"))[0] == 200
    assert (await engine.get("/flush_cache"))[0] == 200


# ---- sessions


def update_body(**changes: Any) -> dict[str, Any]:
    return {
        "names": ["model.norm.weight"],
        "dtypes": ["float32"],
        "shapes": [[32]],
        "group_name": "no-such-group",
        "flush_cache": False,
        "load_format": "flattened_bucket",
        "weight_version": "9.9",
    } | changes


async def test_sessions_open_and_close_once(engine: Subject) -> None:
    assert (await engine.post("/end_weight_update"))[0] == 400
    assert (await engine.post("/begin_weight_update"))[0] == 200
    status, reply = await engine.post("/begin_weight_update")
    assert status == 400
    assert reply["success"] is False
    assert reply["message"]
    status, reply = await engine.post("/end_weight_update")
    assert (status, reply["success"]) == (200, True)
    assert (await engine.post("/end_weight_update"))[0] == 400


async def test_updates_outside_a_session_are_refused(engine: Subject) -> None:
    status, reply = await engine.post("/update_weights_from_distributed", update_body())
    assert (status, reply["success"]) == (400, False)
    assert "begin" in reply["message"]


@pytest.mark.parametrize(
    "changes", [{}, {"load_format": "no_such_format"}, {"dtypes": []}], ids=str
)
async def test_updates_that_cannot_start_are_refused(engine: Subject, changes: Any) -> None:
    await engine.post("/begin_weight_update")
    status, reply = await engine.post("/update_weights_from_distributed", update_body(**changes))
    assert (status, reply["success"]) == (400, False)
    assert (await engine.post("/end_weight_update"))[0] == 200
    assert (await engine.get("/model_info"))[1]["weight_version"] != "9.9"


async def test_destroying_an_unknown_group_is_refused(engine: Subject) -> None:
    status, reply = await engine.post(
        "/destroy_weights_update_group", {"group_name": "no-such-group"}
    )
    assert (status, reply["success"]) == (400, False)
