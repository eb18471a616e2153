"""Kernels of several phases wait where a phase reads what another worker writes: one worker is always late."""

from __future__ import annotations

import copy
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from max._backends.cpu.kernels.indexing import nonzero, sorting
from max._backends.cpu.kernels.products import row_norms
from max.kernel.interpreter import interpret
from tests.cpu_kernels.harness import interpreted
from tests.cpu_kernels.test_interpreted import CASES
from tests.tolerance import assert_close

LATE = 0.01
"""Seconds by which a worker is late: the other one needs less for a phase."""
Case = tuple[str, list[np.ndarray], list[tuple[Any, tuple[int, ...]]], dict[str, Any]]
OTHERS: dict[str, Case] = {
    "nonzero of several chunks": (
        "mo.nonzero",
        [np.isin(np.arange(18), [3, 4, 17]), np.array(3)],
        [(np.int64, (3, 1))],
        {},
    ),
    "argsort of several runs": (
        "mo.argsort",
        [np.arange(41) * 7 % 41],
        [(np.int64, (41,))],
        {"axis": 0, "ascending": True},
    ),
}
"""With `CHUNK` and `MIN_RUN` of 4."""


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(
    "name",
    [
        "scatter", "scatter_nd", "resize", "nonzero of several chunks", "argsort of several runs",
        "norm and packed_matmul rows bfloat16, 2 rows",
    ],
)  # fmt: skip
def test_a_late_worker(name: str, late: int, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each phase is the work of one worker, in turns, while the other one goes on as far as it may."""
    monkeypatch.setattr(nonzero, "CHUNK", 4)
    monkeypatch.setattr(sorting, "MIN_RUN", 4)
    monkeypatch.setattr(row_norms, "SMALL_ELEMENTS", 4)
    symbol, operands, results, attributes = (CASES | OTHERS)[name]
    expected = interpreted(symbol, copy.deepcopy(operands), results, attributes)

    class Turns(interpret.RunContext):
        def _chunks(self, total: int, grain: int, multiple: int) -> Iterator[tuple[int, int]]:
            if (next(self._phases) + first) % self.num_workers == self.worker:
                self._wait()
                numbers = defaultdict[int, Iterator[int]](itertools.count)
                # all shares
                yield from self._chunks_of_worker(
                    total, grain, multiple, lambda share: next(numbers[share])
                )

        def barrier(self) -> None:
            super().barrier()
            self._wait()

        def _wait(self) -> None:
            if self.worker == late:
                time.sleep(LATE)

    monkeypatch.setattr(interpret, "RunContext", Turns)
    got = interpreted(symbol, copy.deepcopy(operands), results, attributes, workers=2)
    for ours, theirs in zip(got, expected, strict=True):
        assert_close(ours, theirs)
