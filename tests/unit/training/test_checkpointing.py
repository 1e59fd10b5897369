"""Which checkpoint a trainer goes on from, and what it tells the replay server of them."""

import asyncio
import resource
from pathlib import Path

import pytest
import torch

from async_grpo.config.algorithm import AlgorithmSection
from async_grpo.config.load import load_config
from async_grpo.config.run_directory import RunDirectory
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


class Replay(FakeTrainerReplay):
    """Refuses to go on from `undone` checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.undone: set[tuple[int, int]] = set()
        self.fenced = False

    async def start(self, restored_version, restored_incarnation=0):
        reply = await super().start(restored_version, restored_incarnation)
        if (restored_incarnation, restored_version) in self.undone:
            message = f"cannot go on from {restored_incarnation}.{restored_version}"
            raise RemoteError("replay server", "StartTrainer", ErrorCode.NOT_FOUND, message)
        return reply

    async def settle(self, policy_version):
        if self.fenced:
            raise RemoteError("replay server", "Settle", ErrorCode.FENCED, "taken over")
        await super().settle(policy_version)


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
        weights = PolicyWeights(policy, seed=0, tolerance=1e-3)
        return Checkpointer(config, self.directory, self.replay, asyncio.run, weights, step)

    def write(self, *names: tuple[int, int], keep: int = 9) -> None:
        trainer = self.trainer(f"trainer.keep_checkpoints={keep}")
        for name in names:
            trainer.save(WeightsName(*name), draw_number=1, lr=0.1, control=ControlState())
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
        trainer.save(WeightsName(1, version), draw_number=version, lr=0.1, control=ControlState())
    # Each save first makes sure that this is still the run's trainer.
    settled = [version for kind, version in world.replay.calls if kind == "settle"]
    assert settled == [0, 0, 3, 3, 6]
    assert world.names() == ["1.6", "1.9", "latest"]
    assert (world.directory.checkpoints / LATEST).read_text() == "1.9\n"


def test_a_trainer_that_lost_the_run_moves_no_pointer(world: World) -> None:
    trainer = world.trainer()
    trainer.save(WeightsName(1, 3), draw_number=1, lr=0.1, control=ControlState())
    world.replay.fenced = True
    with pytest.raises(RemoteError, match="taken over"):
        trainer.save(WeightsName(1, 6), draw_number=2, lr=0.1, control=ControlState())
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
    with pytest.raises(AsyncGrpoError, match=r"checkpoint 1\.3 cannot be written"):
        world.trainer().save(WeightsName(1, 3), draw_number=1, lr=0.1, control=ControlState())


def test_tensors_that_find_no_room_are_an_error_that_says_so(world: World) -> None:
    trainer = world.trainer()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(AsyncGrpoError, match=r"checkpoint 1\.3 cannot be written: .*too large"):
            trainer.save(WeightsName(1, 3), draw_number=1, lr=0.1, control=ControlState())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert world.names() == []
