"""Each kernel reads and writes nothing outside of its tensors: they lie between pages that cannot be touched."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from tests.guarded import Margins
from tests.kernels.harness import Runner, run
from tests.kernels.test_interpreted import CASES
from tests.tolerance import assert_close

OTHERS = [pytest.param(machine, marks=pytest.mark.long) for machine in ("avx2", "generic")]


@pytest.mark.parametrize("machine", ["host", *OTHERS])
@pytest.mark.parametrize("name", CASES)
def test_nothing_outside_is_touched(name: str, machine: str) -> None:
    symbol, operands, results, attributes = CASES[name]
    ours = copy.deepcopy(operands)
    want = run(symbol, ours, results, attributes, machine=machine)
    for end in (True, False):
        margins = Margins()
        runner = Runner(symbol, operands, results, attributes, machine=machine, margins=margins, end=end)  # fmt: skip
        got = runner()
        margins.check()
        for have, expected in zip([*got, *runner.operands], [*want, *ours], strict=True):
            if have.dtype.kind in "iub":
                np.testing.assert_array_equal(have, expected)
            else:
                assert_close(have, expected)
