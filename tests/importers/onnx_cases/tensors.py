"""Cases of indexing, products, convolutions, pooling, norms, images, signals and quantized ops."""

from __future__ import annotations

import numpy as np
import torch

from tests.importers.onnx_cases.case import Case, Draw, case


@case(
    "Gather",
    "GatherElements",
    "GatherND",
    "Scatter",
    "ScatterElements",
    "ScatterND",
    "TensorScatter",
)
def indexed(draw: Draw, name: str) -> Case:
    x = draw.floats(4, 3, 5)
    axis = draw.axis(3)
    size = x.shape[axis]
    match name:
        case "Gather":
            return Case([x, draw.ints(*draw.shape(0, 2), low=-size, high=size - 1)], {"axis": axis})
        case "GatherElements":
            shape = [2 if i == axis % 3 else n for i, n in enumerate(x.shape)]
            indices = draw.ints(*shape, low=-size, high=size - 1)
            # the reference evaluator refuses the last axis by the number -1
            expected = np.take_along_axis(x, indices, axis)
            return Case([x, indices], {"axis": axis}, expected=expected)
        case "GatherND":
            return Case([x, draw.ints(2, 2, low=-3, high=2)])
        case "ScatterND":
            places = draw.rng.permutation(4)[:3].reshape(3, 1)
            return Case(
                [x, places, draw.floats(3, 3, 5)],
                {"reduction": draw.choice(["none", "add", "max"])},
            )
        case "TensorScatter":
            cache, update = draw.floats(2, 3, 6, 4), draw.floats(2, 3, 2, 4)
            starts = draw.ints(2, low=0, high=4)
            y = cache.copy()
            for row, start in enumerate(starts):
                y[row, :, start : start + 2] = update[row]
            return Case([cache, update, starts], version=24, expected=y)
        case _:
            places = np.stack([draw.rng.permutation(size)[:2] for _ in range(6)])
            places = np.moveaxis(places.reshape(2, 3, 2), 2, axis)
            shape = tuple(min(a, b) for a, b in zip(places.shape, x.shape, strict=True))
            places = places[tuple(slice(n) for n in shape)]
            updates = draw.floats(*shape)
            if name == "Scatter":
                y = x.copy()
                for place in np.ndindex(*shape):
                    target = list(place)
                    target[axis] = places[place]
                    y[tuple(target)] = updates[place]
                return Case([x, places, updates], {"axis": axis}, version=10, expected=y)
            reduction = draw.choice(["none", "add", "mul"])
            return Case([x, places, updates], {"axis": axis, "reduction": reduction}, version=18)


@case(
    "Slice",
    "Pad",
    "OneHot",
    "NonZero",
    "Compress",
    "ReverseSequence",
    "Trilu",
    "DepthToSpace",
    "SpaceToDepth",
    "Det",
)
def moved(draw: Draw, name: str) -> Case:
    x = draw.floats(4, 6, 5)
    match name:
        case "Slice":
            step = draw.choice([1, 2, -1, -2])
            bounds = [
                np.array([draw.int(-7, 7)]),
                np.array([draw.int(-7, 7)]),
                np.array([draw.axis(3)]),
                np.array([step]),
            ]
            return Case([x, *bounds], constant=(1, 2, 3, 4))
        case "Pad":
            mode = draw.choice(["constant", "reflect", "edge", "wrap"])
            pads = draw.ints(6, low=0, high=3)
            return Case([x, pads, np.float32(1.5)], {"mode": mode}, constant=(1, 2))
        case "OneHot":
            return Case(
                [draw.ints(3, 2, low=-4, high=3), np.array(4), draw.floats(2)],
                {"axis": draw.axis(3)},
                constant=(1,),
            )
        case "NonZero":
            return Case([draw.ints(*draw.shape(1), low=0, high=1)])
        case "Compress":
            return Case([x, draw.bools(5)], {"axis": 2})
        case "ReverseSequence":
            return Case([x, draw.ints(6, low=1, high=4)])
        case "Trilu":
            return Case([x, np.array(draw.int(-3, 3))], {"upper": draw.int(0, 1)}, constant=(1,))
        case "DepthToSpace":
            return Case(
                [draw.floats(2, 8, 3, 2)],
                {"blocksize": 2, "mode": draw.choice(["DCR", "CRD"])},
                version=13,
            )
        case "SpaceToDepth":
            return Case([draw.floats(2, 3, 4, 6)], {"blocksize": 2}, version=13)
        case _:
            return Case([draw.floats(2, 3, 3)], rtol=1e-3)


@case("MatMul", "Gemm", "Einsum", "MatMulInteger")
def products(draw: Draw, name: str) -> Case:
    match name:
        case "MatMul":
            lead = draw.choice([(), (2,), (2, 3)])
            return Case([draw.floats(*lead, 3, 5), draw.floats(5, 4)], rtol=1e-3)
        case "Gemm":
            attrs = {
                "alpha": 0.5,
                "beta": draw.choice([0.0, 1.0, 2.0]),
                "transA": draw.int(0, 1),
                "transB": draw.int(0, 1),
            }
            a, b = draw.floats(3, 5), draw.floats(5, 4)
            operands = [
                a.T.copy() if attrs["transA"] else a,
                b.T.copy() if attrs["transB"] else b,
                draw.floats(4),
            ]
            return Case(operands, attrs, rtol=1e-3)
        case "Einsum":
            equation, shapes = draw.choice(
                [
                    ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]), ("ij->ji", [(3, 4)]), ("ii->i", [(3, 3)]),
                    ("i,j->ij", [(3,), (4,)]), ("...ij,...jk->...ik", [(2, 3, 4), (4, 5)]),
                    ("bhid,bhjd->bhij", [(1, 2, 3, 4)] * 2),
                    ("ijk->", [(2, 3, 4)]), ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 2)]), ("ij,ij", [(3, 4)] * 2),
                ]
            )  # fmt: skip
            return Case(
                [draw.floats(*shape) for shape in shapes], {"equation": equation}, rtol=1e-3
            )
        case _:
            a, b = (
                draw.ints(3, 5, low=0, high=255, dtype=np.uint8),
                draw.ints(5, 4, low=0, high=255, dtype=np.uint8),
            )
            return Case([a, b, np.uint8(120), np.uint8(9)])


@case("Conv", "ConvTranspose", "ConvInteger", "DeformConv", "Col2Im")
def convolutions(draw: Draw, name: str) -> Case:
    n = draw.int(1, 2)
    groups = draw.choice([1, 2])
    attrs = {
        "strides": [draw.int(1, 2) for _ in range(n)], "dilations": [draw.int(1, 2) for _ in range(n)],
        "pads": [draw.int(0, 2) for _ in range(2 * n)], "group": groups,
    }  # fmt: skip
    x = draw.floats(2, 4, *[draw.int(6, 9) for _ in range(n)])
    taps = [draw.int(1, 3) for _ in range(n)]
    match name:
        case "Conv":
            if draw.int(0, 3) == 0:
                attrs.pop("pads")
                attrs.update(auto_pad=draw.choice(["SAME_UPPER", "VALID"]), dilations=[1] * n)
            return Case([x, draw.floats(6, 4 // groups, *taps), draw.floats(6)], attrs, rtol=1e-3)
        case "ConvTranspose":
            return Case(
                [x, draw.floats(4, 3, *taps), draw.floats(3)], {**attrs, "group": 1}, rtol=1e-3
            )
        case "ConvInteger":
            image = draw.ints(1, 2, 6, 7, low=0, high=255, dtype=np.uint8)
            weight = draw.ints(3, 2, 2, 3, low=0, high=255, dtype=np.uint8)
            return Case([image, weight, np.uint8(7)], {"pads": [1, 0, 0, 1]})
        case "DeformConv":
            image, weight = draw.floats(1, 2, 5, 5), draw.floats(3, 2, 2, 2)
            return Case(
                [image, weight, draw.floats(1, 8, 4, 4), draw.floats(3)], rtol=1e-3, version=19
            )
        case _:
            return Case(
                [draw.floats(1, 2 * 4, 9), np.array([4, 4]), np.array([2, 2])],
                constant=(1, 2),
                rtol=1e-3,
            )


@case(
    "MaxPool",
    "AveragePool",
    "LpPool",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "GlobalLpPool",
    "MaxUnpool",
)
def pools(draw: Draw, name: str) -> Case:
    n = draw.int(1, 3)
    x = draw.floats(2, 3, *[draw.int(5, 7) for _ in range(n)])
    if name == "GlobalLpPool":
        y = (np.abs(x) ** 3).reshape(2, 3, -1).sum(2) ** (1 / 3)
        return Case([x], {"p": 3}, expected=y.reshape(2, 3, *[1] * n).astype(np.float32), version=2)
    if name.startswith("Global"):
        axes = tuple(range(2, x.ndim))
        reduced = (
            x.max(axes, keepdims=True) if name == "GlobalMaxPool" else x.mean(axes, keepdims=True)
        )
        return Case([x], version=1, expected=reduced)
    if name == "MaxUnpool":
        y = np.zeros((1, 1, 4, 4), np.float32)
        places = np.array([[[[5, 7], [13, 15]]]])
        values = draw.floats(1, 1, 2, 2)
        y.flat[places.reshape(-1)] = values.reshape(-1)
        return Case(
            [values, places], {"kernel_shape": [2, 2], "strides": [2, 2]}, expected=y, version=11
        )
    kernel = [draw.int(1, 3) for _ in range(n)]
    attrs = {"kernel_shape": kernel, "strides": [draw.int(1, 2) for _ in range(n)]}
    attrs["pads"] = [size // 2 for size in kernel] * 2
    if name == "AveragePool":
        attrs["count_include_pad"] = draw.int(0, 1)
    outputs = 2 if name == "MaxPool" and n == 2 and draw.bool() else 1
    return Case([x], attrs, outputs, version=18 if name == "LpPool" else 12, rtol=1e-3)


@case(
    *(
        "BatchNormalization",
        "InstanceNormalization",
        "LayerNormalization",
        "GroupNormalization",
        "RMSNormalization",
    ),
)
def norms(draw: Draw, name: str) -> Case:
    x = draw.floats(2, 4, 3, 5)
    match name:
        case "BatchNormalization":
            return Case([x, *(draw.floats(4, low=0.2) for _ in range(4))], version=15, rtol=1e-3)
        case "InstanceNormalization":
            return Case([x, draw.floats(4), draw.floats(4)], version=6, rtol=1e-3)
        case "LayerNormalization":
            axis = draw.int(1, 3)
            rest = x.shape[axis:]
            return Case(
                [x, draw.floats(*rest), draw.floats(*rest)],
                {"axis": axis},
                draw.choice([1, 3]),
                17,
                rtol=1e-3,
            )
        case "GroupNormalization":
            scale, bias = draw.floats(4), draw.floats(4)
            parts = x.reshape(2, 2, -1)
            y = (parts - parts.mean(2, keepdims=True)) / np.sqrt(parts.var(2, keepdims=True) + 1e-5)
            y = y.reshape(x.shape) * scale[:, None, None] + bias[:, None, None]
            return Case([x, scale, bias], {"num_groups": 2}, expected=y, rtol=1e-3)
        case _:
            scale = draw.floats(5)
            y = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale
            return Case([x, scale], version=23, expected=y, rtol=1e-3)


@case("Resize", "Upsample", "GridSample", "RoiAlign", "NonMaxSuppression")
def images(draw: Draw, name: str) -> Case:
    x = draw.floats(1, 2, 4, 5)
    match name:
        case "Resize":
            mode = draw.choice(["nearest", "linear", "cubic"])
            transform = draw.choice(
                ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]
            )
            attrs = {"mode": mode, "coordinate_transformation_mode": transform}
            if draw.bool():
                sizes = np.array([1, 2, draw.int(2, 9), draw.int(2, 9)])
                return Case([x, None, None, sizes], attrs, constant=(3,), version=19, rtol=1e-3)
            scales = np.array([1, 1, draw.choice([0.6, 2.0]), 1.5], np.float32)
            return Case([x, None, scales], attrs, constant=(2,), version=19, rtol=1e-3)
        case "Upsample":
            y = x.repeat(2, 2).repeat(3, 3)
            return Case(
                [x, np.array([1, 1, 2, 3], np.float32)], version=9, constant=(1,), expected=y
            )
        case "GridSample":
            attrs = {
                "mode": draw.choice(["linear", "nearest", "cubic"]),
                "padding_mode": draw.choice(["zeros", "border", "reflection"]), "align_corners": draw.int(0, 1),
            }  # fmt: skip
            grid = draw.floats(1, 3, 2, 2, low=-1.2, high=1.2)
            y = None
            if (attrs["mode"], attrs["padding_mode"]) == ("cubic", "border"):
                # the reference evaluator moves the place to the border, not each of its 16 neighbors as torch and
                # ONNX Runtime do
                y = torch.nn.functional.grid_sample(
                    torch.from_numpy(x), torch.from_numpy(grid), "bicubic", "border",
                    bool(attrs["align_corners"]),
                ).numpy()  # fmt: skip
            return Case([x, grid], attrs, version=20, rtol=1e-3, expected=y)
        case "RoiAlign":
            rois = np.array([[0, 0, 3, 2], [1, 1, 4, 3]], np.float32)
            attrs = {
                "output_height": 2,
                "output_width": 3,
                "sampling_ratio": 2,
                "mode": draw.choice(["avg", "max"]),
            }
            return Case([x, rois, np.array([0, 0])], attrs, version=16, rtol=1e-3)
        case _:
            corners = np.sort(draw.floats(1, 6, 2, 2, low=0, high=1), 2).reshape(1, 6, 4)
            limits = [np.array([3]), np.array([0.4], np.float32), np.array([0.1], np.float32)]
            return Case([corners, draw.floats(1, 2, 6, low=0, high=1), *limits], version=11)


@case("DFT", "STFT", "HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix")
def signals(draw: Draw, name: str) -> Case:
    match name:
        case "DFT":
            x = draw.floats(2, 6, 1)
            y = np.fft.fft(x[..., 0], axis=1)
            return Case(
                [x],
                version=17,
                expected=np.stack([y.real, y.imag], -1).astype(np.float32),
                rtol=1e-3,
            )
        case "STFT":
            x, window = draw.floats(1, 12), draw.floats(4)
            parts = np.stack([x[0, i : i + 4] * window for i in range(0, 9, 2)])
            y = np.fft.rfft(parts)[None]
            expected = np.stack([y.real, y.imag], -1).astype(np.float32)
            return Case(
                [x, np.array(2), window], version=17, constant=(1,), expected=expected, rtol=1e-3
            )
        case "MelWeightMatrix":
            numbers = [np.array(n) for n in (8, 16, 8192)]
            return Case(
                [*numbers, np.float32(0), np.float32(4096)], version=17, constant=(0, 1, 2, 3, 4)
            )
        case _:
            return Case(
                [np.array(draw.int(2, 9))], {"periodic": draw.int(0, 1)}, version=17, constant=(0,)
            )


@case("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearMatMul", "QLinearConv")
def quantized(draw: Draw, name: str) -> Case:
    scale, zero = np.float32(0.03), np.uint8(120)
    codes = lambda *shape: draw.ints(*shape, low=0, high=255, dtype=np.uint8)  # noqa: E731
    match name:
        case "QuantizeLinear":
            if draw.bool():
                return Case([draw.floats(2, 3, 4), draw.floats(3, low=0.01, high=0.1), codes(3)])
            return Case(
                [draw.floats(2, 3, 4), scale, draw.choice([np.int8(-3), zero, np.int16(5)])]
            )
        case "DequantizeLinear":
            if draw.bool():
                return Case(
                    [codes(4, 6), draw.floats(2, 6, low=0.1), codes(2, 6)],
                    {"axis": 0, "block_size": 2},
                )
            return Case([codes(2, 3, 4), draw.floats(3, low=0.1), codes(3)], {"axis": 1})
        case "DynamicQuantizeLinear":
            return Case([draw.floats(3, 5)], {}, 3)
        case "QLinearMatMul":
            operands = [
                codes(3, 4),
                scale,
                zero,
                codes(4, 5),
                scale,
                np.uint8(7),
                np.float32(0.2),
                np.uint8(9),
            ]
            return Case(operands, rtol=1.01)
        case _:
            weight = [codes(3, 2, 2, 2), scale, np.uint8(100)]
            return Case(
                [codes(1, 2, 5, 5), scale, zero, *weight, np.float32(0.2), np.uint8(9)], rtol=1.01
            )


@case("LSTM", "GRU", "RNN")
def recurrent(draw: Draw, name: str) -> Case:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[name]
    hidden, size = 3, 4
    length = draw.choice([1, 4, 11])
    attrs = {"hidden_size": hidden}
    if name == "GRU":
        attrs["linear_before_reset"] = draw.int(0, 1)
    weights = [draw.floats(1, gates * hidden, n, low=-1, high=1) for n in (size, hidden)]
    bias = draw.floats(1, 2 * gates * hidden, low=-1, high=1)
    inputs = [draw.floats(length, 2, size), *weights, bias]
    return Case(inputs, attrs, 2, version=14, rtol=1e-3)
