"""Counts of a cache's use, and the greatest lengths of a batch."""

from __future__ import annotations

import numpy as np
import pytest

from max import nn
from max.dtype import DType
from max.nn.kv_cache import KVCacheMetrics, build_max_lengths_tensors


def test_counts_are_added() -> None:
    assert nn.KVCacheMetrics is KVCacheMetrics
    total = KVCacheMetrics(3, 1, disk_bytes_read=7) + KVCacheMetrics(input_tokens=2, cache_tokens=4)
    assert total == KVCacheMetrics(5, 5, disk_bytes_read=7)
    assert (total.prompt_tokens, total.cache_hit_rate) == (10, 0.5)
    assert KVCacheMetrics().cache_hit_rate == 0 and KVCacheMetrics(3, 1).cache_hit_rate == 0.25
    assert sum([total, total], KVCacheMetrics()).cache_tokens == 10
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = total + 3


def test_greatest_lengths() -> None:
    assert nn.build_max_lengths_tensors is build_max_lengths_tensors
    for lengths in ((4, 10), (0, (1 << 32) - 1), (np.int64(3), 3)):
        buffers = build_max_lengths_tensors(*lengths)
        assert [(b.dtype, b.shape) for b in buffers] == [(DType.uint32, (1,))] * 2
        assert [b.to_numpy().tolist() for b in buffers] == [[n] for n in lengths]
    for wrong in (-1, 1 << 32):
        with pytest.raises(OverflowError, match=rf"max_cache_length is {wrong}, expected a uint32"):
            build_max_lengths_tensors(1, wrong)
    for wrong in (1.5, True, "3"):
        with pytest.raises(TypeError, match="max_prompt_length is .* expected an integer"):
            build_max_lengths_tensors(wrong, 3)
