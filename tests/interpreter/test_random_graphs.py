"""Random graphs: staged, verified, written, read again, and evaluated against plain NumPy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from max import _interpreter, mlir
from tests.ops.random_graphs import Program, programs
from tests.tolerance import assert_close


@given(programs(), st.integers(0, 1 << 32))
def test_interpreter_against_numpy(program: Program, seed: int) -> None:
    inputs = program.inputs(np.random.default_rng(seed))
    graph = program.stage(symbolic=bool(seed % 2))
    module = graph.to_mlir()
    mlir.verify_module(module)
    again = mlir.parse_module(str(module), mlir.resources(module))
    assert again.is_structurally_equivalent(module) and str(again) == str(module)
    expected = program.evaluate(inputs)
    for module_ in (module, again, mlir.clone_module(module)):
        outputs = _interpreter.run(module_, inputs)
        for out, want in zip(outputs, expected, strict=True):
            assert_close(out, want, "float32", scale=8.0)
