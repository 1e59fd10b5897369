"""Which prompt a ticket is for: a seeded permutation per epoch, computed at any position.

A Feistel network over the next power of four, walked until it falls inside the range, is a
permutation of the range; it needs no list, so a million prompts cost nothing at an epoch's start,
and the position (the group_id) is all the state there is.
"""

_MASK64 = (1 << 64) - 1
_NUM_ROUNDS = 6


class PromptOrder:
    """prompt_index of the n-th ticket."""

    def __init__(self, *, seed: int, num_prompts: int) -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts must be >= 1, got {num_prompts}")
        self._seed = seed
        self._num_prompts = num_prompts
        self._half_bits = max(1, ((num_prompts - 1).bit_length() + 1) // 2)

    def prompt_index(self, position: int) -> int:
        """Index in [0, num_prompts) of ticket `position`; each epoch visits every prompt once."""
        epoch, index = divmod(position, self._num_prompts)
        key = _mix(_mix(self._seed & _MASK64) ^ epoch)
        index = self._permute(index, key)
        while index >= self._num_prompts:
            index = self._permute(index, key)
        return index

    def _permute(self, value: int, key: int) -> int:
        """A bijection of [0, 4 ** half_bits)."""
        mask = (1 << self._half_bits) - 1
        left, right = value >> self._half_bits, value & mask
        for round_number in range(_NUM_ROUNDS):
            left, right = right, left ^ (_mix(key ^ (right << 8) ^ round_number) & mask)
        return (left << self._half_bits) | right


def _mix(value: int) -> int:
    """Finalizer of splitmix64 (Steele, Lea, Flood 2014), a bijection with good diffusion."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
