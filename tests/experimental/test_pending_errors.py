"""Errors of runs that the program did not ask for: they stay with their tensors."""

from __future__ import annotations

import numpy as np
import pytest

from max.experimental import Tensor
from max.experimental import functional as F
from max.experimental.record.recorder import PENDING_CALLS


def out_of_range(x: Tensor) -> Tensor:
    """A tensor whose computation fails."""
    return F.gather(x, Tensor(np.array([7])), axis=0)


def values() -> np.ndarray:
    return np.arange(5, dtype=np.float32)


def test_a_write_does_not_raise_the_error_of_a_tensor_that_is_not_needed() -> None:
    x = Tensor(values())
    bad, good = out_of_range(x), x + 1
    bad_next = bad * 2
    x[0] = 50
    assert good.to_numpy().tolist() == [1, 2, 3, 4, 5], (
        "computed with the elements before the write"
    )
    assert x.to_numpy().tolist() == [50, 1, 2, 3, 4]
    for tensor in (bad, bad_next, bad, bad_next - 1):
        with pytest.raises(IndexError, match=r"index 7 is out of range.*test_pending_errors\.py"):
            tensor.to_numpy()


def test_elements_that_are_written_later_do_not_mend_a_tensor() -> None:
    """Its value is that of the elements at the call: an error."""
    x, index = Tensor(values()), Tensor(np.array([7]))
    bad = F.gather(x, index, axis=0)
    index[0] = 1
    with pytest.raises(IndexError, match="index 7 is out of range"):
        bad.to_numpy()
    assert F.gather(x, index, axis=0).to_numpy().tolist() == [1]


@pytest.mark.parametrize("repeats", [1, 4])
def test_a_full_record_does_not_raise(repeats: int) -> None:
    """Repeated, the calls are those of a trace."""
    for _ in range(repeats):
        x = Tensor(values())
        bad, y = out_of_range(x), x
        for _ in range(2 * PENDING_CALLS + 5):
            y = y + 1
        assert y.to_numpy().tolist() == (values() + 2 * PENDING_CALLS + 5).tolist()
        with pytest.raises(IndexError, match="index 7 is out of range"):
            bad.to_numpy()


def test_a_write_to_a_tensor_that_cannot_be_computed_raises() -> None:
    bad = out_of_range(Tensor(values()))
    with pytest.raises(IndexError, match="index 7 is out of range"):
        bad[0] = 1
