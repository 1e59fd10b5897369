"""The policy as the weight publisher sees it: named tensors and a probe."""

import logging
from collections.abc import Iterator

from torch import Tensor

from async_grpo.config.policy import DType
from async_grpo.config.weights import ProbeLimits, WeightsSection
from async_grpo.replay_parts import Probe, ProbeIds
from async_grpo.training.model import PolicyModel
from async_grpo.training.probe import logprobs_of, measure_noise, sample_probe
from async_grpo.weights.tensor_list import travelling_tensors

logger = logging.getLogger(__name__)


class PolicyWeights:
    """A `WeightSource` over a transformers model.

    Made while the model holds its initial weights: these sample the probe's ids, which stay for the
    run, and show how far the trainer's own rounding moves log-probs.

    Args:
        model: the policy.
        settings: section `weights`.
        seed: of the probe's ids.

    Attributes:
        noise: mean |log-prob difference| of the trainer's own rounding on the probe, nats.
        limits: what an engine's log-probs of the probe may differ by.
    """

    def __init__(self, model: PolicyModel, settings: WeightsSection, *, seed: int) -> None:
        self._model = model
        self._tensors = travelling_tensors(model.module)
        self._sets = sample_probe(model, seed=seed)
        self.noise = measure_noise(model, self._sets)
        dtype = DType(str(model.dtype).removeprefix("torch."))
        self.limits: ProbeLimits = settings.probe_limits(dtype, self.noise)
        logger.info(
            "probe: %d ids; the trainer's rounding moves their log-probs by %.2g nats on average, "
            "engines' may differ by %.2g",
            len(self._sets[0]), self.noise, self.limits.mean,
        )  # fmt: skip

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name in a checkpoint, tensor that may be written to), a tied one by its first name."""
        yield from self._tensors.items()

    def probe(self) -> Probe:
        """Fixed ids and the log-probs that the present weights give them, at temperature 1."""
        logprobs = logprobs_of(self._model, self._sets).tolist()
        return Probe(
            sets=[
                ProbeIds(token_ids=ids, logprobs=values)
                for ids, values in zip(self._sets, logprobs, strict=True)
            ],
            tolerance=self.limits.mean,
            max_tolerance=self.limits.largest,
        )
