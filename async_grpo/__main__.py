"""The process of the `async-grpo` command, and of `python -m async_grpo`, which is the same."""

import logging
import os
import sys
from typing import NoReturn

from async_grpo.launch.cli import main
from async_grpo.launch.standard_streams import open_standard_streams


def run() -> NoReturn:
    """Run one command and end the process with its exit code."""
    open_standard_streams()
    code = main()
    if "torch" in sys.modules:
        # Everything is closed by now. To take torch apart would cost a second of the processor, and
        # on a busy machine several of the time limit that a stop has.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
