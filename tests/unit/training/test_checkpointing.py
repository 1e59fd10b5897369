"""Which checkpoint a trainer goes on from, and what it tells the replay server of them."""

import asyncio
import resource
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from async_grpo.config.algorithm import AlgorithmSection
from async_grpo.config.load import load_config
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.weights import WeightsSection
from async_grpo.errors import AsyncGrpoError, ConfigError, PeerError, RemoteError
from async_grpo.replay_api.base import ErrorCode
from async_grpo.training.checkpoint_files import LATEST
from async_grpo.training.checkpointing import INITIAL, Checkpointer
from async_grpo.training.control import ControlState
from async_grpo.training.step import TrainStep
from async_grpo.training.weight_source import PolicyWeights
from async_grpo.types import WeightsName
from tests.fakes.fake_trainer_replay import FakeTrainerReplay
from tests.fakes.tiny_policy import random_groups, tiny_policy
from tests.unit.training.test_checkpoint_files import SWITCH, Killed


class Replay(FakeTrainerReplay):
    """Refuses to go on from `undone` checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.undone: set[tuple[int, int]] = set()
        self.fenced = False
        self.answers = threading.Event()
        """to `settle`; cleared, a checkpoint stays in the middle of being written"""
        self.answers.set()

    async def start(self, restored_version, restored_incarnation=0):
        reply = await super().start(restored_version, restored_incarnation)
        if (restored_incarnation, restored_version) in self.undone:
            message = f"cannot go on from {restored_incarnation}.{restored_version}"
            raise RemoteError("replay server", "StartTrainer", ErrorCode.NOT_FOUND, message)
        return reply

    async def settle(self, policy_version):
        assert await asyncio.to_thread(self.answers.wait, 30.0)
        if self.fenced:
            raise RemoteError("replay server", "Settle", ErrorCode.FENCED, "taken over")
        await super().settle(policy_version)


def save(trainer: Checkpointer, incarnation: int, version: int) -> None:
    name = WeightsName(incarnation, version)
    trainer.save(name, draw_number=version, lr=0.1, control=ControlState())


class World:
    """One run directory; each `trainer()` is a new process on it."""

    def __init__(self, root: Path) -> None:
        self.config_file = root / "config.yaml"
        self.config_file.write_text(
            f"run: {{output_dir: {root}/run, num_train_steps: 20}}\npolicy: {{model: m}}\n"
            "task: {name: reverse}\ntrainer: {checkpoint_every: 3}\n"
        )
        self.directory = RunDirectory(root / "run")
        self.replay = Replay()

    def trainer(self, *overrides: str) -> Checkpointer:
        config = load_config(self.config_file, overrides)
        policy = tiny_policy(dtype=torch.float32)
        step = TrainStep(policy, AlgorithmSection(), config.trainer, num_train_steps=20)
        step.apply(random_groups(2), 0)
        weights = PolicyWeights(policy, WeightsSection(), seed=0)
        return Checkpointer(config, self.directory, self.replay, asyncio.run, weights, step)

    def write(self, *names: tuple[int, int], keep: int = 9) -> None:
        trainer = self.trainer(f"trainer.keep_checkpoints={keep}")
        for name in names:
            save(trainer, *name)
        trainer.wait()
        self.replay.calls.clear()

    def damage(self, name: str, file: str = "model.safetensors") -> None:
        path = self.directory.checkpoints / name / file
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.checkpoints.iterdir())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_without_checkpoints_it_starts_from_the_initial_weights(world: World) -> None:
    found, reply = world.trainer().start()
    assert found is INITIAL
    assert reply.incarnation == 1
    assert world.replay.calls == [("start", 0, 0)]


def test_it_goes_on_from_the_newest(world: World) -> None:
    world.write((1, 3), (1, 6), (2, 5))
    trainer = world.trainer()
    assert trainer.start()[0] == WeightsName(2, 5)
    assert world.replay.calls == [("start", 5, 2)]
    assert trainer.has(5)
    assert not trainer.has(6)
    assert [version for version in range(1, 8) if trainer.is_due(version)] == [3, 6]


def test_a_damaged_one_is_skipped_by_name_and_set_aside(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.write((1, 3), (1, 6))
    world.damage("1.6", "optimizer.safetensors")
    assert world.trainer().start()[0] == WeightsName(1, 3)
    assert "checkpoint 1.6 is skipped" in caplog.text
    assert "1.6/optimizer.safetensors: has sha256" in caplog.text
    assert world.names() == ["1.3", "latest", "void-1.6"]


def test_an_undone_one_is_skipped(world: World) -> None:
    world.write((1, 3), (1, 6))
    world.replay.undone = {(1, 6)}
    assert world.trainer().start()[0] == WeightsName(1, 3)
    assert world.replay.calls == [("start", 6, 1), ("start", 3, 1)]
    assert world.names() == ["1.3", "latest", "void-1.6"]


def test_with_nothing_but_damaged_ones_it_begins_anew(world: World) -> None:
    world.write((1, 3))
    world.damage("1.3")
    assert world.trainer().start()[0] is INITIAL
    assert world.names() == ["latest", "void-1.3"]


def test_it_does_not_begin_anew_where_steps_are_final(world: World) -> None:
    world.write((1, 3), (1, 6))
    world.damage("1.3")
    world.damage("1.6")
    world.replay.undone = {(0, 0)}
    with pytest.raises(PeerError, match="no whole checkpoint is left"):
        world.trainer().start()
    assert world.names() == ["1.3", "1.6", "latest"]


def test_checkpoints_of_another_run_are_not_thrown_away(world: World) -> None:
    world.write((1, 3), (1, 6))
    world.replay.undone = {(1, 3), (1, 6)}
    with pytest.raises(PeerError, match="of different runs"):
        world.trainer().start()
    assert world.names() == ["1.3", "1.6", "latest"]


def test_another_configuration_is_refused_before_the_run_is_touched(world: World) -> None:
    world.write((1, 3))
    with pytest.raises(ConfigError, match=r"trainer\.weight_decay: the run has 0\.0, now it is 1"):
        world.trainer("trainer.weight_decay=1.0").start()
    with pytest.raises(ConfigError, match=r"checkpoint 1\.3 has 3 steps"):
        world.trainer("run.num_train_steps=2").start()
    assert world.replay.calls == []
    assert world.trainer("run.num_train_steps=99", "trainer.threads=2").start()[0] == (1, 3)


def test_steps_are_settled_once_two_checkpoints_are_kept(world: World) -> None:
    trainer = world.trainer()
    for version in (3, 6, 9):
        save(trainer, 1, version)
    trainer.wait()
    # Each save first makes sure that this is still the run's trainer.
    settled = [version for kind, version in world.replay.calls if kind == "settle"]
    assert settled == [0, 0, 3, 3, 6]
    assert world.names() == ["1.6", "1.9", "latest"]
    assert (world.directory.checkpoints / LATEST).read_text() == "1.9\n"


def test_a_trainer_that_lost_the_run_moves_no_pointer(world: World) -> None:
    trainer = world.trainer()
    save(trainer, 1, 3)
    trainer.wait()
    world.replay.fenced = True
    save(trainer, 1, 6)
    with pytest.raises(RemoteError, match="taken over"):
        trainer.wait()
    assert (world.directory.checkpoints / LATEST).read_text() == "1.3\n"


def test_a_loaded_checkpoint_is_the_saved_one(world: World) -> None:
    world.write((1, 3))
    trainer = world.trainer()
    with torch.no_grad():
        for _, tensor in trainer._weights.named_tensors():
            tensor.zero_()
    name, _ = trainer.start()
    trainer.load(name)
    for (key, found), (_, wanted) in zip(
        trainer._weights.named_tensors(), world.trainer()._weights.named_tensors(), strict=True
    ):
        assert torch.equal(found, wanted), key


def test_a_checkpoint_that_cannot_be_written_is_an_error_that_says_so(world: World) -> None:
    world.directory.root.mkdir()
    world.directory.checkpoints.write_text("a file in its place")
    trainer = world.trainer()
    save(trainer, 1, 3)
    with pytest.raises(AsyncGrpoError, match=r"checkpoint 1\.3 cannot be written"):
        trainer.wait()


def test_tensors_that_find_no_room_are_an_error_that_says_so(world: World) -> None:
    trainer = world.trainer()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        save(trainer, 1, 3)
        with pytest.raises(AsyncGrpoError, match=r"checkpoint 1\.3 cannot be written: .*too large"):
            trainer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert world.names() == []


def test_training_goes_on_while_a_checkpoint_is_written(world: World) -> None:
    trainer = world.trainer()
    before = {name: tensor.clone() for name, tensor in trainer._weights.named_tensors()}
    world.replay.answers.clear()
    save(trainer, 1, 3)
    assert trainer.has(3)  # begun: it need not be begun again
    trainer._step.apply(random_groups(2), 3)
    trainer.raise_failure()
    assert trainer.metrics() == {}
    world.replay.answers.set()
    trainer.wait()
    assert trainer.metrics()["checkpoint/write_s"] > 0
    saved = load_file(world.directory.checkpoints / "1.3" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
    after = dict(trainer._weights.named_tensors())
    assert not all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_second_checkpoint_waits_for_the_first_but_not_for_ever(world: World) -> None:
    trainer = world.trainer("run.no_progress_timeout_s=0.01")
    world.replay.answers.clear()
    save(trainer, 1, 3)
    with pytest.raises(AsyncGrpoError, match=r"checkpoint 1\.3 is not written after another 0\.01"):
        save(trainer, 1, 6)
    assert not trainer.has(6)
    world.replay.answers.set()


def test_killed_at_any_moment_the_server_has_forgotten_nothing_that_is_needed(
    tmp_path: Path,
) -> None:
    """The third of three checkpoints, of which two are kept, is cut off at each file operation."""
    outcomes, number, killed = [], 0, True
    while killed:
        root = tmp_path / str(number)
        root.mkdir()
        world = World(root)
        trainer = world.trainer()
        save(trainer, 1, 3)
        save(trainer, 1, 6)
        trainer.wait()
        SWITCH.root, SWITCH.left, SWITCH.trace = str(world.directory.checkpoints), number, []
        save(trainer, 1, 9)
        try:
            trainer.wait()
            killed = False
        except Killed:
            pass
        SWITCH.root = ""
        settled = max(version for kind, version in world.replay.calls if kind == "settle")
        kept = [name for name in world.names() if name[0].isdigit()]
        assert settled <= min(int(name.split(".")[1]) for name in kept), (number, kept)
        found = world.trainer().start()[0]
        outcomes.append((found.policy_version, settled))
        number += 1
    assert number > 15  # that many moments were tried
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {(6, 3), (9, 3), (9, 6)}
