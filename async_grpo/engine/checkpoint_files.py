"""The safetensors files of a Hugging Face directory, as one set of named tensors.

Opening reads and checks headers only. Knows nothing of models.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from async_grpo.engine.admission import RequestRefused

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointFiles:
    """Named tensors on a disk.

    Args:
        directory: with `model.safetensors`, an index and its shards, or any `*.safetensors`.
        ignored: names that are as good as absent.

    Raises:
        RequestRefused: there are none, one is missing or damaged, or a name appears twice.
    """

    def __init__(self, directory: Path, *, ignored: Collection[str] = ()) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        self._ignored = ignored
        for file in _files(directory):
            self._open(file)

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._files)

    def mismatches(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Tensors that `shapes` does not hold, or holds in another shape."""
        problems = []
        for name, shape in self._shapes.items():
            if name not in shapes:
                problems.append(f"the model has no tensor {name!r}")
            elif shapes[name] != shape:
                problems.append(f"{name} has shape {list(shapes[name])}, not {list(shape)}")
        return problems

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor on the CPU), file by file.

        Raises:
            RequestRefused: reading fails.
        """
        for file in dict.fromkeys(self._files.values()):
            try:
                with safe_open(file, framework="pt", device="cpu") as content:
                    for name in content.keys():  # noqa: SIM118 -- not a mapping
                        if name not in self._ignored:
                            yield name, content.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise RequestRefused(f"cannot read {file}: {error}") from error

    def _open(self, file: Path) -> None:
        try:
            with safe_open(file, framework="pt", device="cpu") as content:
                shapes = {
                    name: tuple(content.get_slice(name).get_shape())
                    for name in content.keys()  # noqa: SIM118 -- not a mapping
                    if name not in self._ignored
                }
        except (OSError, SafetensorError) as error:
            raise RequestRefused(f"cannot read {file}: {error}") from error
        if twice := self._files.keys() & shapes.keys():
            raise RequestRefused(f"{file} repeats {sorted(twice)[0]!r}")
        self._shapes.update(shapes)
        self._files.update(dict.fromkeys(shapes, file))


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestRefused(f"cannot read {index}: {error}") from error
        return [directory / shard for shard in sorted(shards)]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if found := sorted(directory.glob("*.safetensors")):
        return found
    raise RequestRefused(f"{directory} holds no safetensors files")
