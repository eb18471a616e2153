"""WeightData: construction, conversions, DLPack."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from max.driver import DLPackArray, Tensor
from max.dtype import DType
from max.graph.quantization import QuantizationEncoding
from max.graph.shape import Shape
from max.graph.weights import WeightData

FLOATS = [
    DType.float64, DType.float32, DType.float16, DType.bfloat16, DType.float8_e4m3fn,
    DType.float8_e5m2,
]  # fmt: skip


def test_from_numpy_shares() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16)
    data = WeightData.from_numpy(array, "w")
    assert (data.name, data.dtype, data.shape) == ("w", DType.bfloat16, Shape([2, 3]))
    assert data.quantization_encoding is None and isinstance(data, DLPackArray)
    array[1, 2] = 9
    assert torch.from_dlpack(data)[1, 2].item() == 9
    with pytest.raises(ValueError, match="unsupported NumPy dtype"):
        WeightData.from_numpy(np.array(["x"]), "w")


@pytest.mark.parametrize("old", FLOATS, ids=lambda d: d.name)
@pytest.mark.parametrize("new", FLOATS, ids=lambda d: d.name)
def test_astype_equals_torch(old: DType, new: DType) -> None:
    if new is DType.float8_e4m3fn and old is not new:
        bits = torch.linspace(
            -448, 448, 4001
        )  # out of range: torch saturates, IEEE conversion gives NaN
    else:
        bits = torch.arange(-(1 << 15), 1 << 15).short().view(torch.bfloat16).float()
    source = bits.to(old.to_torch())
    data = WeightData.from_numpy(Tensor.from_dlpack(source).to_numpy(), "w").astype(new)
    assert (data.dtype, data.name, data.shape) == (new, "w", Shape([bits.numel()]))
    found = torch.from_dlpack(data.data).double().numpy()
    # torch converts float8 through float32, as here; NaN payloads may differ
    expected = source.to(new.to_torch()).double().numpy()
    np.testing.assert_array_equal(found, expected)


def test_astype_others() -> None:
    data = WeightData.from_numpy(np.array([1, 2, 300]), "w")
    assert data.astype(DType.int64) is data
    assert Tensor.from_dlpack(data.astype(DType.uint8)).to_numpy().tolist() == [1, 2, 44]
    assert Tensor.from_dlpack(data.astype(DType.bfloat16))[2].item() == 300
    quantized = WeightData.from_numpy(np.zeros((2, 18), np.uint8), "w")
    quantized.quantization_encoding = QuantizationEncoding.Q4_0
    assert quantized.astype(DType.uint8) is quantized
    with pytest.raises(ValueError, match="weight 'w': its Q4_0 blocks cannot be converted"):
        quantized.astype(DType.float32)


def test_torch_and_numpy_as_data() -> None:
    for array in (torch.ones(3).bfloat16(), np.ones(3, ml_dtypes.bfloat16)):
        data = WeightData(array, "w", DType.bfloat16, Shape([3]))
        assert data.__dlpack_device__() == (1, 0)
        assert torch.from_dlpack(data).dtype is torch.bfloat16
        assert Tensor.from_dlpack(data.astype(DType.float32)).to_numpy().tolist() == [1, 1, 1]
