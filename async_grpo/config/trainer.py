"""Section `trainer`: the train step."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from async_grpo.config.ranges import not_negative, positive


class LRSchedule(StrEnum):
    """Learning rate after the warm-up."""

    constant = "constant"
    cosine = "cosine"


class Attention(StrEnum):
    """Implementation of attention in the trainer, by transformers' names."""

    sdpa = "sdpa"
    eager = "eager"
    flex_attention = "flex_attention"
    flash_attention_2 = "flash_attention_2"
    flash_attention_3 = "flash_attention_3"


@dataclass(kw_only=True)
class TrainerSection:
    """The train step."""

    lr: float = 1e-6
    """Peak learning rate."""
    lr_schedule: LRSchedule = LRSchedule.constant
    """After the warm-up; cosine falls to 0 at the last step."""
    warmup_steps: int = 0
    """Optimizer updates of linear warm-up."""
    weight_decay: float = 0.0
    """AdamW."""
    beta1: float = 0.9
    """AdamW."""
    beta2: float = 0.999
    """AdamW."""
    eps: float = 1e-8
    """AdamW."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    updates_per_step: int = 1
    """Optimizer updates of one train step; more than one adds a proximal pass."""
    tokens_per_microbatch: int = 4096
    """Packed tokens of one forward and backward."""
    logprob_chunk_tokens: int = 512
    """Rows of the head computed at a time; full logits are never held. 2048 suits a GPU: each
    float32 tensor of logits of a vocabulary of 151,936 then takes 1.2 GiB, and three live at
    once."""
    fp32_head: bool = True
    """bfloat16 policies: logits in float32 instead of rounded to bfloat16, in the trainer and in
    the engines that are started here (SGLang's --enable-fp32-lm-head). Without it logits around 16
    are off by up to 0.03 nats on each side. No effect on other dtypes."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass, and compute the layer again there:
    a fraction of the activations, for about a third more time. Same gradients."""
    attention: Attention = Attention.sdpa
    """sdpa and eager run everywhere. flex_attention needs a CUDA device and compiles at its first
    use; flash_attention_2 and flash_attention_3 need a CUDA device and their packages (flash-attn,
    flash-attn-3). All compute the same log-probs but for rounding."""
    memory_bytes: int = 0
    """Memory of the trainer's device: `check` refuses what needs more by its estimate
    (docs/memory.md). 0: not known."""
    threads: int = 1
    """CPU threads of one rank."""
    device: str = "auto"
    """auto: cuda if there is one, else cpu."""
    self_test: bool = True
    """At the start, before anything is trained, refuse a model that draws random numbers, whose
    packed sequences see each other, or whose head is more than a linear map. Eight forwards of a
    few dozen tokens; one is as long as the sliding window, if sequences can be."""
    checkpoint_every: int = 50
    """Train steps between checkpoints; 0: only at the end. A clean stop always writes one.
    Training goes on while one is written, from a copy of the state in host memory that is kept
    for the next: 14 bytes a parameter in bfloat16, 12 in float32."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept; at least 2, so that a damaged one costs steps, not the
    run."""

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        yield from positive(
            where, self, "lr", "max_grad_norm", "updates_per_step", "tokens_per_microbatch",
            "logprob_chunk_tokens", "threads", "eps",
        )  # fmt: skip
        yield from not_negative(
            where, self, "warmup_steps", "weight_decay", "checkpoint_every", "memory_bytes"
        )
        if self.keep_checkpoints < 2:
            yield f"{where}.keep_checkpoints must be >= 2, got {self.keep_checkpoints}"
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                yield f"{where}.{name} must be in [0, 1), got {getattr(self, name)}"
