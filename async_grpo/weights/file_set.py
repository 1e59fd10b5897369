"""A snapshot as safetensors files, of which only the headers are new memory. No torch at import.

One bucket is one file: the format is a length, a JSON header and the tensors back to back, which is
what a bucket is already. So it is written here; the library would copy the weights once more.
Format: https://huggingface.co/docs/safetensors, "Format".
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from async_grpo.replay_parts import WeightFile
from async_grpo.weights.plan import TensorSpec

if TYPE_CHECKING:
    from async_grpo.weights.snapshot import Snapshot

INDEX = "model.safetensors.index.json"
"""Names the file of each tensor, where there is more than one file."""

_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_HASH_THREADS = 4
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileContent:
    """One file: what describes it, and its bytes in pieces."""

    file: WeightFile
    pieces: tuple[memoryview, ...]

    def chunks(self) -> Iterator[memoryview]:
        """Its bytes, in pieces of at most `CHUNK_BYTES`."""
        for piece in self.pieces:
            for start in range(0, len(piece), CHUNK_BYTES):
                yield piece[start : start + CHUNK_BYTES]


def file_set(snapshot: "Snapshot", timeout_s: float) -> list[FileContent]:
    """The files of a snapshot, hashed. Their bytes are those of the snapshot, not copies.

    Args:
        snapshot: weights; waited for while they are filled.
        timeout_s: deadline of each bucket.

    Raises:
        WeightSyncError: the snapshot could not be filled.
    """
    buckets = snapshot.plan.buckets
    names = file_names(len(buckets))
    with ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="hash") as pool:
        jobs = []
        for name, bucket, payload in zip(
            names, buckets, snapshot.whole_buckets(timeout_s), strict=True
        ):
            on_cpu = payload.cpu()  # no copy where it lies there already
            jobs.append(pool.submit(_content, name, header(bucket), on_cpu.numpy().data))
    contents = [job.result() for job in jobs]
    if len(names) > 1:
        index = {
            "metadata": {"total_size": snapshot.plan.num_bytes},
            "weight_map": {
                tensor.name: name
                for name, bucket in zip(names, buckets, strict=True)
                for tensor in bucket
            },
        }
        contents.append(_content(INDEX, json.dumps(index).encode()))
    return contents


def file_names(count: int) -> list[str]:
    """As Hugging Face names the shards of a model."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def header(bucket: Sequence[TensorSpec]) -> bytes:
    """The start of the file whose data is the flattened bucket."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in bucket:
        end = offset + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data is aligned to 8 bytes
    return len(text).to_bytes(8, "little") + text


def _content(name: str, *pieces: "bytes | memoryview") -> FileContent:
    views = tuple(memoryview(piece) for piece in pieces)
    content = hashlib.sha256()
    for view in views:
        content.update(view)
    size = sum(view.nbytes for view in views)
    return FileContent(WeightFile(name=name, num_bytes=size, sha256=content.hexdigest()), views)
