"""A file beside the ledger from which a restart may begin, instead of the first record.

    ledger.jsonl:      record 1 ... record 100,000 | record 100,001 ... record 100,412
    ledger.snapshot:   the state at ---------------^   read at a start: these only

The ledger stays whole and is the truth. A snapshot is a shortcut that may be removed at any time: a
start that cannot use it reads every record. It is used only if it is whole, was written by the same
code under the same settings, and the ledger still has the bytes that it follows.
"""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import msgspec

from async_grpo.replay.core.image import decode_state, encode_state, fingerprint
from async_grpo.replay.core.settings import CoreSettings
from async_grpo.replay.core.state import State
from async_grpo.replay.store import Ledger

logger = logging.getLogger(__name__)

EVERY_RECORDS = 100_000
"""Between two snapshots; about half a second of reading at a start."""
_TAIL_BYTES = 4096
"""Of the ledger, by which a snapshot recognizes it: some twenty records, with their instances."""


@dataclass(slots=True)
class Beginning:
    """Where a start begins to read."""

    state: State
    num_records: int
    """that the state contains"""
    offset: int
    """bytes of these records in the ledger"""


class _File(msgspec.Struct, frozen=True, kw_only=True):
    fingerprint: str
    num_records: int
    offset: int
    tail_digest: bytes
    """of the ledger's last bytes before `offset`"""
    image_digest: bytes
    image: bytes


_DECODER = msgspec.msgpack.Decoder(_File)


class Snapshots:
    """The newest snapshot of one ledger. The process that holds the ledger owns it."""

    def __init__(self, path: Path, settings: CoreSettings) -> None:
        self._path = path
        self._settings = settings

    def load(self, ledger: Ledger) -> Beginning | None:
        """The newest snapshot; None: every record must be read.

        One that is of no use is removed: the ledger is about to grow over its place.
        """
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            file = _DECODER.decode(content)
            if why := self._why_useless(file, ledger):
                logger.info("every record is read: the snapshot %s", why)
                self._path.unlink()
                return None
            state = decode_state(file.image, self._settings)
        except (msgspec.MsgspecError, KeyError) as error:
            logger.info("every record is read: the snapshot is damaged (%s)", error)
            self._path.unlink()
            return None
        return Beginning(state, file.num_records, file.offset)

    def _why_useless(self, file: _File, ledger: Ledger) -> str:
        if file.fingerprint != fingerprint(self._settings):
            return "was written by other code or under other settings"
        if hashlib.sha256(file.image).digest() != file.image_digest:
            return "is damaged"
        if file.offset > ledger.size or _tail_digest(ledger, file.offset) != file.tail_digest:
            return "is of another ledger, or this one has lost its end"
        return ""

    def save(self, state: State, ledger: Ledger, num_records: int) -> None:
        """Keep `state`, which must be that of all records of the ledger, `num_records`."""
        image = encode_state(state)
        file = _File(
            fingerprint=fingerprint(self._settings),
            num_records=num_records,
            offset=ledger.size,
            tail_digest=_tail_digest(ledger, ledger.size),
            image_digest=hashlib.sha256(image).digest(),
            image=image,
        )
        partial = self._path.with_name(self._path.name + ".partial")
        try:
            partial.write_bytes(msgspec.msgpack.encode(file))
            partial.replace(self._path)
        except OSError as error:  # without it the next start only takes longer
            logger.warning("no snapshot of the ledger: %s", error)
            partial.unlink(missing_ok=True)


def _tail_digest(ledger: Ledger, end: int) -> bytes:
    return hashlib.sha256(ledger.read(max(0, end - _TAIL_BYTES), end)).digest()
