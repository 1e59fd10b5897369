"""`python -m async_grpo`: the same as the `async-grpo` command."""

import sys

from async_grpo.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
