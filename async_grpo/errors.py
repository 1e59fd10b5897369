"""Exceptions and exit codes.

    AsyncGrpoError                     exit 1
      ConfigError (ValueError)         exit 2   every problem at once, before any process starts
      PeerError                        exit 3   a peer or a deadline
        RpcTimeout
        PeerLost
        VersionMismatch                wire version or configuration digest differ
        CodecError (ValueError)        a frame that no honest peer sends
      GenerationError                  exit 3   an engine refused or failed a request
      RewardError                      exit 1
      WeightSyncError                  exit 3   names peer, weights and phase
      NumericsError                    exit 4   non-finite loss or gradient norm

A stale group is not an error: it is an outcome (`types.DropReason`).
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process tells its parent."""

    OK = 0
    OTHER = 1
    CONFIG = 2
    PEER = 3
    NUMERICS = 4
    INTERRUPTED = 130


class AsyncGrpoError(Exception):
    """Root of every error raised on purpose."""

    exit_code: ExitCode = ExitCode.OTHER


class ConfigError(AsyncGrpoError, ValueError):
    """The configuration is wrong; holds every problem that was found.

    Attributes:
        problems: one line each, naming the field.
    """

    exit_code = ExitCode.CONFIG

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class PeerError(AsyncGrpoError):
    """A peer failed or did not answer in time."""

    exit_code = ExitCode.PEER


class RpcTimeout(PeerError):  # noqa: N818 -- the established name of the outcome
    """A request was not answered before its deadline."""

    def __init__(self, peer: str, operation: str, waited_s: float, *, advice: str = "") -> None:
        self.peer, self.operation, self.waited_s = peer, operation, waited_s
        advised = f"; {advice}" if advice else ""
        super().__init__(f"{peer} did not answer {operation!r} within {waited_s:.1f} s{advised}")


class PeerLost(PeerError):  # noqa: N818 -- the established name of the outcome
    """A peer that work depends on is gone."""


class VersionMismatch(PeerError):  # noqa: N818 -- the established name of the outcome
    """Two roles were started from code or configurations that differ."""


class CodecError(PeerError, ValueError):
    """Bytes that break the wire format; costs the sender one bounded reject."""


class RemoteError(PeerError):
    """The peer answered with an error.

    Attributes:
        code: a `replay_api.base.ErrorCode` value.
    """

    def __init__(self, peer: str, operation: str, code: str, message: str) -> None:
        self.peer, self.operation, self.code = peer, operation, code
        super().__init__(f"{peer} refused {operation!r} ({code}): {message}")


class GenerationError(AsyncGrpoError):
    """An engine refused or failed a request.

    Attributes:
        retryable: the same request may succeed later or on another engine.
    """

    exit_code = ExitCode.PEER

    def __init__(self, message: str, *, retryable: bool) -> None:
        self.retryable = retryable
        super().__init__(message)


class EngineSilent(GenerationError):  # noqa: N818 -- an outcome
    """An engine did not answer before a deadline."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class EngineMisconfigured(GenerationError):  # noqa: N818 -- an outcome
    """An engine that the configuration names can never be used: another try ends the same way."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class RewardError(AsyncGrpoError):
    """A reward could not be made or loaded."""


class WeightSyncError(AsyncGrpoError):
    """A weight update failed for one peer."""

    exit_code = ExitCode.PEER

    def __init__(self, peer: str, weights: str, phase: str, message: str) -> None:
        self.peer, self.weights, self.phase = peer, weights, phase
        super().__init__(f"{peer}: update to {weights} failed in phase {phase!r}: {message}")


class NumericsError(AsyncGrpoError):
    """A loss or gradient norm is not finite; names the step and the groups."""

    exit_code = ExitCode.NUMERICS
