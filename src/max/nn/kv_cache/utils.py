"""Host tensors for a batch over a cache."""

from __future__ import annotations

import numpy as np

from max.driver import Buffer

__all__ = ["build_max_lengths_tensors"]


def build_max_lengths_tensors(
    max_prompt_length: int, max_cache_length: int
) -> tuple[Buffer, Buffer]:
    """Converts the maximum lengths of a batch to tensors: each one uint32 on the CPU.

    Args:
        max_prompt_length: The maximum number of new tokens of a sequence.
        max_cache_length: The maximum number of tokens of a sequence in the cache, new ones included.

    Raises:
        OverflowError: A length is negative, or does not fit 32 bits.
        TypeError: A length is not an integer.
    """
    lengths = {"max_prompt_length": max_prompt_length, "max_cache_length": max_cache_length}
    for name, length in lengths.items():
        if not isinstance(length, int | np.integer) or isinstance(length, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"build_max_lengths_tensors: {name} is {length!r}, expected an integer")
        if not 0 <= length < 1 << 32:
            raise OverflowError(f"build_max_lengths_tensors: {name} is {length}, expected a uint32")
    prompt, cache = (Buffer.from_numpy(np.array([n], np.uint32)) for n in lengths.values())
    return prompt, cache
