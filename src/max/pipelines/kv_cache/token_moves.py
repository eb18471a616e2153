"""Copies of tokens between places of the pages of a cache: keys and values as they are stored, of all layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max.driver import Tensor

__all__ = ["copy_page", "move_tokens"]


def copy_page(blocks: Sequence[Tensor], source: int, target: int, length: int) -> None:
    """Copies the first tokens of a page.

    Args:
        blocks: The pages of a group of layers on each device.
        source: The page.
        target: The page that gets them.
        length: The number of tokens.
    """
    for block in blocks:
        if not block.device.is_host_unified:
            block[target, :, :, :, :, :].inplace_copy_from(block[source, :, :, :, :, :])
            continue
        # only these tokens: the rest is never read, and to write to memory for the first time takes long
        content = _rows(block)
        content[target, :, :length] = content[source, :, :length]


def move_tokens(block: Tensor, table: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
    """Copies tokens of a sequence to other positions, one after the other.

    Args:
        block: The pages of a group of layers on a device.
        table: The pages of the sequence.
        moves: The position of each token, and the one that it gets.
    """
    size = block.shape[3]
    host = _rows(block) if block.device.is_host_unified else None
    for source, target in moves:
        (old, place), (new, to) = divmod(source, size), divmod(target, size)
        if host is not None:
            host[table[new], :, to] = host[table[old], :, place]
            continue
        # contiguous parts
        for kind in range(block.shape[1]):
            for layer in range(block.shape[2]):
                own = block[table[old], kind, layer, place, :, :]
                block[table[new], kind, layer, to, :, :].inplace_copy_from(own)


def _rows(block: Tensor) -> npt.NDArray[Any]:
    """The memory of pages that the host shares, as bytes ``[pages, kinds * layers, tokens, bytes of a token]``."""
    pages, kinds, layers, tokens, heads, row = block.shape
    sizes = pages, kinds * layers, tokens, heads * row * block.dtype.size_in_bytes
    memory = block.device.memory.read(block._ptr, math.prod(sizes))  # pyright: ignore[reportPrivateUsage]
    return np.asarray(memory).reshape(sizes)
