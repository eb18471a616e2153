"""Weights: sources, errors for weights of the wrong shape or dtype, reloading."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from max._config import flags
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.load.weight_casts import Caster
from max.engine.load.weights import WeightInfo, bind_weights
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.graph.weights import LaterCast, WeightData
from tests.engine.conftest import DEVICE, tensor
from tests.tolerance import assert_close


def linear(dtype: DType = DType.float32) -> Graph:
    with Graph("linear", input_types=[tensor("n", 3)]) as graph:
        w = Weight("w", dtype, (4, 3), DEVICE)
        b = Weight("b", dtype, (4,), DEVICE)
        x = graph.inputs[0].tensor
        graph.output(
            x @ ops.transpose(ops.cast(w, DType.float32), 0, 1) + ops.cast(b, DType.float32)
        )
    return graph


def layered(count: int) -> Graph:
    with Graph("layered", input_types=[tensor("n", 3)]) as graph:
        with graph.add_subgraph("layer", input_types=[tensor("n", 3)]) as layer:
            w = Weight("w", DType.float32, (3, 3), DEVICE)
            x = layer.inputs[0].tensor
            layer.output(x + ops.tanh(x @ w))
        x = graph.inputs[0].tensor
        for i in range(count):
            (x,) = (value.tensor for value in ops.call(layer, x, prefix=f"layers.{i}."))
        graph.output(x)
    return graph


W = np.arange(12, dtype=np.float32).reshape(4, 3)
B = np.arange(4, dtype=np.float32)


@pytest.mark.parametrize("kind", ["numpy", "torch", "tensor", "data", "strided", "read-only"])
def test_sources(session: InferenceSession, kind: str, rng: np.random.Generator) -> None:
    read_only = W.copy()
    read_only.flags.writeable = False
    made = {
        "numpy": W,
        "torch": torch.from_numpy(W.copy()),
        "tensor": Tensor.from_numpy(W.copy()),
        "data": WeightData.from_numpy(W.copy(), "w"),
        "strided": np.stack([W, W], -1)[..., 0],
        "read-only": read_only,
    }
    model = session.load(linear(), weights_registry={"w": made[kind], "b": B})
    x = rng.standard_normal((2, 3), np.float32)
    assert_close(model.execute(x)[0].to_numpy(), x @ W.T + B)


def test_weights_are_used_where_they_are(session: InferenceSession) -> None:
    w, b = W.copy(), B.copy()
    model = session.load(linear(), weights_registry={"w": w, "b": b})
    w[:] = 0
    b[:] = 7
    assert (model.execute(np.ones((1, 3), np.float32))[0].to_numpy() == 7).all()


def test_bfloat16_weights_are_converted_once(session: InferenceSession) -> None:
    w = W.astype(ml_dtypes.bfloat16)
    model = session.load(
        linear(DType.bfloat16), weights_registry={"w": w, "b": B.astype(ml_dtypes.bfloat16)}
    )
    assert len(model.kernel_summaries) == 1
    w[:] = 0
    assert_close(model.execute(np.ones((1, 3), np.float32))[0].to_numpy(), [W.sum(1) + B])


def test_errors_list_every_name(session: InferenceSession) -> None:
    with pytest.raises(ValueError, match="linear: .*2 missing: (w, b|b, w)"):
        session.load(linear())
    registry = {"w": W.T, "b": B.astype(np.float64), "extra": B, "more": B}
    with pytest.raises(ValueError) as caught:
        session.load(linear(), weights_registry=registry)
    for part in (
        "2 that the graph does not have: extra, more",
        "'w' is float32[3, 4], expected w: float32[4, 3]",
        "'b' is float64[4]",
    ):
        assert part in str(caught.value)
    extra = session.load(linear(), weights_registry={"w": W, "b": B, "extra": "no array"})
    assert_close(extra.execute(np.ones((1, 3), np.float32))[0].to_numpy(), [W.sum(1) + B])
    with pytest.raises(TypeError, match="a list, expected a mapping"):
        session.load(linear(), weights_registry=[("w", W), ("b", B)])
    with pytest.raises(TypeError, match="weight 'w'"):
        session.load(linear(), weights_registry={"w": "no array", "b": B})


def test_what_the_graph_does_not_take_is_not_read(session: InferenceSession) -> None:
    registry = {"w": W, "b": B, "tied": W, "step": 3}
    model = session.load(linear(), weights_registry=registry)
    x = np.ones((1, 3), np.float32)
    assert_close(model.execute(x)[0].to_numpy(), x @ W.T + B)


def test_equal_layers_compile_one_layer(
    session: InferenceSession, rng: np.random.Generator
) -> None:
    from max._compiler.stats import stats

    weights = {f"layers.{i}.w": rng.standard_normal((3, 3), np.float32) for i in range(30)}
    one = session.load(layered(1), weights_registry={"layers.0.w": weights["layers.0.w"]})
    before = stats.kernels
    model = session.load(layered(30), weights_registry=weights)
    assert stats.kernels - before == len(model._compiled.kernels) == 1
    assert len(model.kernel_summaries) == 30 * len(one.kernel_summaries)
    x = rng.standard_normal((5, 3), np.float32)
    want = x.astype(np.float64)
    for w in weights.values():
        want = want + np.tanh(want @ w)
    assert_close(model.execute(x)[0].to_numpy(), want, scale=10.0)
    with pytest.raises(ValueError, match=r"1 missing: layers\.2\.w"):
        session.load(
            layered(3),
            weights_registry={
                k: v for k, v in weights.items() if k in ("layers.0.w", "layers.1.w")
            },
        )


def test_reload(session: InferenceSession) -> None:
    model = session.load(linear(DType.bfloat16), weights_registry=_bf16(W, B))
    x = np.ones((1, 3), np.float32)
    model.capture(1, Tensor.from_numpy(x))
    model.reload(_bf16(W * 2, B))
    assert_close(model.execute(x)[0].to_numpy(), [2 * W.sum(1) + B])
    with pytest.raises(ValueError, match="1 missing: b"):
        model.reload({"w": W.astype(ml_dtypes.bfloat16)})
    assert_close(model.execute(x)[0].to_numpy(), [2 * W.sum(1) + B])
    with pytest.raises(RuntimeError, match="no graph has been captured"):
        model.replay(1, Tensor.from_numpy(x))


def _bf16(w: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    return {"w": w.astype(ml_dtypes.bfloat16), "b": b.astype(ml_dtypes.bfloat16)}


def test_capture_and_replay(session: InferenceSession) -> None:
    model = session.load(linear(), weights_registry={"w": W, "b": B})
    x = Tensor.from_numpy(np.ones((2, 3), np.float32))
    outputs = model.capture([1, 1], x)
    want = outputs[0].to_numpy().copy()
    x[:, :] = 2.0
    model.replay([1, 1], x)
    assert_close(outputs[0].to_numpy(), 2 * (want - B) + B)
    model.replay(1, Tensor.from_numpy(np.zeros((2, 3), np.float32)))
    assert_close(outputs[0].to_numpy(), [B, B])
    model.debug_verify_replay(1, x)
    with pytest.raises(ValueError, match="captured were"):
        model.replay(1, Tensor.from_numpy(np.zeros((3, 3), np.float32)))
    with pytest.raises(RuntimeError, match="does not match the captured graph"):
        model.debug_verify_replay(1, Tensor.from_numpy(np.zeros((3, 3), np.float32)))
    for keys, error in (
        ("a", TypeError),
        (1.5, TypeError),
        ([True], TypeError),
        (-1, ValueError),
        (1 << 64, ValueError),
    ):
        with pytest.raises(error):
            model.capture(keys, x)
    with pytest.raises(ValueError, match="no input buffers"):
        model.replay(1)
    with pytest.raises(RuntimeError, match="no graph has been captured for 5"):
        model.replay(5, x)


def test_sessions_default_to_the_cpu() -> None:
    assert InferenceSession().devices == [CPU()]


FLOATS = [DType.float32, DType.bfloat16, DType.float16]


def stored(dtype: DType, shape: tuple[int, ...], seed: int) -> WeightData:
    """A weight with numbers of all magnitudes, infinities, NaN, and ties between neighbors of a narrower dtype."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, shape, np.uint32)
    values = np.where(rng.random(shape) < 0.5, bits.view(np.float32), rng.standard_normal(shape))
    ties = (bits & np.uint32(0xFFFF0000) | np.uint32(0x8000)).view(np.float32)
    values = np.where(rng.random(shape) < 0.3, ties, values).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return WeightData.from_numpy(values.astype(dtype.to_numpy()), f"w{seed}")


def bits_of(array: np.ndarray) -> np.ndarray:
    """Returns the bits of floats, with one pattern for all NaNs."""
    same = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return same.view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize("target", FLOATS, ids=lambda d: d.name)
@pytest.mark.parametrize("source", [*FLOATS, DType.float64], ids=lambda d: d.name)
def test_weights_are_converted_at_load(source: DType, target: DType) -> None:
    """The bits equal those of NumPy and ml_dtypes; a product's weight is packed after its conversion."""
    weight = stored(source, (37, 65), 1) if source in FLOATS else WeightData.from_numpy(
        np.random.default_rng(2).standard_normal((37, 65)), "w"
    )  # fmt: skip
    vector = (
        stored(source, (65,), 3) if source in FLOATS else WeightData.from_numpy(np.ones(65), "v")
    )
    empty = WeightData.from_numpy(np.zeros((0, 65), source.to_numpy()), "e")
    with Graph("weights", input_types=[]) as graph:
        tensors = [
            Weight(name, target, value.shape, DeviceRef.CPU())
            for name, value in (("w", weight), ("v", vector), ("e", empty))
        ]
        graph.output(*(ops.reshape(tensor, tensor.shape) for tensor in tensors))
    later = {
        n: w.cast_at_load(target).data for n, w in (("w", weight), ("v", vector), ("e", empty))
    }
    outputs = InferenceSession(devices=[CPU()]).load(graph, weights_registry=later).execute()
    for value, out in zip((weight, vector, empty), outputs, strict=True):
        expected = Tensor.from_dlpack(value.astype(target).data).to_numpy()
        np.testing.assert_array_equal(bits_of(out.to_numpy()), bits_of(expected))
    # other readers get converted elements too
    read = Tensor.from_dlpack(weight.cast_at_load(target)).to_numpy()
    expected = Tensor.from_dlpack(weight.astype(target).data).to_numpy()
    np.testing.assert_array_equal(bits_of(read), bits_of(expected))


@pytest.mark.parametrize("guarded", [False, True])
def test_converted_weights_are_packed_and_used_as_they_are(guarded: bool) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((96, 64)).astype(np.float32)
    data = WeightData.from_numpy(values, "w")
    kind = TensorType(DType.bfloat16, ["n", 64], DeviceRef.CPU())
    with Graph("product", input_types=[kind]) as graph:
        w = Weight("w", DType.bfloat16, [96, 64], DeviceRef.CPU())
        # packed for the product, and read unpacked
        graph.output(
            graph.inputs[0].tensor @ w.T,
            ops.gather(w, ops.constant([3, 95], DType.int64, DeviceRef.CPU()), 0),
        )
    x = Tensor.from_numpy(rng.standard_normal((5, 64)).astype(DType.bfloat16.to_numpy()))
    session = InferenceSession(devices=[CPU()])
    results = []
    with flags.override(MAX_GUARD=guarded):
        for weight in (data.cast_at_load(DType.bfloat16), data.astype(DType.bfloat16)):
            model = session.load(graph, weights_registry={"w": weight.data})
            results.append([np.array(out.to_numpy().view(np.uint16)) for out in model.execute(x)])
            model.reload({"w": weight.data})
            results.append([np.array(out.to_numpy().view(np.uint16)) for out in model.execute(x)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_weight_that_is_converted_must_fit() -> None:
    with Graph("weights", input_types=[]) as graph:
        graph.output(ops.reshape(Weight("w", DType.bfloat16, [3], DeviceRef.CPU()), [3]))
    session = InferenceSession(devices=[CPU()])
    data = WeightData.from_numpy(np.ones(4, np.float32), "w")
    for wrong in (data.cast_at_load(DType.bfloat16), data.cast_at_load(DType.float16)):
        with pytest.raises(ValueError, match="expected w: bfloat16"):
            session.load(graph, weights_registry={"w": wrong.data})


@pytest.mark.parametrize(
    ("source", "target", "strided", "takes"),
    [
        (DType.float32, DType.bfloat16, False, True),
        (DType.float16, DType.float32, False, True),
        (DType.float32, DType.float32, False, True),
        (DType.float64, DType.float32, False, False),
        (DType.float32, DType.float64, False, False),
        (DType.float32, DType.bfloat16, True, False),
    ],
)
def test_casts_that_kernels_carry_out(
    source: DType, target: DType, strided: bool, takes: bool
) -> None:
    array = np.ones((6, 4), source.to_numpy())
    whole = Tensor.from_numpy(array)
    stored = whole[:, ::2] if strided else whole
    weight = LaterCast(stored, target, lambda: pytest.fail("read"))
    assert Caster.takes(weight) == takes


@pytest.mark.parametrize("takes", [True, False, None])
def test_what_is_cast_later_is_not_read(takes: bool | None) -> None:
    """Unless the caller does not cast such weights, or its type is not the declared one."""
    array = np.linspace(-3, 3, 6, dtype=np.float32)
    expected = array.astype(np.float16)
    reads: list[str] = []

    def read() -> Any:
        reads.append("read")
        return Tensor.from_numpy(expected)

    value = LaterCast(Tensor.from_numpy(array), DType.float16, read)
    asked: list[object] = []
    casts = None if takes is None else lambda each: bool(asked.append(each)) or takes
    (bound,) = bind_weights(
        "m", {"w": WeightInfo("w", DType.float16, (6,))}, {"w": value}, casts
    ).values()
    assert asked == [] if takes is None else asked == [value]
    if takes:
        assert bound is value and not reads
    else:
        assert isinstance(bound, Tensor) and reads
        np.testing.assert_array_equal(bound.to_numpy(), expected)
    for wrong in (WeightInfo("w", DType.float16, (5,)), WeightInfo("w", DType.bfloat16, (6,))):
        with pytest.raises(ValueError, match=r"'w' is float16\[6\], expected w: "):
            bind_weights("m", {"w": wrong}, {"w": value}, lambda each: True)


def test_declarations_that_are_no_weights(session: InferenceSession) -> None:
    with Graph("symbolic", input_types=[]) as graph:
        graph.output(ops.constant_external("w", tensor("n", 3)) + 1.0)
    with pytest.raises(ValueError, match=r"weight 'w' is .*n.*; the shape of a weight must be sta"):
        session.load(graph, weights_registry={"w": W})
    with Graph("twice", input_types=[]) as graph:
        first = ops.constant_external("w", tensor(4, 3))
        same = ops.constant_external("w", tensor(4, 3))
        graph.output(first + same)
    (result,) = session.load(graph, weights_registry={"w": W}).execute()
    np.testing.assert_array_equal(result.to_numpy(), 2 * W)
    with Graph("types", input_types=[]) as graph:
        for shape in ((4, 3), (3, 4)):
            sums = ops.sum(ops.constant_external("w", tensor(*shape)))
        graph.output(sums)
    with pytest.raises(
        ValueError, match=r"two weights of one name, w: float32\[4, 3\] and w: floa"
    ):
        session.load(graph, weights_registry={"w": W})


def test_pages_of_a_file_are_given_back_after_a_cast(session: InferenceSession) -> None:
    given = list[tuple[int, int]]()
    mapped: Any = SimpleNamespace(give_back=lambda *span: given.append(span))
    array = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    out = np.zeros((4, 6), np.float16)
    for rows in (0, 4):
        source = Tensor.from_numpy(array[:rows])
        weight = LaterCast(source, DType.float16, lambda: pytest.fail("read"))
        session._caster.convert(weight, out.ctypes.data, mapped)
        # nothing is cast, and no program made, for no elements
        assert given == [(array.ctypes.data, 4 * 6 * 4)] * (rows == 4)
    np.testing.assert_array_equal(out, array.astype(np.float16))
