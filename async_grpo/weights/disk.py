"""The `disk` transport: safetensors in a directory that trainer, generators and engines share.

    DIRECTORY/1.7/model-00001-of-00002.safetensors ... manifest.json
    DIRECTORY/.partial-1.8/                    being written; renamed when whole

The publisher owns the directory: it writes, it alone deletes, and keeps the newest weights for
whoever comes late. Files are hashed, so the disk need not be trusted.
"""

import logging
import re
import shutil
from pathlib import Path

import msgspec

from async_grpo.errors import ConfigError, WeightSyncError
from async_grpo.replay_parts import Cell, WeightFiles
from async_grpo.weights.cells import CellOrder
from async_grpo.weights.file_set import file_set
from async_grpo.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_OURS = re.compile(r"(\.partial-)?\d+\.\d+")


class DiskTransport:
    """Writes weights; engines load them by themselves.

    Args:
        directory: of this run alone.
        timeout_s: deadline for a bucket to be copied from the trainer.

    Raises:
        ConfigError: `directory` holds what is not ours, and so might be another run's.
    """

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self._directory, self._timeout_s = directory.absolute(), timeout_s
        self._written: tuple[Snapshot, WeightFiles] | None = None
        if self._directory.is_dir():
            strangers = [p.name for p in self._directory.iterdir() if not _OURS.fullmatch(p.name)]
            if strangers:
                raise ConfigError(
                    f"weights.directory ({directory}) holds {sorted(strangers)[0]!r}, which is no "
                    "weights of ours: name a directory of this run alone, whose content may be "
                    "deleted"
                )

    def prepare(self, snapshot: Snapshot) -> WeightFiles | None:
        """Write them, unless they are there; directories of other weights go when all have loaded.

        Raises:
            WeightSyncError: the disk failed.
        """
        if self._written is not None and self._written[0] is snapshot:
            return self._written[1]
        contents = file_set(snapshot, self._timeout_s)
        name = str(snapshot.weights)
        whole, partial = self._directory / name, self._directory / f".partial-{name}"
        manifest = {"weights": name, "files": [content.file for content in contents]}
        try:
            for leftover in (whole, partial):  # of a trainer that died, or of a try that failed
                if leftover.exists():
                    shutil.rmtree(leftover)
            partial.mkdir(parents=True)
            for content in contents:
                with (partial / content.file.name).open("wb") as file:
                    for chunk in content.chunks():
                        file.write(chunk)
            (partial / MANIFEST).write_bytes(msgspec.json.encode(manifest))
            partial.rename(whole)
        except OSError as error:
            raise WeightSyncError(str(self._directory), name, "write", str(error)) from error
        files = WeightFiles(location=str(whole), files=[content.file for content in contents])
        self._written = (snapshot, files)
        return files

    def keep_only(self, cells: list[Cell]) -> None:
        """Directories belong to no cell."""

    def deliver(self, order: CellOrder, snapshot: Snapshot) -> None:
        """Nothing to do: the announcement named the files."""

    def failed(self, cell: Cell) -> None:
        """Nothing is kept for a cell."""

    def settled(self) -> None:
        """All engines have loaded or failed: delete every directory but the newest."""
        assert self._written is not None, "prepare comes first"
        newest = str(self._written[0].weights)
        for path in self._directory.iterdir():
            if path.name != newest:
                try:
                    shutil.rmtree(path)
                except OSError as error:  # the next publish tries again
                    logger.warning("cannot delete %s: %s", path, error)

    def close(self) -> None:
        """The newest weights stay on the disk."""
