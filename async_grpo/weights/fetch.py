"""A generator's end of the file transports: get the files, prove them by hash. No torch.

Engines read what lies here by themselves, so nothing may lie here that was not verified.
"""

import asyncio
import hashlib
import shutil
import tempfile
from pathlib import Path

import aiohttp

from async_grpo.errors import WeightSyncError
from async_grpo.replay_parts import WeightFile, WeightFiles
from async_grpo.types import WeightsName

_CHUNK_BYTES = 1 << 20
_KEPT = 2
"""Fetched sets: the newest, and the one that an engine may still be reading."""


class WeightFetcher:
    """Makes files of weights readable on this machine. One event loop; engines share it.

    Args:
        directory: where fetched files go; empty: a temporary directory, made when needed.
        timeout_s: deadline of fetching or verifying one set.
    """

    def __init__(self, directory: str, timeout_s: float) -> None:
        self._directory, self._timeout_s = directory, timeout_s
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._lock = asyncio.Lock()
        self._have: dict[str, Path] = {}
        """location -> verified directory, oldest first"""

    async def get(self, weights: WeightsName, files: WeightFiles) -> Path:
        """The directory with all of `files`, verified; a set is fetched or verified once.

        Raises:
            WeightSyncError: they cannot be read or fetched in time, or are not what was announced.
        """
        async with self._lock:
            if (path := self._have.get(files.location)) is not None:
                return path
            try:
                async with asyncio.timeout(self._timeout_s):
                    if files.location.startswith("http://"):
                        path = await self._download(weights, files)
                    else:
                        path = Path(files.location)
                        for file in files.files:
                            await asyncio.to_thread(_verify, path / file.name, file)
            except TimeoutError as error:
                raise _failed(
                    files, weights, f"over {self._timeout_s:g} s (weights.timeout_s)"
                ) from error
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise _failed(files, weights, f"{type(error).__name__}: {error}") from error
            self._have[files.location] = path
            await self._forget_surplus()
            return path

    def close(self) -> None:
        """Delete the temporary directory."""
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    async def _download(self, weights: WeightsName, files: WeightFiles) -> Path:
        root = self._root()
        target = root / str(weights)
        if target.exists():  # from an earlier life of this generator
            await asyncio.to_thread(shutil.rmtree, target)
        target.mkdir(parents=True)
        if strange := [file.name for file in files.files if Path(file.name).name != file.name]:
            raise ValueError(f"{strange[0]!r} is no plain file name")
        try:
            async with aiohttp.ClientSession() as session:
                for file in files.files:
                    await _download(session, f"{files.location}/{file.name}", target, file)
        except BaseException:  # cancelled too: half a set must not stay
            shutil.rmtree(target)
            raise
        return target

    def _root(self) -> Path:
        if self._directory:
            return Path(self._directory).absolute()
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="async-grpo-weights-")
        return Path(self._temporary.name)

    async def _forget_surplus(self) -> None:
        """Delete what was fetched here; the trainer's directory is the trainer's to clean."""
        while len(self._have) > _KEPT:
            location = next(iter(self._have))
            path = self._have.pop(location)
            if location.startswith("http://"):
                await asyncio.to_thread(shutil.rmtree, path)


async def _download(
    session: aiohttp.ClientSession, url: str, directory: Path, file: WeightFile
) -> None:
    """One file, hashed while it arrives. Raises ValueError if it is not the announced one."""
    content = hashlib.sha256()
    size = 0
    async with session.get(url, raise_for_status=True) as response:
        with (directory / file.name).open("wb") as target:
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                content.update(chunk)
                size += len(chunk)
                if size > file.num_bytes:
                    break
                await asyncio.to_thread(target.write, chunk)
    _compare(file, size, content.hexdigest())


def _verify(path: Path, file: WeightFile) -> None:
    """Raises ValueError if it is not the announced file, OSError if it cannot be read."""
    content = hashlib.sha256()
    size = 0
    with path.open("rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            content.update(chunk)
            size += len(chunk)
    _compare(file, size, content.hexdigest())


def _compare(file: WeightFile, size: int, sha256: str) -> None:
    if (size, sha256) != (file.num_bytes, file.sha256):
        raise ValueError(
            f"{file.name} has {size} bytes with sha256 {sha256[:12]}..., announced were "
            f"{file.num_bytes} with {file.sha256[:12]}..."
        )


def _failed(files: WeightFiles, weights: WeightsName, reason: str) -> WeightSyncError:
    # below the host comes a secret
    where = "/".join(files.location.split("/")[:3]) if "://" in files.location else files.location
    return WeightSyncError(where, str(weights), "fetch", reason)
