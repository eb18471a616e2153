"""What describes the inputs and outputs of models: equality, texts, and sizes that are refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from max.dtype import DType
from max.engine import MojoValue, TensorSpec, TorchInputSpec

pytestmark = pytest.mark.any_target


def test_specs_are_equal_where_all_parts_are() -> None:
    parts = list(product([None, [], [2, None], [2, 3]], [DType.float32, DType.bool], ["x", "y"]))
    specs = [TensorSpec(*part) for part in parts]
    for (i, first), (j, second) in product(enumerate(specs), enumerate(specs)):
        assert (first == second) == (i == j)
    assert len(set(specs) | {TensorSpec(*part) for part in parts}) == len(parts)
    assert specs[0] != parts[0]


def test_texts_of_classes_have_the_documented_path() -> None:
    for kind in (TensorSpec, TorchInputSpec, MojoValue):
        assert str(kind) == f"<class 'max.engine.{kind.__name__}'>"


@pytest.mark.parametrize(
    ("shape", "text"), [([2, None, 3], "2x-1x3xint8"), ([7], "7xint8"), (None, "unknownxint8")]
)
def test_texts_of_specs(shape: Any, text: str) -> None:
    spec = TensorSpec(shape, DType.int8, "tokens")
    assert str(spec) == text and (spec.shape, spec.dtype, spec.name) == (
        shape,
        DType.int8,
        "tokens",
    )
    assert repr(spec) == f"TensorSpec(shape={shape}, dtype={DType.int8}, name=tokens)"


def test_a_spec_keeps_its_shape() -> None:
    given: list[int | None] = [2, None]
    spec = TensorSpec(given, DType.int8, "x")
    shape = spec.shape
    assert shape is not None
    given.append(5)
    shape.append(6)
    assert spec.shape == [2, None]


@pytest.mark.parametrize("shape", [None, [], [0], [3, "n", None], ("n",)])
def test_inputs_of_other_frameworks(shape: Any) -> None:
    spec = TorchInputSpec(shape, DType.float16, "cpu")
    assert spec.shape == (None if shape is None else list(shape))
    assert (spec.dtype, spec.device) == (DType.float16, "cpu")
    assert repr(spec) == f"TorchInputSpec(shape={spec.shape}, dtype={DType.float16})"


@pytest.mark.parametrize("size", [-1, 2.0, True, b"n", [3]])
def test_sizes_that_are_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="expected sizes, names or None"):
        TorchInputSpec([2, size])
