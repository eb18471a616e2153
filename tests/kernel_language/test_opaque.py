"""`k.opaque`: an integer that optimizations do not see through."""

from __future__ import annotations

import re

import numpy as np
import pytest

from max import kernel as k
from max._backends.cpu.runtime.llvm_compiler import Compiler, Machine
from tests.kernel_language.harness import compiled, interpreted


@k.kernel
def add_twice(out: k.Output, x: k.Input, *, again: bool):
    for i in range(x.shape[0]):
        at = k.opaque(i) if again else i
        out[i] = x[i] * 2.0 + x[at] * 3.0


@k.kernel
def square(out: k.Output, x: k.Input, *, again: bool):
    out[0] = x[0] * x[k.opaque(0) if again else 0]


@pytest.mark.parametrize("run", [compiled, interpreted])
@pytest.mark.parametrize("again", [False, True])
def test_the_value_is_that_of_the_integer(run, again: bool) -> None:
    x = np.random.default_rng(0).standard_normal(37).astype(np.float32)
    out = np.zeros_like(x)
    run(add_twice, [out, x], {"again": again})
    np.testing.assert_allclose(out, 5 * x, rtol=1e-6)


@pytest.mark.plain_code
def test_an_element_is_loaded_again() -> None:
    target = k.CPUTarget(frozenset({"avx2", "fma"}), "x86_64-unknown-linux-gnu", "znver3")
    loads: list[int] = []
    for again in (False, True):
        specs = [k.TensorSpec(k.f32, (37,))] * 2
        ir = k.specialize(square, args=specs, params={"again": again}, target=target)
        code = Compiler(Machine.of(target)).assembly(k.emit_llvm(ir, target))
        loads.append(len(re.findall(r"\bv\w+ss\s+\S*\(%r", code)))
    assert loads == [1, 2]


def test_other_values_are_refused() -> None:
    def wrong(out: k.Output):
        out[0] = k.opaque(1.5)

    with pytest.raises(k.KernelError, match=r"integer"):
        k.specialize(k.kernel(wrong), args=[k.TensorSpec(k.f32, (1,))], target=k.host_target())
