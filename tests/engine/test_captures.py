"""Keys of captured executions, without models."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from max.driver import Tensor
from max.engine.run.captures import Capture, Captures, checked_keys

INPUTS = [Tensor.from_numpy(np.zeros(1, np.float32))]
LARGEST = (1 << 64) - 1


def capture() -> Capture:
    return Capture(cast("Any", None), cast("Any", None), (), INPUTS, [])


@pytest.mark.parametrize("keys", [0, 1, LARGEST, [0], (3, 0, LARGEST), range(3), []])
def test_keys(keys: Any) -> None:
    assert checked_keys(keys, INPUTS) == ((keys,) if isinstance(keys, int) else tuple(keys))
    with pytest.raises(ValueError, match="no input buffers"):
        checked_keys(keys, [])


@pytest.mark.parametrize("keys", [None, 1.0, {1}, iter([1]), [1, True], [True, 1], [1, "2"], "1"])
def test_what_is_no_key(keys: Any) -> None:
    with pytest.raises(TypeError, match="graph_keys is .*expected an int or a sequence of ints"):
        checked_keys(keys, INPUTS)


@pytest.mark.parametrize("keys", [-1, LARGEST + 1, [0, -1], [LARGEST + 1, 0]])
def test_keys_out_of_range(keys: Any) -> None:
    with pytest.raises(ValueError, match="does not fit into 64 bits"):
        checked_keys(keys, INPUTS)


def test_all_keys_have_one_capture() -> None:
    captures, one, two = Captures("m"), capture(), capture()
    captures.add([1, 2], one)
    captures.add([3], two)
    assert captures.find(1, INPUTS) is captures.find([2, 1], INPUTS) is one
    assert captures.find((3, 3), INPUTS) is two
    for keys in ([1, 3], [3, 1], [1, 1, 3], [1, 4], [4, 1], 4, []):
        with pytest.raises(RuntimeError, match="m: no graph has been captured for"):
            captures.find(keys, INPUTS)
    captures.add([1], two)
    assert captures.find([1, 3], INPUTS) is two and captures.find(2, INPUTS) is one
    captures.clear()
    with pytest.raises(RuntimeError, match="for 2; call capture first"):
        captures.find(2, INPUTS)
