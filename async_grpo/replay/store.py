"""What the replay server keeps: the ledger on disk, payloads in memory.

The ledger is flushed to the operating system before anyone hears of its effects: it survives the
death of the process, at any instant. It is not fsynced, so the last lines may be lost with the
machine. Payloads are lost with the process (`replay.durability: memory`). Knows neither what a
record says nor what a frame holds.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from async_grpo.errors import AsyncGrpoError
from async_grpo.transport.codec import num_bytes
from async_grpo.transport.group_header import Frame

_BLOCK_BYTES = 1 << 16
GroupKey = tuple[int, int]
"""(group_id, attempt)"""


class Ledger:
    """Append-only JSON lines; one process at a time.

    Attributes:
        size: bytes of its lines.
    """

    def __init__(self, path: Path) -> None:
        """Open or create; a last line that a crash cut short is removed.

        Raises:
            AsyncGrpoError: another process holds it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            self.size = self._end_of_last_line()
            if self.size < os.fstat(self._descriptor).st_size:
                os.ftruncate(self._descriptor, self.size)
        except BaseException:
            self.close()
            raise

    def lines(self, start: int = 0) -> Iterator[bytes]:
        """The lines after byte `start`, without line ends; not all at once in memory."""
        with self._path.open("rb") as file:
            file.seek(start)
            for line in file:
                yield line.rstrip(b"\n")

    def read(self, start: int, end: int) -> bytes:
        """Bytes from `start` to `end`."""
        return os.pread(self._descriptor, end - start, start)

    def append(self, lines: Iterable[bytes]) -> None:
        """Hand lines to the operating system, all in one write. Raises OSError (disk full)."""
        data = b"".join(line.rstrip(b"\n") + b"\n" for line in lines)
        size = self.size + len(data)
        while data:
            data = data[os.write(self._descriptor, data) :]
        self.size = size

    def close(self) -> None:
        """Let another process have it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @staticmethod
    def is_in_use(path: Path) -> bool:
        """Whether a replay server holds the ledger now."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _end_of_last_line(self) -> int:
        end = os.fstat(self._descriptor).st_size
        while end:
            start = max(0, end - _BLOCK_BYTES)
            if found := self.read(start, end).rfind(b"\n") + 1:
                return start + found
            end = start
        return 0

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AsyncGrpoError(
                f"{self._path} is in use by another replay server: "
                "stop it, or give this run its own run.output_dir"
            ) from error


class PayloadStore:
    """Frames of stored and leased groups, as they came off the wire.

    Attributes:
        num_bytes: held now.
    """

    def __init__(self) -> None:
        self._frames: dict[GroupKey, list[Frame]] = {}
        self.num_bytes = 0

    def put(self, key: GroupKey, frames: Sequence[Frame]) -> None:
        """Hold the payload of `key`, which must be new."""
        assert key not in self._frames, f"payload {key} stored twice"
        self._frames[key] = list(frames)
        self.num_bytes += num_bytes(frames)

    def get(self, key: GroupKey) -> Sequence[Frame] | None:
        """The payload; None: not held (the server restarted since)."""
        return self._frames.get(key)

    def forget(self, keys: Iterable[GroupKey]) -> None:
        """Free payloads; those not held are no error (a restart lost them)."""
        for key in keys:
            self.num_bytes -= num_bytes(self._frames.pop(key, ()))
