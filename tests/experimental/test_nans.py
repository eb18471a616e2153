"""`MAX_DEBUG_NANS`: an error at the line of the op that makes the first NaN."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from max._config import flags
from max.driver import CPU
from max.dtype import DType
from max.experimental import Tensor
from max.experimental import functional as F
from max.graph import DeviceRef, TensorType
from max.nn.module_v3 import Linear


@pytest.fixture(autouse=True)
def checked():
    with flags.override(MAX_DEBUG_NANS=True):
        yield


def test_the_first_nan_raises() -> None:
    x = Tensor([[1.0, 2.0], [0.0, -3.0]])
    y = x * 2.0
    with pytest.raises(
        FloatingPointError, match=r"log: 1 of float32 \[2, 2\] are NaN, the first at \[1, 1\]"
    ) as error:
        line = sys._getframe().f_lineno + 1
        F.log(y)
    assert f"{__file__}:{line}" in str(error.value)


@pytest.mark.parametrize("dtype", [DType.float32, DType.float64, DType.float16, DType.bfloat16])
def test_dtypes(dtype: DType) -> None:
    zero = Tensor.zeros((3,), dtype=dtype)
    with pytest.raises(FloatingPointError, match="div: 3 of"):
        zero / zero


def test_nans_of_inputs_do_not_raise() -> None:
    infinite = Tensor([1.0]) / 0.0
    assert infinite.item() == np.inf
    given = Tensor.from_dlpack(np.array([np.nan, 1.0], np.float32))
    assert np.isnan((given + 1.0).to_numpy()).tolist() == [True, False]
    assert Tensor([1, 2], dtype=DType.int32).sum(0).item() == 3


def test_compiled_modules_are_not_checked_inside() -> None:
    class Root(Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return F.sqrt(x)

    compiled = Root(1, 1).compile(TensorType(DType.float32, ["n"], DeviceRef.from_device(CPU())))
    assert np.isnan(compiled(Tensor([-1.0])).to_numpy()).all()


def test_without_the_flag_nothing_raises() -> None:
    with flags.override(MAX_DEBUG_NANS=False):
        assert np.isnan(F.log(Tensor([-1.0])).item())
