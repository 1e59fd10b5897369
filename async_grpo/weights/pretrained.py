"""A pretrained model from its files: all of its weights, or an error that says what is wrong.

Knows nothing of what the model is for.
"""

import logging
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from async_grpo.errors import ConfigError

logger = logging.getLogger(__name__)


def load_pretrained(path: str, dtype: torch.dtype, **options: Any) -> Any:
    """The transformers causal language model at `path`, in evaluation mode: nothing is random.

    Args:
        path: `policy.model`, a directory or a Hugging Face name.
        dtype: of its weights.
        options: further arguments of `from_pretrained`.

    Raises:
        ConfigError: it cannot be loaded, or its files lack weights that the model needs.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers
    try:
        config = AutoConfig.from_pretrained(path)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True, **options
        )
        module, found = loaded
    except Exception as error:  # all kinds: foreign code that reads a user's files
        problem = str(error) or type(error).__name__
        raise ConfigError(f"policy.model: cannot load {path!r}: {problem}") from error
    # transformers would go on with random numbers
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(
            f"policy.model: the files in {path!r} lack {len(missing)} tensors that its config.json "
            f"asks for, {missing[0]} among them"
        )
    if unused := sorted(found["unexpected_keys"]):
        logger.warning(
            "policy.model: %d tensors in %r are not used, %s among them: does its config.json "
            "belong to them?", len(unused), path, unused[0],
        )  # fmt: skip
    return module
