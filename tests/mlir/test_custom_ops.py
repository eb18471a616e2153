"""`mo.custom` is for kernels that users register: ops of the library are ops of the dialect, which are verified."""

from __future__ import annotations

import ast
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "max"
STAGES_CUSTOM_OPS = {
    "graph/ops/control/custom.py": "the functions for users",
    "experimental/tensors/custom_ops.py": "the same for eager tensors",
    "torch/_library.py": "kernels of a user, as operations of PyTorch",
    "experimental/tensors/further_functions.py": "the functions for users",
    "experimental/tensors/bits.py": "bits of eager tensors, by kernels that it registers",
    "entrypoints/load_test/bandwidth.py": "a probe of the memory's speed, by a kernel that it registers",
    "experimental/array_api/factorizations.py": "factorizations of matrices, by kernels that it registers",
}
"""The files that stage `mo.custom`, and for what."""


def stages_custom_ops(path: Path) -> bool:
    """Whether a file names a function that stages an op by the name of its kernel, or the op itself."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(ast.Name("ops"), "custom" | "inplace_custom"):
                return True
            case ast.Call(
                ast.Attribute(_, "stage" | "stage_effect"), [ast.Constant("mo.custom"), *_]
            ):
                return True
            case _:
                pass
    return False


def test_library_ops_are_ops_of_the_dialect() -> None:
    found = {
        path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py") if stages_custom_ops(path)
    }
    assert found == {*STAGES_CUSTOM_OPS}


def test_each_kernel_function_of_layers_stages_ops_of_the_dialect() -> None:
    """`max.nn` registers no kernels."""
    for path in (SRC / "nn").rglob("*.py"):
        assert "@k.register" not in path.read_text(), path
