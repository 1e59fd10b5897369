"""Rewards that misbehave, importable by a worker process."""

import os
import signal
import threading
import time


def by_text(completion, answer, metadata):
    """What the completion says."""
    if completion == "raise":
        raise ValueError("on purpose")
    if completion == "hang":
        time.sleep(3600)
    if completion == "hang in C":
        # one bytecode, no signal handler of Python can run before it ends
        return float(10 ** (10**9))
    if completion == "die":
        os._exit(7)
    if completion == "exit":
        raise SystemExit(5)
    if completion == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return {
        "nan": float("nan"),
        "infinite": {"a": 1.0, "b": float("inf")},
        "text": "1",
        "words": "much",
        "none": None,
        "parts": {"format": 0.25, "answer": 1.0},
        "no parts": {},
        "true": True,
    }.get(completion, float(completion == answer))


def needs_main_thread(completion, answer, metadata):
    """As verifiers do that use alarms."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return float(threading.current_thread() is threading.main_thread())


def pid(completion, answer, metadata):
    return float(os.getpid())


def by_length(completion, answer, metadata):
    return float(len(completion))


def tell_pid_and_hang(completion, answer, metadata):
    """Hangs in C, where no thread of Python can end the process."""
    os.write(1, f"{os.getpid()}\n".encode())
    return float(10 ** (10**10))


def raises(completion, answer, metadata):
    raise ValueError("on purpose")


def no_number(completion, answer, metadata):
    return float("nan")


def never(completion, answer, metadata):
    return 0.0


def hangs(completion, answer, metadata):
    time.sleep(3600)


def sometimes(completion, answer, metadata):
    """Right for most answers."""
    wrong = {"aa": raises, "ba": no_number, "ca": hangs}.get(answer[:2])
    return wrong(completion, answer, metadata) if wrong else float(completion == answer)
