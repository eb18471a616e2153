"""Whole programs with kernels in plain Python: ``MAX_KERNEL_INTERPRET=1``."""

from __future__ import annotations

import numpy as np
import pytest

from max import kernel as k
from max._config import flags
from tests.kernel_language import test_errors as errors
from tests.kernel_language import test_language as language
from tests.kernel_language.harness import compiled


@pytest.fixture(autouse=True)
def _interpret():
    with flags.override(MAX_KERNEL_INTERPRET=True):
        yield


@pytest.mark.parametrize("workers", [1, 2])
def test_launches_run_in_python(workers, capsys):
    text = """
    def show(out: k.Output[k.f32, 2], x: k.Input[k.f32, 2], n: k.i64, ctx: k.Context):
        for i in ctx.parallel(out.shape[0], 1):
            k.print("row {}", i)
            for j, m in k.vectors(n, 4):
                out.store(i, j, value=2.0 * x.load(i, j, width=4, mask=m), mask=m)
    """
    x = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    out = np.zeros((5, 7), np.float32)
    compiled(k.from_source(text, "show", {"k": k}), [out, x, np.int64(6)], {}, workers)
    np.testing.assert_array_equal(out[:, :6], 2 * x[:, :6])
    assert (out[:, 6] == 0).all()
    assert sorted(capsys.readouterr().out.split("\n")[:-1]) == [f"row {i}" for i in range(5)]


@pytest.mark.parametrize("workers", [1, 2])
def test_barriers_strides_and_scratch(workers):
    x = np.arange(40, dtype=np.float32)
    out, partial = np.zeros_like(x), np.zeros_like(x)
    compiled(language.two_phases, [out, partial, x], {}, workers)
    np.testing.assert_array_equal(out, x[::-1] * 2 + 1)
    turned = np.arange(12.0).reshape(3, 4).T
    copy = np.zeros((4, 3))
    compiled(language.copy_any, [copy, turned], {}, workers)
    np.testing.assert_array_equal(copy, turned)


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_reach_the_caller(workers):
    args = [np.zeros(5, np.float32), np.arange(5, dtype=np.float32), np.array([1, 2, 3, 9, 0])]
    with pytest.raises(IndexError, match="index 9 out of 5"):
        compiled(errors.gather, args, {}, workers)
    with pytest.raises(RuntimeError, match="phase 3, at 3"):
        compiled(errors.raises_before_a_barrier, [np.zeros(1, np.int64), np.int64(3)], {}, workers)
    compiled(errors.raises_before_a_barrier, [np.zeros(1, np.int64), np.int64(-1)], {}, workers)
