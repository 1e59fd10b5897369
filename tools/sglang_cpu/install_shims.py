"""Make the environment of the Python that runs this one in which SGLang starts on a CPU."""

import sys
import sysconfig
from pathlib import Path

SHIM = Path(__file__).resolve().parent / "shim"


def main() -> int:
    """Write the `.pth` file that puts `shim/` on the path and runs it at each start."""
    import torch

    if torch.version.cuda is not None:
        print(
            f"torch {torch.__version__} is a CUDA build; remove the environment and install a CPU "
            "build: make sglang-env PIP_ARGS='--extra-index-url ...'",
            file=sys.stderr,
        )
        return 2
    target = Path(sysconfig.get_path("purelib")) / "sglang_cpu.pth"
    target.write_text(f"{SHIM}\nimport sglang_cpu_start\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
