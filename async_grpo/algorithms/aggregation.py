"""How per-token losses become one number: token weights and one global denominator.

Losses are summed with these weights over any partition of the batch and divided once, so that
micro-batches and ranks do not change the result.
"""

from collections.abc import Sequence
from enum import StrEnum


class Aggregation(StrEnum):
    """What one token of a sequence weighs, and what the sum is divided by."""

    token_mean = "token_mean"
    """every token of the global batch the same"""
    sequence_mean_token_mean = "sequence_mean_token_mean"
    """every sequence the same, its tokens share alike"""
    sequence_mean_token_sum = "sequence_mean_token_sum"
    """every token 1 / number of sequences: long sequences weigh more"""
    constant = "constant"
    """every token 1 / (number of sequences * a constant length) (Dr. GRPO)"""


def sequence_token_weights(aggregation: Aggregation, num_tokens: Sequence[int]) -> list[float]:
    """Weight of each token of each sequence.

    Args:
        aggregation: the rule.
        num_tokens: tokens of each sequence that count; 0 gives weight 0.
    """
    if aggregation is Aggregation.sequence_mean_token_mean:
        return [1.0 / count if count else 0.0 for count in num_tokens]
    return [1.0 if count else 0.0 for count in num_tokens]


def denominator(
    aggregation: Aggregation, num_tokens: Sequence[int], *, length: int | None = None
) -> float:
    """What the weighted sum over the *global* batch is divided by.

    Which tokens count is the caller's choice: all that were drawn (`original`), so that a token
    weighs the same whatever is rejected beside it; or those left after rejection (`kept`).

    Args:
        aggregation: the rule.
        num_tokens: tokens of each sequence that count.
        length: the constant of `Aggregation.constant`.

    Raises:
        ValueError: the batch has no token that counts, or `constant` has no length.
    """
    if aggregation is Aggregation.token_mean:
        total = sum(num_tokens)
    else:
        total = sum(1 for count in num_tokens if count)
    if not total:
        raise ValueError("the batch has no token to train on")
    if aggregation is Aggregation.constant:
        if length is None:
            raise ValueError("aggregation by a constant length needs the length")
        total *= length
    return float(total)
