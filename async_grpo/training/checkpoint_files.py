"""Checkpoints on disk: whole or not at all, found and verified by themselves.

A checkpoint is a directory `INCARNATION.POLICY_VERSION`. It is written under another name, every
file hashed on its way and synced, the manifest of sizes and hashes last, and then renamed. `latest`
names the newest one; resuming does not depend on it. Knows neither tensors nor the replay server.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from async_grpo.config.run_directory import RunDirectory
from async_grpo.errors import AsyncGrpoError
from async_grpo.types import WeightsName

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LATEST = "latest"
_PARTIAL, _VOID = ".partial-", "void-"
_CHUNK_BYTES = 1 << 22

Pieces = Iterable[bytes | memoryview]
"""What one file holds, in order."""


class CheckpointError(AsyncGrpoError):
    """A checkpoint is not as it was written; names the file."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")


class CheckpointFiles:
    """The checkpoints of one run."""

    def __init__(self, directory: RunDirectory, *, keep: int) -> None:
        self._directory, self._keep = directory, keep

    @property
    def root(self) -> Path:
        """Where they are."""
        return self._directory.checkpoints

    def path(self, name: WeightsName) -> Path:
        """Directory of one checkpoint."""
        return self.root / str(name)

    def names(self) -> list[WeightsName]:
        """Every checkpoint by its directory, verified or not, the newest last."""
        return [WeightsName(*pair) for pair in self._directory.checkpoints_by_age()]

    def write(self, name: WeightsName, files: Mapping[str, Pieces]) -> None:
        """Make a checkpoint of these files.

        Killed at any moment, it leaves what was there before, or the whole checkpoint.

        Args:
            name: of the checkpoint.
            files: file name -> content.
        """
        root = self.root
        partial = root / f"{_PARTIAL}{name}"
        for left_over in root.glob(f"{_PARTIAL}*"):  # by a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            listed = {file: _write_file(partial / file, files[file]) for file in sorted(files)}
            _write_text(partial / MANIFEST, json.dumps({"files": listed}, indent=1))
            _sync(partial)
            partial.rename(self.path(name))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)  # where the disk is full, others need room
            raise
        _sync(root)

    def point_to(self, name: WeightsName) -> None:
        """Let `latest` name a checkpoint."""
        root = self.root
        partial = root / f"{_PARTIAL}{LATEST}"
        _write_text(partial, f"{name}\n")
        partial.replace(root / LATEST)
        _sync(root)

    def prune(self) -> list[WeightsName]:
        """Remove all but the newest; returns those that are left, the newest last."""
        names = self.names()
        for name in names[: -self._keep]:
            doomed = self.root / f"{_PARTIAL}{name}"
            self.path(name).rename(doomed)  # never half of one under its name
            shutil.rmtree(doomed)
        return names[-self._keep :]

    def verify(self, name: WeightsName) -> Path:
        """The directory of a checkpoint whose files are all as they were written.

        Raises:
            CheckpointError: a file is missing, or differs in size or hash.
        """
        path = self.path(name)
        for file, entry in _read_manifest(path).items():
            _verify_file(path / file, entry)
        return path

    def set_aside(self, name: WeightsName, why: str) -> None:
        """Rename a checkpoint so that nothing ever finds it again; its files stay for people."""
        target = self.root / f"{_VOID}{name}"
        shutil.rmtree(target, ignore_errors=True)
        self.path(name).rename(target)
        logger.warning("checkpoint %s is set aside as %s: %s", name, target.name, why)


def _write_file(path: Path, pieces: Pieces) -> dict[str, Any]:
    """Write, hash and sync one file; its entry in the manifest."""
    content, num_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            for start in range(0, len(view), _CHUNK_BYTES):
                chunk = view[start : start + _CHUNK_BYTES]
                file.write(chunk)
                content.update(chunk)
            num_bytes += len(view)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": num_bytes, "sha256": content.hexdigest()}


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    manifest = path / MANIFEST
    try:
        files = json.loads(manifest.read_bytes())["files"]
        return {
            name: {key: entry[key] for key in ("bytes", "sha256")} for name, entry in files.items()
        }
    except FileNotFoundError as error:
        raise CheckpointError(manifest, "missing: the checkpoint was never finished") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            manifest, f"cannot be read ({type(error).__name__}: {error})"
        ) from error


def _verify_file(path: Path, entry: dict[str, Any]) -> None:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(path, f"has {size} bytes, the manifest says {entry['bytes']}")
        found = _sha256(path)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    if found != entry["sha256"]:
        raise CheckpointError(path, f"has sha256 {found}, the manifest says {entry['sha256']}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Have a directory's entries on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
