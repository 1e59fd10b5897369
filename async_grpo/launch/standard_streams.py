"""Output for people, who may be gone: a run does not depend on who reads what it prints.

Terminals close, the reader of a pipe ends (`| head`), the disk of a redirection fills up, a service
manager gives no output at all. None of that ends a run; what nobody can read is not printed.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_NUM_STANDARD = 3


def open_standard_streams() -> None:
    """Let stdin, stdout and stderr be open, and the latter two take any text.

    The next file that is opened would get the number of a closed one, and what is printed with it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < _NUM_STANDARD:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or _stream(1)
    sys.stderr = sys.stderr or _stream(2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # of this kind


def _stream(descriptor: int) -> TextIO:
    return open(descriptor, "w", closefd=False)  # lives as long as we do


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line at once, to stdout by default; see `heard_or_not`."""
    to = stream or sys.stdout
    with heard_or_not(to):
        print(text, file=to, flush=True)


@contextmanager
def heard_or_not(stream: TextIO) -> Iterator[None]:
    """What the body prints to `stream` is lost if it fails, and so is everything after it."""
    try:
        yield
    except OSError:
        silence(stream)


def silence(stream: TextIO) -> None:
    """From now on nothing reaches the reader of `stream`, what it holds back included."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
