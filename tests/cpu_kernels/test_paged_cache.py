"""Look-ups of ragged batches over a paged cache: against NumPy, and an error for each operand that does not fit."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from max import kernel as k
from max._backends.cpu.kernels.attention.paged_cache import (
    PagedCache,
    check_batch,
    layer_of,
    page_of,
    sequence_of,
)
from tests.kernel_language.harness import compiled


@k.kernel
def look_up(
    out: k.Output, offsets: k.Input, blocks: k.Input, cache_lengths: k.Input, lookup_table: k.Input,
    layer_index: k.Input, *, kinds: int, width: int,
) -> None:  # fmt: skip
    """Writes sequence, page and layer of each row."""
    layer = layer_of(blocks, layer_index)
    check_batch(
        offsets, out.shape[0], PagedCache(blocks, cache_lengths, lookup_table), width, kinds
    )
    for token in range(out.shape[0]):
        sequence = sequence_of(offsets, cache_lengths.shape[0], token)
        position = k.i64(cache_lengths[sequence]) + token - k.i64(offsets[sequence])
        out[token, 0] = sequence
        out[token, 1] = page_of(blocks, lookup_table, sequence, position)
        out[token, 2] = layer


@k.kernel
def look_up_two_kinds(
    out: k.Output, offsets: k.Input, blocks: k.Input, cache_lengths: k.Input, lookup_table: k.Input,
    layer_index: k.Input, *, width: int,
) -> None:  # fmt: skip
    check_batch(offsets, out.shape[0], PagedCache(blocks, cache_lengths, lookup_table), width)
    out[0, 0] = 1


class Batch:
    """A random ragged batch that fits its cache."""

    def __init__(self, rng: random.Random, size: int | None = None) -> None:
        self.page_size = size or rng.randint(1, 3)
        self.lengths = [rng.choice((0, 0, 1, 2, 5)) for _ in range(rng.randint(1, 9))]
        self.cached = [rng.randint(0, 6) for _ in self.lengths]
        width = -(
            -max(a + b for a, b in zip(self.lengths, self.cached, strict=True)) // self.page_size
        )
        self.pages, self.layers = rng.randint(1, 6), rng.randint(1, 3)
        self.layer = rng.randrange(self.layers)
        self.table = np.array(
            [[rng.randrange(self.pages) for _ in range(width)] for _ in self.lengths], np.uint32
        ).reshape(len(self.lengths), width)

    def arguments(self, kinds: int = 2, **changed: object) -> list[np.ndarray]:
        total = sum(self.lengths)
        given = {
            "out": np.full((total, 3), -1, np.int64),
            "offsets": np.cumsum([0, *self.lengths]).astype(np.uint32),
            "blocks": np.zeros((self.pages, kinds, self.layers, self.page_size, 1, 1), np.float32),
            "cached": np.array(self.cached, np.uint32),
            "table": self.table,
            "layer": np.array([self.layer], np.uint32),
        }
        return [np.asarray(value) for value in {**given, **changed}.values()]

    def expected(self) -> list[list[int]]:
        return [
            [sequence, int(self.table[sequence, (cached + at) // self.page_size]), self.layer]
            for sequence, (length, cached) in enumerate(zip(self.lengths, self.cached, strict=True))
            for at in range(length)
        ]


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_found(seed: int) -> None:
    batch = Batch(random.Random(seed))
    for kinds in (1, 2):
        for given in (kinds, 2):
            args = batch.arguments(given)
            compiled(look_up, args, {"kinds": kinds, "width": 4})
            assert args[0].tolist() == batch.expected()


def refused(
    error: type[Exception],
    message: str,
    args: list[np.ndarray],
    kernel: k.Kernel = look_up,
    **params: int,
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        compiled(kernel, args, {"width": 4, **params})


@pytest.mark.parametrize("seed", range(8))
def test_operands_that_do_not_fit(seed: int) -> None:
    batch = Batch(random.Random(seed))
    count = len(batch.lengths)
    if not sum(batch.lengths):
        batch.lengths[0], batch.cached[0] = 1, 0
        batch.table = np.zeros((count, 6), np.uint32)
    for wrong in (count, count + 2):
        offsets = np.zeros(wrong, np.uint32)
        message = f"input_row_offsets has size {wrong}, expected {count + 1}"
        refused(ValueError, message, batch.arguments(offsets=offsets), kinds=2)
    for wrong in (count - 1, count + 1):
        table = np.zeros((wrong, batch.table.shape[1]), np.uint32)
        message = f"lookup_table has size {wrong}, expected {count}"
        refused(ValueError, message, batch.arguments(table=table), kinds=2)
    layer = np.array([batch.layers], np.uint32)
    message = f"layer {batch.layers}; the cache has {batch.layers} layers"
    refused(IndexError, message, batch.arguments(layer=layer), kinds=2)
    last = max(number for number, length in enumerate(batch.lengths) if length)
    end = batch.cached[last] + batch.lengths[last] - 1
    table = batch.table.copy()
    table[last, end // batch.page_size] = batch.pages
    message = f"page {batch.pages} at position"
    refused(IndexError, message, batch.arguments(table=table), kinds=2)
    table = np.ascontiguousarray(batch.table[:, : end // batch.page_size])
    if all(b + c <= table.shape[1] * batch.page_size
           for b, c, n in zip(batch.lengths, batch.cached, range(count), strict=True) if n != last and b):  # fmt: skip
        message = f"sequence {last}: position"
        refused(IndexError, message, batch.arguments(table=table), kinds=2)


@pytest.mark.parametrize(("kinds", "given"), [(1, 0), (2, 0), (2, 1)])
def test_a_cache_without_values_is_no_cache_of_both(kinds: int, given: int) -> None:
    message = f"the cache has {given} kinds of pages of 2 tokens, expected {kinds}"
    refused(ValueError, message, Batch(random.Random(1), 2).arguments(given), kinds=kinds)
    if kinds == 2:  # the default
        refused(ValueError, message, Batch(random.Random(1), 2).arguments(given), look_up_two_kinds)


@pytest.mark.parametrize("total", [0, 3])
def test_pages_of_no_tokens(total: int) -> None:
    batch = Batch(random.Random(2), 1)
    batch.lengths, batch.cached = [total, 0], [0, 0]
    batch.table = np.zeros((2, 3), np.uint32)
    blocks = np.zeros((2, 2, 1, 0, 1, 1), np.float32)
    layer = np.zeros(1, np.uint32)
    message = "the cache has 2 kinds of pages of 0 tokens, expected 2 (keys, values) of 1 or more"
    refused(ValueError, message, batch.arguments(blocks=blocks, layer=layer), kinds=2)
