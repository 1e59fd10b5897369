"""Killed at any write, or damaged by a byte: the one before is found, the damage is named."""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_grpo.config.run_directory import RunDirectory
from async_grpo.training.checkpoint_files import LATEST, MANIFEST, CheckpointError, CheckpointFiles
from async_grpo.types import WeightsName

CONTENT = {
    "model.safetensors": [b"h" * 8, memoryview(b"m" * 92)],
    "optimizer.safetensors": [b"o" * 50],
    "state.json": [b"{}"],
}
ONE, TWO = WeightsName(1, 5), WeightsName(1, 10)


@pytest.fixture
def files(tmp_path: Path) -> CheckpointFiles:
    return CheckpointFiles(RunDirectory(tmp_path), keep=2)


class Killed(BaseException):
    """In place of SIGKILL; production code catches no BaseException and cleans nothing up."""


class KillSwitch:
    """Ends the process, so to speak, at the n-th file-system call below `root`."""

    events = ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "shutil.rmtree")

    def __init__(self) -> None:
        self.root = ""
        self.left = -1
        self.trace: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.root or event not in self.events:
            return
        if not str(arguments[0]).startswith(self.root):
            return
        self.trace.append(f"{event} {arguments[0]}")
        if self.left == 0:
            raise Killed
        self.left -= 1


SWITCH = KillSwitch()
"""An audit hook cannot be removed: one for all tests, idle without a root."""


def run_until(number: int, root: Path, work) -> bool:
    """Run `work`, killed at its n-th call (-1: never); True if it was killed."""
    SWITCH.root, SWITCH.left, SWITCH.trace = str(root), number, []
    try:
        work()
    except Killed:
        return True
    finally:
        SWITCH.root = ""
    return False


def write_next(files: CheckpointFiles) -> None:
    files.write(TWO, CONTENT)
    files.point_to(TWO)
    files.prune()


def newest_whole(files: CheckpointFiles) -> WeightsName | None:
    for name in reversed(files.names()):
        try:
            files.verify(name)
        except CheckpointError:
            continue
        return name
    return None


def test_killed_at_any_write_an_old_or_the_new_one_is_whole(tmp_path: Path) -> None:
    outcomes = []
    number = 0
    while True:
        files = CheckpointFiles(RunDirectory(tmp_path / str(number)), keep=2)
        files.write(WeightsName(1, 1), CONTENT)
        files.write(ONE, CONTENT)
        files.point_to(ONE)
        killed = run_until(number, files.root, lambda files=files: write_next(files))
        found = newest_whole(files)
        outcomes.append(found)
        assert (files.root / LATEST).read_text().strip() in (str(ONE), str(TWO))
        assert all(newest_whole(files) for _ in files.names())
        # The next process goes on as if nothing had happened.
        files.write(WeightsName(2, 11), CONTENT)
        files.prune()
        assert newest_whole(files) == WeightsName(2, 11)
        assert not list(files.root.glob(".partial-1*"))
        if not killed:
            break
        number += 1
    assert number > 12  # that many moments were tried
    switched = outcomes.index(TWO)
    assert outcomes[:switched] == [ONE] * switched
    assert set(outcomes[switched:]) == {TWO}


def test_the_manifest_has_the_hashes_of_what_was_written(files: CheckpointFiles) -> None:
    """A piece may have any item size: memory of tensors is seen as 64-bit words elsewhere."""
    words = memoryview(bytes(range(64))).cast("q")
    files.write(ONE, {"x": [words, b"", b"end"]})
    content = (files.path(ONE) / "x").read_bytes()
    assert content == bytes(range(64)) + b"end"
    manifest = json.loads((files.path(ONE) / MANIFEST).read_bytes())
    sha256 = hashlib.sha256(content).hexdigest()
    assert manifest == {"files": {"x": {"bytes": 67, "sha256": sha256}}}


@pytest.mark.parametrize("name", [*CONTENT, MANIFEST])
def test_a_flipped_byte_is_detected_and_its_file_named(name: str, files: CheckpointFiles) -> None:
    files.write(ONE, CONTENT)
    path = files.verify(ONE) / name
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError) as caught:
            files.verify(ONE)
        assert str(files.path(ONE)) in str(caught.value)
        if name != MANIFEST:
            assert f"{path}: has sha256" in str(caught.value)
    path.write_bytes(whole)
    files.verify(ONE)


@pytest.mark.parametrize("name", [*CONTENT, MANIFEST])
@pytest.mark.parametrize("size", [0, 1])
def test_a_truncated_file_is_detected_and_named(
    name: str, size: int, files: CheckpointFiles
) -> None:
    files.write(ONE, CONTENT)
    path = files.verify(ONE) / name
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=name):
        files.verify(ONE)


@pytest.mark.parametrize("name", [*CONTENT, MANIFEST])
def test_a_missing_file_is_detected_and_named(name: str, files: CheckpointFiles) -> None:
    files.write(ONE, CONTENT)
    (files.verify(ONE) / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        files.verify(ONE)


def test_the_newest_are_kept_by_incarnation_then_version(files: CheckpointFiles) -> None:
    for name in [(1, 9), (1, 10), (2, 3), (10, 3)]:
        files.write(WeightsName(*name), CONTENT)
    assert files.prune() == [WeightsName(2, 3), WeightsName(10, 3)]
    assert files.names() == [WeightsName(2, 3), WeightsName(10, 3)]


def test_what_is_set_aside_is_never_found_again(files: CheckpointFiles) -> None:
    files.write(ONE, CONTENT)
    files.write(TWO, CONTENT)
    files.set_aside(TWO, "undone")
    assert files.names() == [ONE]
    assert (files.root / "void-1.10" / "state.json").exists()
    files.write(TWO, CONTENT)
    files.set_aside(TWO, "undone again")


def test_a_full_disk_leaves_the_one_before(files: CheckpointFiles) -> None:
    files.write(ONE, CONTENT)

    def fail() -> Iterator[bytes]:
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        files.write(TWO, {"model.safetensors": fail()})
    assert files.names() == [ONE]
    assert list(files.root.iterdir()) == [files.path(ONE)]  # what was half written takes no room
    files.verify(ONE)
