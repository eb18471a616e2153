"""Functions and arguments of later releases on tensors, eager and in graphs, against NumPy and torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from max.driver import CPU
from max.dtype import DType
from max.experimental import Tensor, random
from max.experimental import functional as F
from max.experimental import tensor as tensor_module
from max.graph import BufferType, BufferValue, DeviceRef, Dim, TensorType, TensorValue, ops
from max.nn import kernels
from max.nn.module_v3 import Module


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    "args", [(5,), (2, 9), (2, 9, 3), (9, 2, -2), (0.0, 1.0, 0.25), (3, 3), (1.5, -2.0, -0.7)]
)
def test_arange(args: tuple[float, ...]) -> None:
    want = np.arange(*args)
    for function in (F.arange, Tensor.arange):
        np.testing.assert_array_equal(function(*args).to_numpy(), want.astype(np.float32))
    if want.dtype.kind == "i":
        got = F.arange(*args, dtype=DType.int16, device=CPU(), out_dim=len(want))
        assert got.dtype is DType.int16
        np.testing.assert_array_equal(got.to_numpy(), want)
    with pytest.raises(ValueError, match="never"):
        F.arange(*args, out_dim=len(want) + 1)


def test_creation_like_a_tensor(rng: np.random.Generator) -> None:
    like = Tensor.from_dlpack(rng.integers(0, 9, (3, 5)).astype(np.int16))
    for made, value in (
        (F.full_like(like, 7), 7),
        (F.full_like(input=like, value=7), 7),
        (Tensor.full_like(like.type, 7), 7),
        (F.ones_like(like), 1),
        (F.zeros_like(input=like), 0),
    ):
        assert made.dtype is DType.int16
        np.testing.assert_array_equal(made.to_numpy(), np.full((3, 5), value))
    rows = Tensor.range_like(input=like).to_numpy()
    np.testing.assert_array_equal(rows, np.broadcast_to(np.arange(5), (3, 5)))
    with pytest.raises(TypeError, match="input and type are one argument"):
        F.zeros_like(like, input=like, type=like)


def test_random_numbers() -> None:
    like = Tensor.zeros((200, 101))
    for made in (F.uniform((200, 101), (2, 5)), F.uniform_like(like, (2, 5))):
        x = made.to_numpy()
        assert x.shape == (200, 101) and x.min() >= 2 and x.max() < 5
        assert abs(x.mean() - 3.5) < 0.03
    for made in (F.normal((200, 101), 3.0, 2.0), F.gaussian_like(like, 3.0, 2.0)):
        x = made.to_numpy()
        assert abs(x.mean() - 3) < 0.06 and abs(x.std() - 2) < 0.06
    random.set_seed(value=4)
    first = F.gaussian((9,)).to_numpy()
    random.set_seed(4)
    np.testing.assert_array_equal(F.gaussian((9,)).to_numpy(), first)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_split_by_size(size: int, axis: int, rng: np.random.Generator) -> None:
    x = floats(rng, 5, 7)
    want = [part.numpy() for part in torch.split(torch.from_numpy(x), size, axis)]
    tensor = Tensor.from_dlpack(x)
    for parts in (
        F.split(tensor, split_size_or_sections=size, axis=axis),
        tensor.split(size, axis),
    ):
        assert len(parts) == len(want)
        for part, array in zip(parts, want, strict=True):
            np.testing.assert_array_equal(part.to_numpy(), array)


def test_split_refuses_sizes() -> None:
    for size in (0, -1):
        with pytest.raises(ValueError, match="split: parts of size"):
            Tensor.ones((3,)).split(size)


def test_keywords(rng: np.random.Generator) -> None:
    x = floats(rng, 3, 5)
    tensor = Tensor.from_dlpack(x)
    np.testing.assert_array_equal(
        F.where(cond=tensor > 0, x=tensor, y=0.0).to_numpy(), np.maximum(x, 0)
    )
    for moved in (
        tensor.to(target=CPU()),
        F.transfer_to(tensor, target=DeviceRef.CPU()),
        F.stack([tensor, tensor], axis=0, device=CPU())[1],
    ):
        np.testing.assert_array_equal(moved.to_numpy(), x)
    np.testing.assert_allclose(tensor.prod(0).to_numpy(), x.prod(0, keepdims=True), rtol=1e-5)
    with pytest.raises(TypeError, match="cond and condition are one argument"):
        F.where(tensor > 0, x=tensor, y=0.0, cond=tensor > 0, condition=tensor > 0)


def test_defaults_of_window_and_range() -> None:
    got = F.hann_window(9)
    assert got.dtype is DType.float32
    np.testing.assert_allclose(got.to_numpy(), torch.hann_window(9).numpy(), atol=1e-6)
    wide = F.hann_window(9, periodic=False, dtype=DType.float64, device=CPU())
    np.testing.assert_allclose(wide.to_numpy(), np.hanning(9), atol=1e-12)
    np.testing.assert_array_equal(F.range(2, 7).to_numpy(), np.arange(2, 7, dtype=np.float32))


def test_complex_mul(rng: np.random.Generator) -> None:
    x, y = floats(rng, 4, 3, 2), floats(rng, 3, 2)
    want = (x.view(np.complex64) * y.view(np.complex64)).view(np.float32)
    got = F.complex_mul(Tensor.from_dlpack(x), Tensor.from_dlpack(y))
    np.testing.assert_allclose(got.to_numpy(), want.reshape(4, 3, 2), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="last axis of size 2"):
        F.complex_mul(Tensor.ones((3, 3)), Tensor.ones((3, 3)))


def test_shapes() -> None:
    sizes = F.shape_to_tensor((2, 5))
    assert sizes.dtype is DType.int64
    np.testing.assert_array_equal(sizes.to_numpy(), [2, 5])
    assert F.shape_to_tensor(()).to_numpy().shape == (0,)
    x = Tensor.ones((3, 2))
    assert F.rebind(x, (3, 2)).to_numpy().shape == (3, 2)
    with pytest.raises(ValueError, match="never 4"):
        F.rebind(x, (4, 2))


def test_print(capfd: pytest.CaptureFixture[str]) -> None:
    F.print(Tensor([[1.0, 2.5]]) * 2, "twice")
    F.print("a text", "label")
    out = capfd.readouterr().out
    assert "twice" in out and "2" in out and "5" in out and "a text" in out


def test_lazy_and_in_graph() -> None:
    with F.lazy():
        y = Tensor.ones((3,)) + 1
    assert not F.in_graph_context()
    np.testing.assert_array_equal(y.to_numpy(), [2, 2, 2])


class Collatz(Module):
    """Steps of the Collatz sequence until 1, and whether the start was even."""

    def __init__(self) -> None:
        self.three = Tensor.constant(3, dtype=DType.int64)

    def __call__(self, start: Tensor) -> tuple[Tensor, Tensor]:
        def step(n: Tensor, steps: Tensor) -> list[Tensor]:
            types = [n.type]
            (following,) = F.cond(n % 2 == 0, types, lambda: n // 2, lambda: n * self.three + 1)
            return [following, steps + 1]

        zero = start - start
        _, steps = F.while_loop([start, zero], lambda n, steps: n > 1, step)
        return steps, start % 2 == 0


def steps_of(n: int) -> int:
    steps = 0
    while n > 1:
        n, steps = n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1
    return steps


@pytest.mark.parametrize("start", [1, 6, 7, 27])
def test_control_flow(start: int) -> None:
    module = Collatz()
    compiled = module.compile(TensorType(DType.int64, [], DeviceRef.CPU()))
    x = Tensor.constant(start, dtype=DType.int64)
    for function in (module, compiled):
        steps, even = function(x)
        assert (steps.item(), even.item()) == (steps_of(start), start % 2 == 0)


def test_one_carried_tensor() -> None:
    (result,) = F.while_loop(Tensor.constant(1.0), lambda x: x < 100, lambda x: x * 3)
    assert result.item() == 243.0


def test_control_flow_checks_what_functions_return() -> None:
    x = Tensor.ones((2,))
    yes = Tensor.constant(True, dtype=DType.bool)
    with pytest.raises(TypeError, match="cond: the predicate is"):
        F.cond(x.sum(), [x.type], lambda: x, lambda: x)
    with pytest.raises(ValueError, match="expected rank 0"):
        F.cond(x > 0, [x.type], lambda: x, lambda: x)
    with pytest.raises(ValueError, match="then_fn returns 2 values, out_types has 1"):
        F.cond(yes, [x.type], lambda: [x, x], lambda: x)
    with pytest.raises(ValueError, match="result 0 of then_fn is"):
        F.cond(yes, [x.type], lambda: x.reshape((1, 2)), lambda: x)
    with pytest.raises(TypeError, match="result 0 of then_fn is 'no'"):
        F.cond(yes, [x.type], lambda: "no", lambda: x)
    assert F.cond(yes, None, lambda: None, lambda: None) == []
    with pytest.raises(ValueError, match="no initial values"):
        F.while_loop([], lambda: yes, lambda: [])
    with pytest.raises(ValueError, match="result 0 of body is"):
        F.while_loop(x, lambda x: x.sum()[0] < 9, lambda x: x.cast(DType.float64))


@pytest.mark.parametrize("name", ["sum", "mean", "prod", "argmax", "argmin", "max", "min"])
def test_reductions_of_all_elements(name: str, rng: np.random.Generator) -> None:
    for shape in ((3, 5), (4,), (2, 1, 3)):
        a = floats(rng, *shape)
        x = Tensor.from_dlpack(a)
        want = np.asarray(getattr(np, name)(a)).reshape(1)
        forms = (
            []
            if name in ("max", "min")
            else [getattr(F, name)(x, axis=None), getattr(F, name)(x, None)]
        )
        if name != "argmin":
            forms.append(getattr(x, name)(axis=None))
        for got in forms:
            np.testing.assert_allclose(got.to_numpy(), want, rtol=1e-5, atol=1e-6)
        last = getattr(F, name)(x).to_numpy()
        np.testing.assert_allclose(
            last, np.expand_dims(getattr(np, name)(a, -1), -1), rtol=1e-5, atol=1e-6
        )


def test_extrema_of_all_elements(rng: np.random.Generator) -> None:
    x = floats(rng, 3, 5)
    tensor = Tensor.from_dlpack(x)
    for function, method, reduced in ((F.max, np.maximum, x.max), (F.min, np.minimum, x.min)):
        np.testing.assert_array_equal(function(tensor, axis=None).to_numpy(), [reduced()])
        np.testing.assert_array_equal(
            function(tensor, axis=0).to_numpy(), reduced(0, keepdims=True)
        )
        np.testing.assert_array_equal(function(tensor).to_numpy(), reduced(axis=-1, keepdims=True))
        np.testing.assert_array_equal(function(tensor, 0.25).to_numpy(), method(x, 0.25))


def test_seed_is_an_integer() -> None:
    random.set_seed(np.int64(12))
    assert random.seed().dtype is DType.uint64 and random.seed().to_numpy().tolist() == [12]
    random.set_seed(-1)
    assert random.seed().item() == 2**64 - 1
    for wrong in (1.5, "4", None):
        with pytest.raises(TypeError, match="set_seed: the seed is .*, expected an integer"):
            random.set_seed(wrong)
    assert random.seed().item() == 2**64 - 1


def test_defaults_like_a_tensor() -> None:
    with tensor_module.defaults_like(Tensor.ones((2,), dtype=DType.int16)):
        assert Tensor.zeros((3,)).dtype is DType.int16
        assert Tensor.zeros((3,), dtype=DType.float64).dtype is DType.float64
    assert Tensor.zeros((3,)).dtype is DType.float32


def test_wrong_dtype_and_device() -> None:
    with pytest.raises(TypeError, match="the dtype is 'float32', expected a DType"):
        Tensor([1.0], dtype="float32")
    with pytest.raises(TypeError, match="the device is 'cpu', expected"):
        Tensor([1.0], device="cpu")


def test_names_of_dims_are_no_indices() -> None:
    x = Tensor.ones((2, 3))
    for index in ("a", slice("a", None), slice(None, "a")):
        with pytest.raises(ValueError, match="the dimension 'a' is unknown"):
            x[index]
    with pytest.raises(ValueError, match="the dimension 'a' is unknown"):
        x["a"] = 1.0


def test_functions_return_named_tuples() -> None:
    class Parts(NamedTuple):
        low: Any
        high: Any

    parts = F.functional(lambda x: Parts(x - 1, x + 1))
    for _ in range(3):
        found = parts(Tensor.ones((2,)))
        assert isinstance(found, Parts) and found.high.to_numpy().tolist() == [2.0, 2.0]
    (nested,) = F.functional(lambda x: [[x + 1, 3]])(Tensor.ones((2,)))
    assert nested[0].to_numpy().tolist() == [2.0, 2.0] and nested[1] == 3


def test_dims_as_tensors() -> None:
    for dim in (3, Dim(3), Dim(1) + 2):
        size = Tensor.from_dim(dim)
        assert size.dtype is DType.int64 and list(size.shape) == [] and size.item() == 3
    with pytest.raises(ValueError, match="from_dim: the size of n is not known outside of a graph"):
        Tensor.from_dim("n")

    class Scale(Module):
        def forward(self, x: Tensor) -> Tensor:
            few = Tensor.from_dim(x.shape[0]) <= 2
            return F.where(few, x * 2.0, x * 4.0)

    model = Scale().compile(TensorType(DType.float32, ["n", 2], DeviceRef.CPU()))
    for rows, factor in ((2, 2.0), (3, 4.0)):
        assert model(Tensor.ones((rows, 2))).to_numpy().tolist() == [[factor] * 2] * rows


def test_a_function_on_a_stream(rng: np.random.Generator) -> None:
    data = floats(rng, 3, 5)
    x = Tensor(data)
    (y,) = F.side_stream([x], lambda x: x * 2, result_types=[x.type])
    total, sign = F.side_stream([x, y], lambda x, y: (x + y, x > 0), stream_id=0)
    np.testing.assert_array_equal(total.to_numpy(), 3 * data)
    np.testing.assert_array_equal(sign.to_numpy(), data > 0)
    for body, types, stream, error, said in (
        (lambda x: x > 0, [x.type], 1, ValueError, "result 0"),
        (lambda x: (x, x), [x.type], 1, ValueError, "returns 2 values"),
        (lambda x: x, None, -1, ValueError, "stream_id is -1"),
        (lambda x: x, None, None, TypeError, "stream_id is None"),
    ):
        with pytest.raises(error, match=said):
            F.side_stream([x], body, result_types=types, stream_id=stream)  # pyright: ignore[reportArgumentType]


def test_values_of_annotated_parameters(rng: np.random.Generator) -> None:
    """In a graph a function of values of graphs gets these of tensors, as `max.nn.kernels` need them."""

    def add_to(total: BufferValue, x: TensorValue, tensor: Any) -> TensorValue:
        assert type(total) is BufferValue and type(x) is TensorValue and isinstance(tensor, Tensor)
        ops.buffer_store(total, ops.buffer_load(total) + x)
        return x * 2

    class Adding(Module):
        def __call__(self, total: Tensor, x: Tensor) -> Tensor:
            first = F.functional(add_to)(total, x, x)
            return F.functional(add_to)(tensor=x, x=first, total=total)

    cpu = DeviceRef.CPU()
    compiled = Adding().compile(
        BufferType(DType.float32, ("n",), cpu), TensorType(DType.float32, ("n",), cpu)
    )
    total, x = floats(rng, 5), floats(rng, 5)
    want = total + 3 * x
    np.testing.assert_array_equal(compiled(total, x).to_numpy(), 4 * x)
    np.testing.assert_allclose(total, want, rtol=1e-6)


def test_kernels_of_layers_on_tensors(rng: np.random.Generator) -> None:
    """A kernel of `max.nn.kernels`, which stages a custom op, eager and in a compiled module."""

    class Routed(Module):
        def __call__(self, ids: Tensor) -> Any:
            return list(F.functional(kernels.moe_create_indices)(ids, 3))

    ids = rng.integers(0, 3, 9).astype(np.int64)
    eager = Routed()(Tensor.from_dlpack(ids))
    compiled = Routed().compile(TensorType(DType.int64, ("n",), DeviceRef.CPU()))(ids)
    for part in (0, 4):
        np.testing.assert_array_equal(eager[part].to_numpy(), compiled[part].to_numpy())
    np.testing.assert_array_equal(eager[0].to_numpy(), np.argsort(ids, kind="stable"))


def test_tensors_as_bounds_of_slices_in_a_graph(rng: np.random.Generator) -> None:
    class Row(Module):
        def __call__(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            return x[(slice(at, at + 2), 2), :], x[at]

    cpu = DeviceRef.CPU()
    compiled = Row().compile(
        TensorType(DType.float32, ("n", 3), cpu), TensorType(DType.int64, (), cpu)
    )
    x = floats(rng, 5, 3)
    for at in (0, 3):
        rows, row = compiled(x, np.array(at))
        np.testing.assert_array_equal(rows.to_numpy(), x[at : at + 2])
        np.testing.assert_array_equal(row.to_numpy(), x[at])
    with pytest.raises(ValueError, match="slice"):
        compiled(x, np.array(4))
