"""Section `launch`: processes of `async-grpo run`."""

from collections.abc import Iterator
from dataclasses import dataclass

from async_grpo.config.ranges import not_negative, positive


@dataclass(kw_only=True)
class LaunchSection:
    """Processes of `async-grpo run`."""

    num_generators: int = 1
    """Generators on this machine."""
    max_restarts: int = 3
    """Restarts of each generator, of the replay server and of the trainer (from its last
    checkpoint) within an hour of service; older ones no longer count. The life of a process that
    gave up its peers (exit code 3) is no service."""
    status_s: float = 5.0
    """Interval of the status line."""
    shutdown_timeout_s: float = 10.0
    """From a Ctrl-C or SIGTERM to the end of `run`. Six tenths of it are the trainer's, to end its
    step and to write a checkpoint; then it is killed, and a resumed run goes on from the checkpoint
    before. Raise it if a step and a checkpoint take longer."""

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        yield from positive(where, self, "num_generators", "status_s", "shutdown_timeout_s")
        yield from not_negative(where, self, "max_restarts")
