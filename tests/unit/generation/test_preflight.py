"""What is compared before anything is loaded: versions, drivers, cards and their memory."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from async_grpo.config.engine import EngineSection
from async_grpo.config.launch import LaunchSection
from async_grpo.config.policy import PolicySection
from async_grpo.config.run import RunSection
from async_grpo.config.schema import Config
from async_grpo.config.task import TaskSection
from async_grpo.config.trainer import TrainerSection
from async_grpo.config.weights import Backend, Transport, WeightsSection
from async_grpo.devices.facts import Facts
from async_grpo.errors import ConfigError
from async_grpo.generation.preflight import Preflight, Sides, compare, preflight, why_skipped
from tests.fakes.machine import GIB, answer, answering, card, make_machine


def config(
    *,
    weights: dict[str, Any] | None = None,
    device: str = "auto",
    generators: int = 1,
    **engine: Any,
) -> Config:
    return Config(
        run=RunSection(output_dir="out", num_train_steps=1),
        policy=PolicySection(model="m"),
        task=TaskSection(name="reverse"),
        engine=EngineSection(**{"kind": "sglang", "python": "/env/python"} | engine),
        trainer=TrainerSection(device=device),
        weights=WeightsSection(**{"backend": Backend.nccl} | (weights or {})),
        launch=LaunchSection(num_generators=generators),
    )


def facts(said: dict[str, Any]) -> Facts:
    return msgspec.convert(said, Facts)


def compared(
    made: Config,
    trainer: dict[str, Any],
    engine: dict[str, Any],
    device_ids: list[str] | None = None,
    *,
    here: bool = True,
) -> Preflight:
    return compare(
        Sides(
            config=made, trainer=facts(trainer), engine=facts(engine), trainer_here=here,
            device_ids=["1"] if device_ids is None else device_ids, python="/ours/python",
        )
    )  # fmt: skip


OTHER_NCCL = answer(8, torch="2.13.0+cu130", nccl="2.29.7")
MIXED = (
    "NCCL works with its own version only; the trainer has 2.29.7 (torch 2.13.0+cu130, "
    "/ours/python), the engines have 2.30.7 (torch 2.14.1+cu130, /env/python): install one torch "
    "in both (constraints-gpu.txt, docs/gpu.md), or set weights.backend=gloo, or "
    "weights.transport=http or disk"
)


def test_one_torch_on_both_sides_is_told_and_fits():
    found = compared(config(), answer(8), answer(8))
    assert (found.problems, found.warnings, found.skipped) == ([], [], "")
    assert found.sides == [
        f"trainer (/ours/python): {facts(answer(8))}",
        f"engines (/env/python): {facts(answer(8))}",
    ]


@pytest.mark.parametrize("backend", [Backend.nccl, Backend.auto])
def test_two_versions_of_nccl_are_refused_by_name_before_the_first_broadcast(backend):
    found = compared(config(weights={"backend": backend}), OTHER_NCCL, answer(8))
    assert found.problems == [f"weights.backend={backend}: {MIXED}"]


@pytest.mark.parametrize(
    "weights", [{"backend": Backend.gloo}, {"transport": Transport.http}, {"transport": "disk"}]
)
def test_two_versions_of_nccl_matter_to_nccl_only(weights):
    if weights.get("transport") == "disk":
        weights = {"transport": Transport.disk}
    assert compared(config(weights=weights), OTHER_NCCL, answer(8)).problems == []


def test_auto_without_a_trainers_card_is_gloo():
    made = config(weights={"backend": Backend.auto}, device="cpu")
    assert compared(made, OTHER_NCCL, answer(8)).problems == []


def test_late_weights_by_broadcast_need_one_nccl_too():
    made = config(weights={"transport": Transport.http, "late_transport": Transport.broadcast})
    assert len(compared(made, OTHER_NCCL, answer(8)).problems) == 1


def test_a_torch_without_nccl_is_no_match_of_another():
    none = answer(8, nccl="")
    (problem,) = compared(config(), none, none).problems
    assert "the trainer has none" in problem


def test_of_a_trainer_elsewhere_a_version_is_only_supposed():
    found = compared(config(), OTHER_NCCL, answer(8), here=False)
    assert found.problems == []
    (warning,) = found.warnings
    assert "the trainer, if it has what is here, has 2.29.7" in warning


def test_a_driver_too_old_for_one_side_is_told_of_that_side():
    old = {"torch": "2.14.1", "cuda": "13.0", "driver": "550.54.15", "problem": "too old"}
    why = (
        "torch 2.14.1 cannot use CUDA: too old; the driver is 550.54.15, and torch for CUDA 13.0 "
        "needs branch 580 or newer"
    )
    assert compared(config(), old, answer(8)).problems == [
        f"trainer.device=auto: {why}; to go on without the card set trainer.device=cpu"
    ]
    assert compared(config(device="cpu"), old, answer(8)).problems != [], "nccl has no card there"
    (problem,) = compared(config(), answer(8), old).problems
    assert problem.startswith(f"engine.python: /env/python: {why}; for engines on the CPU add")


def test_on_a_machine_without_cards_only_the_engines_lack_them():
    none = {"torch": "2.13.0+cpu", "problem": "it is a build without CUDA"}
    (problem,) = compared(config(), none, none, []).problems
    assert problem.startswith("engine.python: ")
    assert len(compared(config(device="cuda"), none, none, []).problems) == 2
    # the engines see a card: then `auto` must not be the CPU
    assert len(compared(config(), none, answer(1), ["0"]).problems) == 1


def test_a_trainers_card_that_is_not_there_is_told():
    (problem,) = compared(config(device="cuda:8"), answer(8), answer(8)).problems
    assert problem == "trainer.device=cuda:8: CUDA shows the trainer 8 cards, counted from 0"


def test_a_card_of_trainer_and_engine_is_found_whatever_it_is_called():
    by_name = "GPU-00000002"  # NVIDIA lets one shorten it
    found = compared(config(device="cuda:2"), answer(8), answer(8), ["1", by_name])
    (problem,) = found.problems
    assert problem.startswith(
        "engine.device_ids: the card of engine 1 (NVIDIA H100, GPU-00000002-0000) is the trainer's "
        "too, and NCCL refuses a shared card"
    )
    renumbered = answer(8) | {"cards": [card(3), card(0)]}  # by the environment of the engines
    assert len(compared(config(), answer(8), renumbered, ["1"]).problems) == 1
    assert compared(config(), answer(8), renumbered, ["0"]).problems == []


def test_a_shared_card_is_allowed_where_nccl_is_not_used():
    for weights in ({"backend": Backend.auto}, {"backend": Backend.gloo}):
        assert compared(config(weights=weights), answer(1), answer(1), ["0"]).problems == []


def test_engines_of_a_cell_on_one_card_are_found_by_its_name():
    ids = ["1", "GPU-00000001-0000"]
    (problem,) = compared(
        config(weights={"engines_per_cell": 2}), answer(8), answer(8), ids
    ).problems
    assert problem.startswith("engine.device_ids: engines 0 and 1 have the same card (GPU-0000000")
    assert compared(config(), answer(8), answer(8), ids).problems == []


def test_a_card_that_cuda_does_not_show_is_told():
    (problem,) = compared(config(), answer(8), answer(2), ["2"]).problems
    assert problem == (
        "engine.device_ids: card 2 of engine 0 is none of the 2 that CUDA shows /env/python"
    )


def fraction(value: float, bucket_bytes: int = GIB, **weights: Any) -> Config:
    return config(
        server_args=["--mem-fraction-static", str(value)],
        weights={"bucket_bytes": bucket_bytes} | weights,
    )


def test_a_bucket_without_room_beside_sglangs_share_is_refused():
    found = compared(fraction(0.99), answer(8), answer(8))
    (problem,) = found.problems
    assert problem.startswith(
        "weights.bucket_bytes (1.0 GiB): engine 0 receives it beside --mem-fraction-static=0.99, "
        "which leaves 0.8 GiB of 80.0 GiB for it"
    )
    tight = compared(fraction(0.98), answer(8), answer(8))
    assert (len(tight.problems), len(tight.warnings)) == (0, 1)
    assert compared(fraction(0.97), answer(8), answer(8)).warnings == []
    assert compared(fraction(0.99, transport=Transport.http), answer(8), answer(8)).problems == []


def test_a_share_that_is_no_number_is_named():
    made = config(server_args=["--mem-fraction-static=most"])
    (problem,) = compared(made, answer(8), answer(8)).problems
    assert problem == "engine.server_args: --mem-fraction-static=most is no number"


def test_a_card_that_another_program_fills_is_warned_of():
    full = answer(8)
    full["cards"][1] = card(1, free_gib=10)
    (warning,) = compared(config(), answer(8), full).warnings
    assert warning == "engine 0: another program fills its card: 10.0 GiB of 80.0 GiB are free"
    full["cards"][1] = full["cards"][2] | {"free_bytes": None, "problem": "busy"}
    (warning,) = compared(config(), answer(8), full).warnings
    assert warning == "engine 0: its card cannot be used now: busy"


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ({"kind": "embedded"}, "the embedded engine computes in the trainer's own environment"),
        ({"server_args": ["--device=cpu"]}, "SGLang computes on cpu, not on NVIDIA cards"),
        ({"urls": ["http://a:1"]}, "engines are attached, and do not tell their NCCL"),
        ({"kind": "a.b:c"}, "what engine.kind=a.b:c computes with is not known here"),
    ],
)
def test_what_is_not_compared_says_why(engine, why):
    assert why_skipped(config(**engine)).startswith(why)
    assert preflight(config(**engine), whole_run=True).skipped.startswith(why)


def test_both_interpreters_are_asked_with_the_cards_of_all_generators(tmp_path: Path):
    root = make_machine(tmp_path / "machine", 3)
    engine = answering(tmp_path / "engine", answer(3))
    trainer = answering(tmp_path / "trainer", OTHER_NCCL)
    made = config(python=engine, generators=2, environment={"NCCL_DEBUG": "INFO"})
    environ = {"PYTHONPATH": "/ours", "PATH": "/bin"}
    found = preflight(made, whole_run=True, environ=environ, root=root, python=trainer)
    assert f"the trainer has 2.29.7 (torch 2.13.0+cu130, {trainer})" in found.problems[0]
    said = json.loads(Path(f"{engine}.env").read_text())
    assert said["NCCL_DEBUG"] == "INFO"
    assert "PYTHONPATH" not in said, "it would import our torch"
    assert json.loads(Path(f"{trainer}.env").read_text())["PYTHONPATH"] == "/ours"
    with pytest.raises(ConfigError, match="engines need 4 cards beside the trainer's, and 2 of"):
        preflight(config(python=engine, generators=4), whole_run=True, environ=environ, root=root)


def test_every_problem_is_raised_after_both_sides_are_told():
    said: list[str] = []
    with pytest.raises(ConfigError) as caught:
        compared(fraction(0.99), OTHER_NCCL, answer(8)).require(said.append)
    assert len(caught.value.problems) == 2
    assert [line.partition(" ")[0] for line in said] == ["trainer", "engines"]
