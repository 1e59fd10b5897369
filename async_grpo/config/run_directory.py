"""Where everything lies in a run directory."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDirectory:
    """Names of the files of one run."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.yaml"

    @property
    def ledger(self) -> Path:
        """The replay server's record of every group."""
        return self.root / "ledger.jsonl"

    @property
    def ledger_snapshot(self) -> Path:
        """What spares a start of the replay server most of the ledger; may be removed."""
        return self.root / "ledger.snapshot"

    @property
    def metrics(self) -> Path:
        """One line per train step."""
        return self.root / "metrics.jsonl"

    @property
    def steps(self) -> Path:
        """The trainer's witness: groups, tokens and versions of each step."""
        return self.root / "steps.jsonl"

    @property
    def samples(self) -> Path:
        """A few completions per policy version, for people."""
        return self.root / "samples.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard events."""
        return self.root / "tensorboard"

    @property
    def logs(self) -> Path:
        """One log per role, and the generators' witness logs."""
        return self.root / "logs"

    @property
    def bound_address(self) -> Path:
        """The address that the replay server listens on; written when it does."""
        return self.root / "replay" / "address"

    @property
    def lock(self) -> Path:
        """Locked by `run` while it lives."""
        return self.root / "replay" / "run.lock"

    @property
    def final_model(self) -> Path:
        """The trained policy as a Hugging Face directory."""
        return self.root / "final_model"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of the trainer, a directory `INCARNATION.POLICY_VERSION` each."""
        return self.root / "checkpoints"

    def checkpoints_by_age(self) -> list[tuple[int, int]]:
        """(incarnation, policy_version) of every checkpoint directory, whole or not, in order."""
        names = [path.name.partition(".") for path in self.checkpoints.glob("[0-9]*.[0-9]*")]
        return sorted((int(one), int(two)) for one, _, two in names if (one + two).isdecimal())

    def role_log(self, role: str) -> Path:
        """What one role printed."""
        return self.logs / f"{role}.log"

    def generator_log(self, generator: str) -> Path:
        """A generator's witness: every group it sent or ended, and the answer."""
        return self.logs / f"{generator}.groups.jsonl"

    def generator_logs(self) -> list[Path]:
        """All of them."""
        return sorted(self.logs.glob("*.groups.jsonl"))
