"""Convolution layers against torch: both layouts, groups, strides, all forms of padding."""

from __future__ import annotations

import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, ShardingStrategy, TensorType, Weight, ops
from max.nn import (
    Conv1D,
    Conv1DV1,
    Conv2d,
    Conv2dV1,
    Conv3D,
    Conv3DV1,
    ConvTranspose1d,
    LayerList,
    Module,
    WeightNormConvTranspose1d,
)

torch = pytest.importorskip("torch")
F = torch.nn.functional

REF = DeviceRef.CPU()
F32 = DType.float32
session = InferenceSession(devices=[CPU()])


def run(layer: Module, x: np.ndarray, symbols: bool = False) -> tuple[np.ndarray, dict]:
    rng = np.random.default_rng(sum(x.shape))
    state = {
        name: rng.standard_normal([int(d) for d in w.shape]).astype(np.float32)
        for name, w in layer.raw_state_dict().items()
    }
    layer.load_state_dict(state)
    shape = ["n", *x.shape[1:]] if symbols else x.shape
    graph = Graph("conv", layer, input_types=[TensorType(F32, shape, REF)])
    return session.load(graph, weights_registry=layer.state_dict()).execute(x)[0].to_numpy(), state


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def last(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(x, 1, -1))


CASES_1D = [
    dict(kernel_size=3),
    dict(kernel_size=4, stride=2, padding=1),
    dict(kernel_size=3, padding=(2, 1), dilation=2),
    dict(kernel_size=1, num_groups=2),
    dict(kernel_size=5, num_groups=4, padding=4),
]
CASES_2D = [
    dict(kernel_size=3),
    dict(kernel_size=(3, 2), padding=(1, 2)),
    dict(kernel_size=3, padding=(1, 2, 3, 0), stride=2),
    dict(kernel_size=2, stride=(2, 3), dilation=(1, 2), num_groups=2),
    dict(kernel_size=4, stride=4),
]
CASES_3D = [
    dict(depth=2, height=3, width=1),
    dict(depth=2, height=2, width=2, stride=2, padding=1, num_groups=2),
    dict(depth=1, height=3, width=3, padding=(0, 1, 1), dilation=(1, 2, 1)),
]


def reference(options: dict, x: np.ndarray, filter: np.ndarray, bias: np.ndarray) -> np.ndarray:
    spatial = x.ndim - 2
    padding = options.get("padding", 0)
    padding = (padding,) * spatial if isinstance(padding, int) else padding
    if len(padding) == spatial:
        padding = [p for n in padding for p in (n, n)]
    # torch orders paddings from the last axis
    pairs = [padding[2 * i : 2 * i + 2] for i in range(spatial)][::-1]
    padded = F.pad(torch.tensor(x), [int(p) for pair in pairs for p in pair])
    conv = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    return conv(
        padded,
        torch.tensor(filter),
        torch.tensor(bias),
        stride=options.get("stride", 1),
        dilation=options.get("dilation", 1),
        groups=options.get("num_groups", 1),
    ).numpy()


@pytest.mark.parametrize("permute", [False, True])
@pytest.mark.parametrize(
    ("cls", "shape", "options"),
    [
        *((Conv1D, (2, 4, 11), o) for o in CASES_1D),
        *((Conv2d, (2, 4, 10, 9), o) for o in CASES_2D),
        *((Conv3D, (2, 4, 3, 7, 6), o) for o in CASES_3D),
    ],
)
def test_convolutions_equal_those_of_torch(cls, shape, options, permute) -> None:
    layer = cls(
        in_channels=4,
        out_channels=8,
        dtype=F32,
        device=REF,
        has_bias=True,
        permute=permute,
        **options,
    )
    x = images(*shape)
    got, state = run(layer, x if permute else last(x))
    assert set(state) == {"weight", "bias"}
    filter = state["weight"]
    if not permute:
        spatial = range(filter.ndim - 2)
        filter = filter.transpose(filter.ndim - 1, filter.ndim - 2, *spatial)
    want = reference(options, x, filter, state["bias"])
    np.testing.assert_allclose(got, want if permute else last(want), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("permute", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("length", "stride", "padding", "output_padding", "dilation"),
    [(3, 1, 0, 0, 1), (4, 2, 1, 0, 1), (3, 2, 1, 1, 1), (3, 3, 0, 0, 2), (1, 1, 0, 0, 1)],
)
def test_transposed_convolutions_equal_those_of_torch(
    length, stride, padding, output_padding, dilation, norm, permute
) -> None:
    cls = WeightNormConvTranspose1d if norm else ConvTranspose1d
    layer = cls(
        length,
        4,
        6,
        F32,
        stride,
        padding,
        dilation,
        output_padding,
        REF,
        has_bias=True,
        permute=permute,
    )
    x = images(2, 4, 7)
    got, state = run(layer, x if permute else last(x))
    if norm:
        assert set(state) == {"weight_g", "weight_v", "bias"}
    key = "weight_v" if norm else "weight"
    filter = state[key] if permute else state[key].transpose(2, 1, 0)
    if norm:
        lengths = np.sqrt((filter**2).sum((1, 2), keepdims=True))
        filter = state["weight_g"] * filter / lengths
    want = F.conv_transpose1d(
        torch.tensor(x), torch.tensor(filter), torch.tensor(state["bias"]), stride, padding,
        output_padding, 1, dilation,
    ).numpy()  # fmt: skip
    np.testing.assert_allclose(got, want if permute else last(want), rtol=1e-4, atol=1e-4)


def test_a_symbolic_batch() -> None:
    x = images(3, 8, 8, 2)
    got, state = run(Conv2d(3, 2, 5, F32, padding=1), x, symbols=True)
    want = reference(
        dict(padding=1),
        np.moveaxis(x, -1, 1),
        state["weight"].transpose(3, 2, 0, 1),
        np.zeros(5, np.float32),
    )
    np.testing.assert_allclose(got, last(want), rtol=1e-4, atol=1e-4)


def test_values_instead_of_weights() -> None:
    sequence, image, volume = images(2, 9, 4), images(2, 7, 6, 4), images(1, 4, 5, 6, 4)
    filters = [images(3, 4, 5), images(3, 2, 4, 5), images(2, 3, 2, 4, 5)]
    bias = images(5)

    def forward(x, y, z):
        a, b, c = (ops.constant(f, F32, REF) for f in filters)
        return (
            Conv1DV1(a, ops.constant(bias, F32, REF), stride=2, padding=1)(x),
            Conv2dV1(b, padding=(1, 0), stride=2)(y),
            Conv3DV1(c, padding=1)(z),
        )

    types = [TensorType(F32, x.shape, REF) for x in (sequence, image, volume)]
    results = session.load(Graph("v1", forward, input_types=types)).execute(sequence, image, volume)
    options = [dict(stride=2, padding=1), dict(stride=2, padding=(1, 0)), dict(padding=1)]
    biases = [bias, np.zeros(5, np.float32), np.zeros(5, np.float32)]
    for result, x, f, o, b in zip(
        results, (sequence, image, volume), filters, options, biases, strict=True
    ):
        filter = f.transpose(f.ndim - 1, f.ndim - 2, *range(f.ndim - 2))
        want = reference(o, np.moveaxis(x, -1, 1), filter, b)
        np.testing.assert_allclose(result.to_numpy(), last(want), rtol=1e-4, atol=1e-4)


def test_names_of_weights() -> None:
    class Stem(Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Conv2d(3, 3, 8, F32, has_bias=True)
            self.rest = LayerList(
                [Conv1D(3, 8, 8, F32, name="conv"), WeightNormConvTranspose1d(2, 8, 4, F32)]
            )

        def __call__(self, x):
            return x

    assert sorted(Stem().raw_state_dict()) == [
        "first.bias", "first.weight", "rest.0.conv.weight", "rest.1.weight_g", "rest.1.weight_v",
    ]  # fmt: skip


def test_replicas() -> None:
    layer = Conv2d(3, 4, 8, F32, has_bias=True, device=REF)
    with pytest.raises(ValueError, match="no sharding strategy"):
        layer.shard([REF])
    layer.sharding_strategy = ShardingStrategy.replicate(2)
    shards = layer.shard([DeviceRef.CPU(0), DeviceRef.CPU(1)])
    assert [s.device for s in shards] == [DeviceRef.CPU(0), DeviceRef.CPU(1)]
    assert all(s.filter.shape == layer.filter.shape and s.stride == (1, 1) for s in shards)
    with pytest.raises(ValueError, match="expected replicate"):
        layer.sharding_strategy = ShardingStrategy.rowwise(2)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Conv2d(3, 4, 6, F32, num_groups=4), "4 groups do not divide"),
        (lambda: Conv2d(3, 4, 6, F32, padding=(1, 2, 3)), "padding is .*, expected"),
        (lambda: Conv2d((3, 3, 3), 4, 6, F32), "kernel_size is .* 2 of them"),
        (lambda: Conv3D(1, 1, 1, 4, 6, F32, stride=(1, 1)), "stride is .* 3 of them"),
        (lambda: Conv1D(3, 4, 6, F32, padding=(1, 2, 3)), "padding is"),
        (lambda: ConvTranspose1d(3, 4, 6, F32, padding=(1, 2)), "padding is .* 4 of them"),
        (lambda: ConvTranspose1d(3, 4, 6, F32, stride=(1, 2, 3)), "stride is .* or two"),
    ],
)
def test_arguments_that_do_not_fit(make, said) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("layer", "shape", "said"),
    [
        (
            Conv2d(3, 4, 6, F32),
            (1, 4, 8, 8),
            r"Conv2d: .*4 channels, channels last \(permute=False\)",
        ),
        (Conv2d(3, 4, 6, F32, permute=True), (1, 8, 8, 4), r"channels second \(permute=True\)"),
        (Conv1D(3, 4, 6, F32), (1, 2, 8, 4), "expected rank 3"),
        (ConvTranspose1d(3, 4, 6, F32), (1, 2, 8, 4), "expected rank 3"),
    ],
)
def test_inputs_that_do_not_fit(layer, shape, said) -> None:
    with pytest.raises(ValueError, match=said):
        Graph("conv", layer, input_types=[TensorType(F32, shape, REF)])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("permute", [False, True])
def test_shards_keep_their_strategy(bias: bool, permute: bool) -> None:
    cpus = [DeviceRef.CPU(), DeviceRef.CPU(1)]
    layer = Conv2d(3, 8, 16, F32, device=REF, has_bias=bias, permute=permute)
    layer.sharding_strategy = strategy = ShardingStrategy.replicate(2)
    assert layer.filter.sharding_strategy == layer.sharding_strategy == strategy
    for shard, device in zip(layer.shard(cpus), cpus, strict=True):
        assert shard.device == device
        assert shard.filter.sharding_strategy == shard.sharding_strategy == strategy
        assert list(shard.filter.shape) == list(layer.filter.shape)
        weights = [w for w in (layer.bias, shard.bias) if isinstance(w, Weight)]
        assert [w.sharding_strategy for w in weights] == [strategy] * (2 * bias)
