"""The places of a decoder's blocks in the cache: groups of pages for keys and values, and slots for states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from max.nn.kv_cache import RecurrentState
from max.pipelines.models.blocks.block import Block
from max.pipelines.models.blocks.mixer import CachedKeys

__all__ = ["CacheLayout", "cache_layout"]


class CacheLayout(NamedTuple):
    """The places of blocks in the cache.

    Args:
        groups: The keys of each group of layers, and the blocks in it. Layers without a window come first.
        places: For each block, its group and its index in it; for blocks with states only, 0 and the index among these.
        states: The states of each sequence.
    """

    groups: list[tuple[CachedKeys | None, list[int]]]
    places: list[tuple[int, int]]
    states: tuple[RecurrentState, ...]


def cache_layout(blocks: Sequence[Block], longest: int) -> CacheLayout:
    """The places of blocks in the cache.

    The grouping ignores the longest served sequence, so that the cache of a model always has the same layout.

    Args:
        blocks: The blocks.
        longest: The longest sequence that the model supports; a window that no sequence exceeds is none.
    """
    by_form: dict[tuple[bool, int, int], tuple[CachedKeys, list[int]]] = {}
    with_states: list[int] = []
    for index, block in enumerate(blocks):
        mixer = block.mixer
        if mixer is None:
            continue
        if (keys := mixer.keys) is not None:
            # a window that no sequence exceeds hides nothing
            if keys.window is not None and keys.window >= longest:
                keys = keys._replace(window=None)
            form = keys.window is not None, keys.n_kv_heads, keys.head_dim
            by_form.setdefault(form, (keys, []))[1].append(index)
        if mixer.states(1):
            with_states.append(index)
    # groups without a window come first
    groups: list[tuple[CachedKeys | None, list[int]]] = [by_form[form] for form in sorted(by_form)]
    # recurrent layers of a model have one form
    first_with_states = next((blocks[index].mixer for index in with_states), None)
    states = () if first_with_states is None else first_with_states.states(len(with_states))
    of_block = {
        block: (group, index)
        for group, (_, members) in enumerate(groups)
        for index, block in enumerate(members)
    }
    places: list[tuple[int, int]] = []
    for index, block in enumerate(blocks):
        source = None if block.mixer is None else block.mixer.source
        place = of_block.get(index if source is None else source)
        if place is None and index in with_states:
            # states are counted by themselves; no group has the block
            place = 0, with_states.index(index)
        places.append(place or (0, sum(other < index for other in of_block)))
    return CacheLayout(groups or [(None, [])], places, states)
