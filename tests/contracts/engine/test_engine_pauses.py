"""The three pause modes, load figures, versions by name and updates from a disk, over HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.engine.conftest import CONTEXT_LENGTH, Subject, check_partial, until_idle

pytestmark = pytest.mark.timeout(180)  # a process that imports torch on a busy machine


async def test_in_place_pause_freezes_and_continue_goes_on(engine: Subject) -> None:
    running = asyncio.create_task(engine.generate(600))
    await engine.generate(8)
    status, _ = await engine.post("/pause_generation", {"mode": "in_place"})
    assert status == 200
    assert (await engine.get("/ready"))[0] == 503
    assert (await engine.get("/model_info"))[0] == 200
    newcomer = asyncio.create_task(engine.generate(2, logprob_start_len=0))
    done, _ = await asyncio.wait({running, newcomer}, timeout=0.3)
    assert not done
    assert (await engine.post("/pause_generation", {"mode": "in_place"}))[0] == 200
    assert (await engine.post("/continue_generation"))[0] == 200
    assert (await engine.get("/ready"))[0] == 200
    assert len((await newcomer)["output_ids"]) == 2
    assert len((await running)["output_ids"]) == 600


async def test_continue_without_pause_is_no_error(engine: Subject) -> None:
    assert (await engine.post("/continue_generation"))[0] == 200


async def test_an_unknown_mode_is_refused(engine: Subject) -> None:
    status, _ = await engine.post("/pause_generation", {"mode": "sideways"})
    assert 400 <= status < 500
    assert (await engine.get("/ready"))[0] == 200


async def load_of(engine: Subject) -> dict[str, Any]:
    status, reply = await engine.get("/v1/loads?include=core")
    assert status == 200
    (load,) = reply["loads"]
    return load


async def until_load(engine: Subject, *, running: int) -> dict[str, Any]:
    """The load once so many requests run: it lags by some steps."""
    async with asyncio.timeout(20):
        while (load := await load_of(engine))["num_running_reqs"] != running:
            pass
        return load


@pytest.mark.parametrize("body", [{"mode": "abort"}, {}], ids=["abort", "default"])
async def test_abort_returns_what_there_is_and_holds_what_comes(
    engine: Subject, body: dict[str, str]
) -> None:
    running = [await engine.start_long(f"a{i}") for i in range(3)]
    assert (await engine.post("/pause_generation", body))[0] == 200
    for reply in await asyncio.gather(*running):
        check_partial(reply)
    assert (await engine.get("/ready"))[0] == 503
    assert (await engine.post("/flush_cache"))[0] == 200
    newcomer = asyncio.create_task(engine.generate(2))
    done, _ = await asyncio.wait({newcomer}, timeout=0.3)
    assert not done
    assert (await engine.post("/continue_generation"))[0] == 200
    assert len((await newcomer)["output_ids"]) == 2


async def test_retract_frees_the_kv_and_loses_no_token(engine: Subject) -> None:
    running = [await engine.start_long(f"r{i}") for i in range(3)]
    quiet = asyncio.create_task(engine.generate(600, rid="r-short"))
    await engine.generate(8)
    before = await load_of(engine)
    assert before["token_usage"] > 0
    assert (await engine.post("/pause_generation", {"mode": "retract"}))[0] == 200
    if engine.traits.load_is_live:
        during = await load_of(engine)
        assert during["num_running_reqs"] == 0
        assert during["num_waiting_reqs"] == before["num_running_reqs"] + before["num_waiting_reqs"]
    assert (await engine.post("/flush_cache"))[0] == 200
    assert not any(task.done() for task in [*running, quiet])
    assert (await engine.post("/continue_generation"))[0] == 200
    reply = await quiet
    assert len(reply["output_ids"]) == 600
    assert reply["meta_info"]["num_retractions"] == 1
    assert not any(task.done() for task in running)
    await engine.post("/abort_request", {"abort_all": True})
    for reply in await asyncio.gather(*running):
        check_partial(reply)
        assert reply["meta_info"]["num_retractions"] == 1


async def test_requests_are_retracted_once_for_each_pause(engine: Subject) -> None:
    running = await engine.start_long("again")
    for _ in range(3):
        await engine.post("/pause_generation", {"mode": "retract"})
        await engine.post("/pause_generation", {"mode": "retract"})
        await engine.post("/continue_generation")
        await engine.generate(8)
    await engine.post("/abort_request", {"rid": "again"})
    reply = await running
    check_partial(reply)
    assert reply["meta_info"]["num_retractions"] == 3


async def test_only_a_pause_that_keeps_the_kv_forbids_a_flush(engine: Subject) -> None:
    await engine.start_long("kept")
    await engine.post("/pause_generation", {"mode": "in_place"})
    status, _ = await engine.post("/flush_cache")
    assert status == 400
    await engine.post("/pause_generation", {"mode": "retract"})
    assert (await engine.post("/flush_cache"))[0] == 200
    await engine.post("/continue_generation")
    await engine.generate(4)
    assert (await engine.post("/flush_cache"))[0] == 400


async def test_loads_of_an_idle_and_a_busy_engine(engine: Subject) -> None:
    await until_idle(engine)
    idle = await until_load(engine, running=0)
    assert (idle["num_waiting_reqs"], idle["token_usage"]) == (0, 0)
    assert idle["max_total_num_tokens"] > 0
    await engine.start_long("busy")
    busy = await until_load(engine, running=1)
    assert 0 < busy["token_usage"] <= 1


async def metrics_of(engine: Subject) -> dict[str, float]:
    """The last sample of each series."""
    status, text = await engine.get("/metrics")
    assert status == 200
    return {
        line.partition("{")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }


async def test_metrics_are_prometheus_text(engine: Subject) -> None:
    await engine.start_long("counted")
    async with asyncio.timeout(20):  # a real server's lag by some steps
        while (values := await metrics_of(engine))["sglang:num_running_reqs"] != 1:
            pass
    assert 0 <= values["sglang:token_usage"] <= 1  # rounded to hundredths by the real one
    await engine.post("/abort_request", {"abort_all": True})
    aborted = "sglang:num_aborted_requests_total"
    assert (await metrics_of(engine))[aborted] == values[aborted] + 1


# ---- a new name for the present weights


async def test_a_rename_aborts_by_default(engine: Subject) -> None:
    running = await engine.start_long("renamed")
    status, reply = await engine.post("/update_weight_version", {"new_version": "11.1"})
    assert (status, reply["success"], reply["new_version"]) == (200, True, "11.1")
    check_partial(await running)
    assert (await engine.get("/model_info"))[1]["weight_version"] == "11.1"


async def test_a_rename_may_leave_requests_alone(engine: Subject) -> None:
    await engine.post("/update_weight_version", {"new_version": "12.0"})
    running = await engine.start_long("kept")
    await engine.post(
        "/update_weight_version", {"new_version": "12.1", "abort_all_requests": False}
    )
    await engine.generate(8)
    assert not running.done()
    await engine.post("/abort_request", {"abort_all": True})
    meta = (await running)["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == ["12.0", "12.1"]
    assert meta["weight_version"] == "12.1"


async def test_a_rename_needs_a_name(engine: Subject) -> None:
    assert 400 <= (await engine.post("/update_weight_version", {}))[0] < 500


# ---- from a disk


async def test_a_directory_that_is_not_there_changes_nothing(
    engine: Subject, tmp_path: Path
) -> None:
    version = (await engine.get("/model_info"))[1]["weight_version"]
    for path in (tmp_path / "none", tmp_path):
        status, reply = await engine.post(
            "/update_weights_from_disk", {"model_path": str(path), "weight_version": "13.1"}
        )
        assert (status, reply["success"]) == (400, False)
        assert reply["message"]
    assert (await engine.get("/model_info"))[1]["weight_version"] == version
    assert (await engine.get("/ready"))[0] == 200
    assert len((await engine.generate(4))["output_ids"]) == 4


async def test_a_prompt_as_long_as_the_context_outlasts_a_retraction(engine: Subject) -> None:
    prompt = [3 + i % 40 for i in range(CONTEXT_LENGTH - 200)]
    running = asyncio.create_task(engine.generate(150, input_ids=prompt))
    await engine.generate(40)
    await engine.post("/pause_generation", {"mode": "retract"})
    await engine.post("/continue_generation")
    assert len((await running)["output_ids"]) == 150
