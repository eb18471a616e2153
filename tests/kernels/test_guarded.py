"""Each kernel reads and writes nothing outside of its tensors: they lie between pages that cannot be touched."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from tests.guarded import Margins
from tests.kernels.harness import Runner
from tests.kernels.test_interpreted import CASES
from tests.tolerance import assert_close

OTHERS = [pytest.param(machine, marks=pytest.mark.long) for machine in ("avx2", "generic")]


@pytest.mark.parametrize("machine", ["host", *OTHERS])
@pytest.mark.parametrize("name", CASES)
def test_nothing_outside_is_touched(name: str, machine: str) -> None:
    runner = Runner(*CASES[name], machine=machine)
    before = copy.deepcopy(runner.operands)
    want = [x.copy() for x in (*runner(), *runner.operands)]
    for end in (True, False):
        margins = Margins()
        runner.operands = before
        runner.place(margins, end)
        got = [*runner(), *runner.operands]
        margins.check()
        for have, expected in zip(got, want, strict=True):
            if have.dtype.kind in "iub":
                np.testing.assert_array_equal(have, expected)
            else:
                assert_close(have, expected)
