"""The trainer role's refusals, and how it ends when it has to."""

import asyncio
import json
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from async_grpo.config.alarms import AlarmAction, AlarmsSection
from async_grpo.config.policy import PolicySection
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.staleness import StalenessSection
from async_grpo.errors import AsyncGrpoError, ConfigError, NumericsError, PeerError, PeerLost
from async_grpo.replay.server import ReplayServer
from async_grpo.roles import trainer
from async_grpo.training.feed import LoopThread
from async_grpo.types import Rollout, RolloutGroup, Segment
from tests.fakes.replay_harness import at_address, replay_config
from tests.fakes.scripted_generator import ScriptedGenerator
from tests.fakes.tiny_policy import random_groups, tiny_module


@pytest.fixture
def loop():
    thread = LoopThread("others")
    yield thread
    thread.close()


@pytest.fixture
def box(loop):
    """The server and the generator of the test; stopped at its end."""
    content = {}
    yield content
    loop.call(stop(content))


@pytest.fixture
def config(tmp_path):
    tiny_module(dtype=torch.float32).save_pretrained(tmp_path / "model")
    base = replay_config(tmp_path / "run", group_size=3, num_tokens=8, heartbeat_s=0.1)
    return replace(
        base,
        policy=PolicySection(model=str(tmp_path / "model")),
        metrics=replace(base.metrics, tensorboard=False),
    )


async def serve(config, box, group_for=None, refusal=""):
    box["server"] = ReplayServer(config)
    box["serving"] = asyncio.create_task(box["server"].serve())
    there = at_address(config, box["server"].address)
    if group_for is not None:
        box["generator"] = ScriptedGenerator(there, group_for, refusal)
        box["generating"] = asyncio.create_task(box["generator"].run())
    return there


async def stop(box):
    if "server" not in box:
        return
    if "generating" in box:
        box["generating"].cancel()
        await asyncio.gather(box["generating"], return_exceptions=True)
    box["server"].stop("the test is over")
    await asyncio.wait_for(box["serving"], 10)
    box["server"].close()


def group_for(ticket, weights):
    (template,) = random_groups(1, 3, seed=ticket.group_id, max_tokens=8)
    rollouts = []
    for rollout in template.rollouts:
        (sequence,) = rollout.sequences
        sequence.segments = [Segment(weights, sequence.num_tokens)]
        rollouts.append(Rollout([sequence], rollout.reward))
    return RolloutGroup(ticket.group_id, ticket.attempt, ticket.prompt_index, rollouts)


def test_a_port_that_is_not_known_is_refused(config):
    with pytest.raises(ConfigError, match=r"replay\.address"):
        trainer.main(config)


def test_more_than_one_rank_is_refused(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 trainer ranks"):
        trainer.main(at_address(config, "tcp://127.0.0.1:1"))


def test_a_model_that_fails_the_self_test_is_refused_unless_that_is_switched_off(config, tmp_path):
    scaled = GraniteConfig(
        vocab_size=19, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, logits_scaling=0.01,
    )  # fmt: skip
    torch.manual_seed(0)
    GraniteForCausalLM(scaled).save_pretrained(tmp_path / "scaled")
    nobody = at_address(config, f"ipc://{tmp_path}/nobody")
    nobody = replace(
        nobody,
        policy=PolicySection(model=str(tmp_path / "scaled")),
        run=replace(nobody.run, no_progress_timeout_s=0.5),
    )
    with pytest.raises(ConfigError, match="more than a linear map"):
        trainer.main(nobody)
    unchecked = replace(nobody, trainer=replace(nobody.trainer, self_test=False))
    with pytest.raises(PeerError, match="nobody"):
        trainer.main(unchecked)


def test_no_generator_ends_the_run_by_the_progress_deadline(config, loop, box):
    there = loop.call(serve(config, box))
    there = replace(there, run=replace(there.run, no_progress_timeout_s=2.0))
    with pytest.raises(PeerLost, match="handed out no groups"):
        trainer.main(there)


def test_updates_that_fail_are_told_when_no_groups_come(config, loop, box):
    there = loop.call(serve(config, box, group_for, "over 5 s (weights.timeout_s)"))
    there = replace(there, run=replace(there.run, no_progress_timeout_s=4.0))
    told = r"handed out no groups .*the last publish failed: .*over 5 s \(weights\.timeout_s\)"
    with pytest.raises(PeerLost, match=told):
        trainer.main(there)


def test_sigterm_while_it_waits_for_a_server_ends_it_cleanly(config, tmp_path):
    nobody = at_address(config, f"ipc://{tmp_path}/nobody")
    timer = threading.Timer(
        2.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGTERM)
    )
    timer.start()
    trainer.main(nobody)  # returns
    timer.join()


def test_sigterm_ends_after_the_step_and_leaves_cleanly(config, loop, box):
    there = loop.call(serve(config, box, group_for))
    steps = RunDirectory(config_root(config)).steps

    def terminate_after_two_steps():
        while not steps.exists() or len(steps.read_text().splitlines()) < 2:
            waiting.wait(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    waiting = threading.Event()
    thread = threading.Thread(target=terminate_after_two_steps, daemon=True)
    thread.start()
    trainer.main(there)  # returns
    thread.join(10)
    lines = [json.loads(line) for line in steps.read_text().splitlines()]
    assert 2 <= len(lines) < there.run.num_train_steps
    metrics = RunDirectory(config_root(config)).metrics.read_text().splitlines()
    assert len(metrics) == len(lines)
    assert all(line["max_staleness"] <= there.staleness.max_staleness for line in lines)
    directory = RunDirectory(config_root(config))
    assert not directory.final_model.exists()
    assert directory.checkpoints_by_age() == [(1, len(lines))]

    # Another trainer goes on from there by itself.
    with steps.open("a") as file:
        file.write('{"torn')
    trainer.main(there)
    again = [json.loads(line) for line in steps.read_text().splitlines()]
    assert again[: len(lines)] == lines
    assert [line["step"] for line in again] == list(range(there.run.num_train_steps))
    assert {line["incarnation"] for line in again[len(lines) :]} == {2}
    metrics = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(there.run.num_train_steps))
    assert directory.final_model.exists()
    assert directory.checkpoints_by_age() == [(1, len(lines)), (2, there.run.num_train_steps)]


def test_a_checkpoint_that_could_not_be_written_ends_the_run_soon(config, loop, box):
    """Of one that is due every 8 steps the failure is not held back until the next is due."""
    directory = RunDirectory(config_root(config))

    def fill_the_place_and_answer(ticket, weights):
        if not directory.checkpoints.exists():
            directory.checkpoints.write_text("a file where the directory is to be")
        return group_for(ticket, weights)

    there = loop.call(serve(config, box, fill_the_place_and_answer))
    often = replace(there.trainer, checkpoint_every=8)
    with pytest.raises(AsyncGrpoError, match=r"checkpoint 1\.8 cannot be written"):
        trainer.main(replace(there, trainer=often))
    assert 9 <= len(directory.steps.read_text().splitlines()) < 16


def config_root(config):
    return Path(config.run.output_dir)


def test_an_alarm_stops_the_run_after_a_checkpoint_and_another_trainer_goes_on(config, loop, box):
    there = loop.call(serve(config, box, group_for))
    alarms = AlarmsSection(patience=3, entropy_min=100.0, entropy_action=AlarmAction.stop)
    with pytest.raises(NumericsError, match=r"stopped after 3 train steps by ALARM entropy: ") as e:
        trainer.main(replace(there, alarms=alarms))
    assert e.value.exit_code == 4
    assert "--resume goes on from it" in str(e.value)
    directory = RunDirectory(config_root(config))
    assert directory.checkpoints_by_age() == [(1, 3)]
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    assert [line["alarm/entropy"] for line in lines] == [0, 0, 1]
    assert lines[-1]["alarm/entropy_raised"] == 1

    with pytest.raises(NumericsError, match="stopped after 6 train steps"):  # again, once more
        trainer.main(replace(there, alarms=alarms))
    trainer.main(there)  # with an alarm that only warns, to the end
    assert directory.final_model.exists()
    last = json.loads(directory.metrics.read_text().splitlines()[-1])
    assert last["policy_version"] == there.run.num_train_steps
    assert last["alarm/entropy_raised"] == 2  # counted through the restarts


def test_an_alarm_shrinks_the_depth_at_the_server_and_scales_the_learning_rate(config, loop, box):
    config = replace(
        config,
        run=replace(config.run, num_train_steps=6),
        staleness=StalenessSection(max_staleness=4, pipeline_depth=2),
        alarms=AlarmsSection(
            patience=2,
            entropy_min=100.0,
            entropy_action=AlarmAction.shrink_depth,
            zero_variance_max=None,
            masked_fraction_max=None,
            k3_max=1e-9,
            k3_action=AlarmAction.scale_lr,
            lr_factor=0.25,
        ),
    )
    there = loop.call(serve(config, box, group_for))
    trainer.main(there)
    directory = RunDirectory(config_root(config))
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    assert [line["pacing/pipeline_depth"] for line in lines] == [2, 1, 1, 1, 1, 1]
    assert [line["lr"] for line in lines] == [1e-6] * 2 + [0.25e-6] * 4
    assert lines[1]["lr_scale"] == 0.25
    ledger = [json.loads(line) for line in directory.ledger.read_text().splitlines()]
    changes = [line for line in ledger if line["type"] == "DepthSet"]
    assert [(line["depth"], line["reason"]) for line in changes] == [(1, "alarm entropy")]
