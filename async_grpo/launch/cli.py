"""The `async-grpo` command: parses, loads the configuration, hands over to a role.

Imports no role, and so no torch, before the command is known: `--help` must answer at once. Knows
nothing of what a role does.
"""

import argparse
import errno
import json
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from async_grpo import __version__
from async_grpo.errors import AsyncGrpoError, ConfigError, ExitCode
from async_grpo.launch.standard_streams import say, silence

if TYPE_CHECKING:
    from async_grpo.config.schema import Config

_MAKE_ROOM = "what was acknowledged is in run.output_dir: make room and start again"
_NOT_ALLOWED = "allow it to this user, or choose another place"
_ADVICE = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EFBIG: "raise the limit (ulimit -f) and start again",
    errno.EMFILE: "raise the limit (ulimit -n) and start again",
    errno.EROFS: _NOT_ALLOWED,
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
}
"""What to do about errors of the operating system that are no defect of this program."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code of the process.

    An `AsyncGrpoError` is a message without a traceback and its own exit code. Any other exception
    is a defect of ours: it passes through, so that Python prints it and exits with 1.
    """
    try:
        _find_modules_here()
        args = _parse(argv)
        command: Callable[[argparse.Namespace], ExitCode] = args.command
        return int(command(args))
    except AsyncGrpoError as error:
        say(f"async-grpo: {error}", sys.stderr)
        return int(error.exit_code)
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0)
        if advice is None:
            raise
        where = f" ({error.filename})" if error.filename else ""
        say(f"async-grpo: {error.strerror}{where}; {advice}", sys.stderr)
        return int(ExitCode.OTHER)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)


def _find_modules_here() -> None:
    """As `python -m` has it: for objects named module:attribute."""
    try:
        here = os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the current directory was removed; change to one that exists") from error
    if here not in sys.path:
        sys.path.insert(0, here)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    # argparse gives up on positionals that follow an option (`CONFIG --name g key=value`).
    args, extra = parser.parse_known_args(argv)
    if extra and hasattr(args, "overrides") and not any(item.startswith("-") for item in extra):
        args.overrides += extra
    elif extra:
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="async-grpo",
        description="Asynchronous, off-policy-tolerant GRPO for language models.",
        epilog="exit codes: 0 done or stopped by SIGTERM, 2 configuration, 3 a peer or a deadline, "
        "4 numerics, 130 Ctrl-C, 1 anything else",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def configured(
        name: str, command: Callable[[argparse.Namespace], ExitCode], text: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("config", metavar="CONFIG", help="YAML file")
        sub.add_argument(
            "overrides", metavar="key=value", nargs="*", default=[], help="wins over the file"
        )
        sub.set_defaults(command=command)
        return sub

    run = configured("run", _run, "all roles on this machine, with live progress")
    run.add_argument("--resume", action="store_true", help="continue the run of run.output_dir")
    configured("replay", _replay, "the replay server alone")
    generator = configured("generator", _generator, "one generator alone, with its engines")
    generator.add_argument("--name", default="", help="unique in the run; default: host and pid")
    trainer = configured("trainer", _trainer, "the trainer alone")
    trainer.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks; 1 for now")
    configured("engine", _engine, "the embedded engine alone")
    configured("check", _check, "the resolved configuration and what follows from it")
    doctor = configured("doctor", _doctor, "live self-tests of the policy and its engines")
    doctor.add_argument("--json", action="store_true", help="machine-readable")
    configured("prepare", _prepare, "make the initial model if policy.maker names how")
    audit = commands.add_parser("audit", help="prove a run's accounting from its witnesses")
    audit.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    audit.add_argument("--json", action="store_true", help="machine-readable")
    audit.set_defaults(command=_audit)
    samples = commands.add_parser("samples", help="read a few completions of a run, as plain text")
    samples.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    samples.add_argument("--step", type=int, metavar="N", help="only those sampled by version N")
    samples.add_argument(
        "--last", type=int, default=3, metavar="K", help="only the last K versions; default 3"
    )
    samples.set_defaults(command=_samples)
    export = commands.add_parser("export", help="write what a run has trained for transformers")
    export.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    export.add_argument("out", metavar="OUT", type=Path, help="a new directory")
    export.set_defaults(command=_export)
    return parser


# Each loads the configuration before it imports its role: a typing error answers at once.


def _run(args: argparse.Namespace) -> ExitCode:
    config = _load(args)
    from async_grpo.launch.run import run

    _set_up_logging(logging.WARNING)
    return run(config, resume=args.resume)


def _replay(args: argparse.Namespace) -> ExitCode:
    alone = _become_role()
    config = _load(args)
    if alone:
        from async_grpo.launch.alone import continue_or_begin, log_to_file

        continue_or_begin(config)
        log_to_file(config, "replay")
    from async_grpo.roles import replay_server

    replay_server.main(config)
    return ExitCode.OK


def _generator(args: argparse.Namespace) -> ExitCode:
    alone = _become_role()
    name = args.name or f"generator-{socket.gethostname()}-{os.getpid()}"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r} may hold letters, digits, '.', '_' and '-' only")
    config = _load(args)
    _require(config, name if alone else "", tokenizer=True)
    if alone:  # else `run` has done so
        from async_grpo.generation.preflight import preflight

        preflight(config, whole_run=False).require(logging.getLogger(__name__).info)
    from async_grpo.roles import generator

    generator.main(config, name=name, config_args=[args.config, *args.overrides])
    return ExitCode.OK


def _trainer(args: argparse.Namespace) -> ExitCode:
    alone = _become_role()
    config = _load(args)
    if args.nproc != 1:
        raise ConfigError(f"--nproc {args.nproc}: one rank in this version")
    _require(config, "trainer" if alone else "", tokenizer=False)
    from async_grpo.roles import trainer

    trainer.main(config)
    return ExitCode.OK


def _engine(args: argparse.Namespace) -> ExitCode:
    alone = _become_role()
    config = _load(args)
    _require(
        config, f"engine-{config.engine.port or os.getpid()}" if alone else "", tokenizer=False
    )
    from async_grpo.engine import server

    server.main(config, port=config.engine.port)
    return ExitCode.OK


def _check(args: argparse.Namespace) -> ExitCode:
    config = _load(args)
    from async_grpo.launch.check import describe

    _print(describe(config).rstrip("\n"))
    return ExitCode.OK


def _doctor(args: argparse.Namespace) -> ExitCode:
    config = _load(args)
    from async_grpo.launch.alone import require_model
    from async_grpo.launch.prepare import needs_preparation, prepare

    _set_up_logging(logging.ERROR)
    if needs_preparation(config):
        say("making the initial model (policy.maker)", sys.stderr)
        prepare(config)
    require_model(config, tokenizer=False)
    from async_grpo.doctor.runner import run_doctor

    report = run_doctor(config, [args.config, *args.overrides])
    _print(json.dumps(report.to_json()) if args.json else report.to_text())
    return report.exit_code


def _prepare(args: argparse.Namespace) -> ExitCode:
    _become_role()
    config = _load(args)
    from async_grpo.launch.prepare import prepare

    prepare(config)
    return ExitCode.OK


def _audit(args: argparse.Namespace) -> ExitCode:
    from async_grpo.analysis.audit import audit

    report = audit(args.run_dir)
    _print(json.dumps(report.to_json()) if args.json else report.to_text())
    return ExitCode.OK if report.ok else ExitCode.OTHER


def _samples(args: argparse.Namespace) -> ExitCode:
    from async_grpo.analysis.samples import format_samples, read_samples

    _print(format_samples(read_samples(args.run_dir, step=args.step, last=args.last)))
    return ExitCode.OK


def _export(args: argparse.Namespace) -> ExitCode:
    from async_grpo.training.export import export

    _set_up_logging(logging.WARNING)
    source = export(args.run_dir, args.out)
    _print(f"wrote {args.out} from {source}")
    return ExitCode.OK


def _print(text: str) -> None:
    """What was asked for; a reader that has seen enough (`| head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        silence(sys.stdout)
    except OSError as error:
        silence(sys.stdout)
        raise AsyncGrpoError(f"standard output cannot be written: {error.strerror}") from error


def _load(args: argparse.Namespace) -> "Config":
    from async_grpo.config.load import load_config

    return load_config(args.config, args.overrides)


def _require(config: "Config", log: str, *, tokenizer: bool) -> None:
    """What can be said of the model without torch; `log`: name of the log of a role alone."""
    from async_grpo.launch.alone import log_to_file, require_model

    require_model(config, tokenizer=tokenizer)
    if log:
        log_to_file(config, log)


def _become_role() -> bool:
    """What every role needs before its slow imports: a parent, a log, an answer to SIGTERM.

    Returns:
        Whether it was started alone, by no process of ours.
    """
    from async_grpo.transport.parent import CHILD_VARIABLE, exit_with_parent

    alone = os.environ.get(CHILD_VARIABLE) != "1"
    exit_with_parent()
    signal.signal(signal.SIGTERM, _exit_cleanly)  # until the role installs its own
    _set_up_logging(logging.INFO)
    return alone


def _exit_cleanly(_signum: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(ExitCode.OK)


def _set_up_logging(level: int) -> None:
    logging.basicConfig(
        level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
