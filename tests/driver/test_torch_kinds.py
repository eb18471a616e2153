"""Tensors of torch that are no plain dense memory: their values, or an error that names the reason."""

from __future__ import annotations

import numpy as np
import pytest

from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.experimental.tensor import Tensor as EagerTensor
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def model():
    type_ = TensorType(DType.float32, ("n",), DeviceRef.CPU())
    return InferenceSession(devices=[CPU()]).load(
        Graph("copy", lambda x: [x.tensor + 0.0], [type_])
    )


class Subclass(torch.Tensor):
    pass


def readable(kind: str, values: np.ndarray):
    x = torch.from_numpy(values)
    match kind:
        case "negative bit":
            return torch.complex(torch.zeros_like(x), -x).conj().imag
        case "negative view":
            return torch._neg_view(-x)
        case "negative slice":
            return torch._neg_view(torch.cat([-x, x]))[: x.numel()]
        case "inference":
            with torch.inference_mode():
                return x.clone()
        case "subclass":
            return x.as_subclass(Subclass)
        case _:
            return torch.stack([x, x], 1)[:, 1]


READABLE = ["negative bit", "negative view", "negative slice", "inference", "subclass", "strided"]


@pytest.mark.parametrize("kind", READABLE)
def test_kinds_that_have_values(kind, model, rng):
    values = rng.standard_normal(5).astype(np.float32)
    tensor = readable(kind, values)
    (result,) = model.execute(tensor)
    np.testing.assert_array_equal(result.to_numpy(), values)
    np.testing.assert_array_equal(Tensor.from_dlpack(tensor).to_numpy(), values)
    np.testing.assert_array_equal(Tensor.from_dlpack(tensor, copy=True).to_numpy(), values)
    np.testing.assert_array_equal(EagerTensor.from_dlpack(tensor).to_numpy(), values)
    with Graph("constant") as graph:
        graph.output(ops.constant(tensor))
    (result,) = InferenceSession(devices=[CPU()]).load(graph).execute()
    np.testing.assert_array_equal(result.to_numpy(), values)


def test_a_negated_tensor_that_must_be_shared():
    tensor = torch._neg_view(torch.arange(4.0))
    with pytest.raises(BufferError, match="negative bit"):
        Tensor.from_dlpack(tensor, copy=False)
    type_ = BufferType(DType.float32, (4,), DeviceRef.CPU())
    with Graph("write", input_types=[type_]) as graph:
        buffer = graph.inputs[0].buffer
        buffer[...] = buffer[...] + 1.0
        graph.output()
    model = InferenceSession(devices=[CPU()]).load(graph)
    with pytest.raises(ValueError, match="negative bit.*resolve_neg"):
        model.execute(tensor)
    model.execute(resolved := tensor.resolve_neg())
    assert resolved.tolist() == [1.0, 0.0, -1.0, -2.0]


REFUSED = {
    "conjugate bit": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "gradient": lambda: torch.ones(3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "compressed": lambda: torch.ones(2, 2).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "meta": lambda: torch.ones(3, device="meta"),
    "opaque": lambda: torch.ones(3).to_mkldnn(),
    "without memory": lambda: torch._efficientzerotensor(3),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_kinds_that_are_refused(kind, model):
    if kind == "opaque" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    tensor = REFUSED[kind]()
    for call in (Tensor.from_dlpack, EagerTensor.from_dlpack, model.execute):
        with pytest.raises((BufferError, ValueError, TypeError)) as error:
            call(tensor)
        assert str(error.value)
