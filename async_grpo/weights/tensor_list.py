"""Which tensors of a model travel, and under which names: one list for both ends of weight sync.

A tensor travels under the name that it has in a saved checkpoint. transformers computes with other
tensors than it saves: the experts of a layer are one tensor, `experts.gate_up_proj`; files and
servers have `experts.7.gate_proj.weight`. The conversion is the one of `save_pretrained`.
Here it yields views of the model's own tensors: nothing is copied, a sender reads the present
values, and a receiver fills the model by writing into them.

What travels is the state dict: parameters and persistent buffers (`e_score_correction_bias`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from async_grpo.errors import ConfigError


def travelling_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Checkpoint name -> view of the model's tensor; a tied tensor under its first name only.

    The views stay good while the model's tensors are changed in place only.

    Raises:
        ConfigError: a tensor of the checkpoint is no part of a tensor of the model.
    """
    seen: set[int] = set()
    own = {}
    for name, tensor in module.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            own[name] = tensor
    return _in_checkpoint_form(module, own)


def known_tensors(module: nn.Module) -> dict[str, Tensor]:
    """As `travelling_tensors`, but with tied tensors under each of their names.

    Raises:
        ConfigError: a tensor of the checkpoint is no part of a tensor of the model.
    """
    return _in_checkpoint_form(module, dict(module.state_dict()))


class _NoCopies(TorchFunctionMode):
    """Lets the conversion return slices as views: it makes each contiguous, which is a copy."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Every call as it is, but for `Tensor.contiguous`."""
        del types
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _in_checkpoint_form(module: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(module, PreTrainedModel):
        return own
    with _NoCopies():
        found: dict[str, Tensor] = revert_weight_conversion(module, own)
    storages = {_storage(tensor) for tensor in own.values()}
    copies = sorted(name for name, tensor in found.items() if _storage(tensor) not in storages)
    if copies or _num_elements(found) != _num_elements(own):
        raise ConfigError(
            f"policy.model: {type(module).__name__} is saved in another arrangement than it "
            f"computes with ({', '.join(copies[:3]) or 'its tensors differ in size'}); its weights "
            "cannot be sent without a copy of them, which is not supported"
        )
    return {name: found[name] for name in own} if found.keys() == own.keys() else found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _num_elements(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())
