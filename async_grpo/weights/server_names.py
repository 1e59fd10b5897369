"""Which tensors of a Hugging Face model an SGLang server has, under its own fused names. Pure.

A server fuses projections when it loads (`q_proj`, `k_proj`, `v_proj` -> `qkv_proj`), so the names
it lists are not those that are sent. Read in sglang 0.5.23: `stacked_params_mapping` and
`make_expert_params_mapping` of the models in `sglang/srt/models`.
"""

import re
from collections.abc import Collection, Iterable

_FUSED = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.experts\.\d+\.(w1|w3)\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.w2\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.shared_experts\.(gate|up)_proj\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.shared_experts\.down_proj\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\."), ".fused_qkv_a_proj_with_mqa."),
)


def unknown_names(sent: Iterable[str], known: set[str]) -> list[str]:
    """Of the names that are sent, those that the server has neither as such nor fused.

    Args:
        sent: Hugging Face names.
        known: names that the server lists; of all its ranks.
    """
    return [name for name in sent if not known.intersection(_candidates(name))]


def parts_of(sent: Iterable[str], known: Collection[str]) -> dict[str, list[str]]:
    """Which of the tensors that are sent each tensor of a server is made of.

    Args:
        sent: Hugging Face names.
        known: names that the server lists.

    Returns:
        The server's name -> names that are sent, in their order; only names that have such.
    """
    parts: dict[str, list[str]] = {}
    for name in sent:
        found = next((each for each in _candidates(name) if each in known), None)
        if found is not None:
            parts.setdefault(found, []).append(name)
    return parts


def _candidates(name: str) -> list[str]:
    """Its own name first, then fused ones."""
    return [name, *(pattern.sub(fused, name) for pattern, fused in _FUSED)]
