"""The whole configuration: one file per section; a field's docstring is its documentation.

Schema classes are not frozen (OmegaConf could not override a nested frozen section); treat a loaded
configuration as immutable. No torch, no omegaconf here. A section's `problems()` yields every
complaint about it; rules across sections are in `config.rules`.
"""

from dataclasses import dataclass, field

from async_grpo.config.alarms import AlarmsSection
from async_grpo.config.algorithm import AlgorithmSection
from async_grpo.config.engine import EngineSection
from async_grpo.config.eval import EvalSection
from async_grpo.config.generation import GenerationSection
from async_grpo.config.launch import LaunchSection
from async_grpo.config.metrics import MetricsSection
from async_grpo.config.policy import PolicySection
from async_grpo.config.replay import ReplaySection
from async_grpo.config.run import RunSection
from async_grpo.config.staleness import StalenessSection
from async_grpo.config.task import TaskSection
from async_grpo.config.trainer import TrainerSection
from async_grpo.config.weights import WeightsSection


@dataclass(kw_only=True)
class Config:
    """Everything."""

    run: RunSection
    policy: PolicySection
    task: TaskSection
    generation: GenerationSection = field(default_factory=GenerationSection)
    engine: EngineSection = field(default_factory=EngineSection)
    replay: ReplaySection = field(default_factory=ReplaySection)
    staleness: StalenessSection = field(default_factory=StalenessSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    weights: WeightsSection = field(default_factory=WeightsSection)
    eval: EvalSection = field(default_factory=EvalSection)
    alarms: AlarmsSection = field(default_factory=AlarmsSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    launch: LaunchSection = field(default_factory=LaunchSection)
