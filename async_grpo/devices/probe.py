"""What this interpreter's torch finds on this machine. Also a program: prints it as JSON.

The text of this file is run by other interpreters, in which this package is not installed: it
imports the standard library and torch, and runs on Python 3.10. Knows no configuration.
"""

import json
import re
from pathlib import Path
from typing import Any

_VERSION = re.compile(r"Kernel Module\b.*?\s(\d+\.[\d.]+)")


def driver_version(root: str = "/") -> str:
    """Version of the NVIDIA kernel driver, as `580.65.06`; empty: there is none."""
    try:
        text = Path(root, "proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = _VERSION.search(text)
    return found.group(1) if found else ""


def collect(*, memory: bool, root: str = "/") -> dict[str, Any]:
    """Versions, and the cards that CUDA shows this process.

    Args:
        memory: also what is free on each card, which takes some memory on each while it is asked.
        root: where `proc` is.
    """
    found: dict[str, Any] = {"driver": driver_version(root)}
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        return found | {"problem": f"torch cannot be imported: {error}"}
    native: Any = torch._C
    nccl: Any = torch.cuda.nccl
    found["torch"] = str(torch.__version__)
    found["cuda"] = torch.version.cuda or torch.version.hip or ""
    if hasattr(native, "_nccl_version"):
        found["nccl"] = ".".join(str(part) for part in nccl.version())
    if problem := _why_unusable(torch):
        return found | {"problem": problem}
    cards = range(torch.cuda.device_count())
    return found | {"cards": [_card(torch, number, memory) for number in cards]}


def _why_unusable(torch: Any) -> str:
    if not (torch.version.cuda or torch.version.hip):
        return "it is a build without CUDA"
    try:
        torch.cuda.init()  # says why; is_available() only whether
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""


def _card(torch: Any, number: int, memory: bool) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(number)
    card = {
        "name": properties.name,
        "uuid": str(getattr(properties, "uuid", "")),
        "total_bytes": properties.total_memory,
    }
    if memory:
        try:
            card["free_bytes"] = torch.cuda.mem_get_info(number)[0]
        except RuntimeError as error:  # another process has the card for itself
            card["problem"] = str(error).strip().partition("\n")[0]
    return card


if __name__ == "__main__":
    print(json.dumps(collect(memory=True)))  # noqa: T201 -- the answer
