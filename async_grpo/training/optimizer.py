"""AdamW with clipping, a learning-rate schedule, and float32 master weights for bfloat16."""

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from async_grpo.config.trainer import LRSchedule, TrainerSection

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter."""
_MASTER = "master"
"""The float32 weights of a parameter of less than float32."""


def learning_rate(settings: TrainerSection, update: int, num_updates: int) -> float:
    """Rate of optimizer update `update` (0, 1, ...) of `num_updates`.

    Linear warm-up over `warmup_steps` updates, the first at lr / warmup_steps; then constant, or a
    cosine that would reach 0 just after the last update.
    """
    if update < settings.warmup_steps:
        return settings.lr * (update + 1) / settings.warmup_steps
    if settings.lr_schedule is LRSchedule.constant:
        return settings.lr
    span = max(1, num_updates - settings.warmup_steps)
    done = min(1.0, (update - settings.warmup_steps) / span)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * done))


class PolicyOptimizer:
    """Updates the parameters of one policy.

    Parameters of less than float32 get float32 masters: an update of 1e-6 would vanish in
    bfloat16. Their gradients are then added up in float32 too, micro-batch by micro-batch.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], settings: TrainerSection) -> None:
        self._settings = settings
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._masters: list[Tensor] = []
        self._names: list[str] = []
        for name, parameter in parameters:
            self._names.append(name)
            if parameter.dtype in (torch.float32, torch.float64):
                self._masters.append(parameter)
                continue
            master = parameter.detach().float().requires_grad_()
            self._pairs.append((parameter, master))
            self._masters.append(master)
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch's
                _AccumulateInto(master)
            )
        self._adamw = torch.optim.AdamW(
            self._masters,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def zero_fill(self) -> None:
        """A gradient of zeros where there is none: moments decay as after a backward of zeros."""
        for master in self._masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    def clip(self) -> float:
        """Scale gradients down to `max_grad_norm`; returns the global norm before that."""
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self._settings.max_grad_norm)
        return float(norm)

    def step(self, lr: float) -> None:
        """One AdamW update at rate `lr`."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """What later updates depend on, `parameter:part`; nothing of one not yet updated."""
        found: dict[str, Tensor] = {}
        for name, master, parts in self._layout():
            state = self._adamw.state.get(master, {})
            if state:
                found |= {
                    f"{name}:{part}": master.detach() if part == _MASTER else state[part]
                    for part in parts
                }
        return found

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` returned in another process.

        Raises:
            ValueError: they are those of other parameters.
        """
        left = dict(tensors)
        for name, master, parts in self._layout():
            found = {part: left.pop(f"{name}:{part}", None) for part in parts}
            if all(tensor is None for tensor in found.values()):
                continue
            for part, tensor in found.items():
                shape = torch.Size() if part == "step" else master.shape
                if tensor is None or tensor.shape != shape:
                    raise ValueError(f"{name}:{part} is missing or has another shape")
                if part == _MASTER:
                    master.copy_(tensor)
                else:
                    self._adamw.state[master][part] = tensor.to(master.device, copy=True)
        if left:
            raise ValueError(f"unknown: {', '.join(sorted(left)[:4])}")

    def _layout(self) -> Iterator[tuple[str, Tensor, tuple[str, ...]]]:
        """(parameter, what AdamW updates, parts that are kept of it)."""
        separate = {id(master) for _, master in self._pairs}
        for name, master in zip(self._names, self._masters, strict=True):
            yield name, master, (*_MOMENTS, _MASTER) if id(master) in separate else _MOMENTS


class _AccumulateInto:
    """Hook that moves a low-precision gradient into its master's float32 one."""

    def __init__(self, master: Tensor) -> None:
        self._master = master

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if self._master.grad is None:
            self._master.grad = parameter.grad.float()
        else:
            self._master.grad.add_(parameter.grad)  # in place: a head's gradient can take a GiB
        parameter.grad = None
