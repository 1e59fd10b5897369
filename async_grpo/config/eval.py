"""Section `eval`: evaluation on held-out prompts while the run goes on."""

from collections.abc import Iterator
from dataclasses import dataclass

from async_grpo.config.ranges import not_negative, positive


@dataclass(kw_only=True)
class EvalSection:
    """Evaluation on held-out prompts while the run goes on, by the generators' own engines."""

    every: int = 0
    """Train steps between evaluations; 0: none. Version 0 and the last version are evaluated too;
    a version that goes live while another is being evaluated is passed over."""
    num_prompts: int = 64
    """Held-out prompts of one evaluation; the same ones each time."""
    num_completions: int = 1
    """Completions per prompt; the mean over all of them is reported."""
    temperature: float = 1.0
    """Sampling temperature. Greedy decoding (0) is refused: engines return the log-probs of the
    full distribution, as training needs them."""
    max_new_tokens: int = 0
    """Budget of one completion; 0: generation.max_new_tokens."""
    held_out_fraction: float = 0.05
    """Share of the task's distinct prompts that is kept from training, chosen by a hash of the
    prompt's text and run.seed. Has no effect with every=0: then all prompts are trained on."""
    timeout_s: float = 600.0
    """The trainer waits this long at the end of the run for the last version's evaluation."""

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        yield from not_negative(where, self, "every", "max_new_tokens")
        yield from positive(where, self, "num_prompts", "num_completions", "timeout_s")
        if not self.temperature > 0:
            yield (
                f"{where}.temperature must be > 0, got {self.temperature}: greedy decoding is "
                "not offered, evaluation samples as training does"
            )
        if not 0 < self.held_out_fraction < 1:
            yield (
                f"{where}.held_out_fraction must be between 0 and 1, got {self.held_out_fraction}"
            )
