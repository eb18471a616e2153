"""Cases of element-wise ops, reductions and shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.importers.onnx_cases.case import Case, Draw, case

POSITIVE = {"Log", "Sqrt", "Reciprocal"}
UNIT = {"Acos", "Asin", "Atanh"}


@case(
    *(
        "Acos",
        "Asin",
        "Asinh",
        "Atan",
        "Atanh",
        "Ceil",
        "Cos",
        "Cosh",
        "Erf",
        "Exp",
        "Floor",
        "HardSwish",
        "Log",
    ),
    *(
        "Mish",
        "Neg",
        "Reciprocal",
        "Relu",
        "Round",
        "Sigmoid",
        "Sin",
        "Sinh",
        "Softplus",
        "Softsign",
        "Sqrt",
        "Tan",
    ),
    *("Tanh", "Acosh", "Sign", "Abs", "IsNaN", "IsInf", "Identity"),
)
def unary(draw: Draw, name: str) -> Case:
    low, high = (0.1, 3) if name in POSITIVE else (-0.9, 0.9) if name in UNIT else (-3, 3)
    low, high = (1.0, 9.0) if name == "Acosh" else (low, high)
    dtype = np.float32 if name in ("Mish", "Erf") else draw.float_type()
    x = draw.floats(*draw.shape(0), dtype=dtype, low=low, high=high)
    if name in ("IsNaN", "IsInf") and x.size:
        x = x.astype(np.float32)
        x.flat[0] = draw.choice([np.nan, np.inf, -np.inf])
    attrs = {"detect_negative": draw.int(0, 1)} if name == "IsInf" else {}
    return Case([x], attrs, version=22 if name in ("Mish", "HardSwish") else 20)


@case("LeakyRelu", "Elu", "Celu", "ThresholdedRelu")
def with_alpha(draw: Draw) -> Case:
    return Case(
        [draw.floats(*draw.shape())], {"alpha": float(draw.floats(low=0.1, high=2))}, version=16
    )


@case(
    "Selu",
    "HardSigmoid",
    "Shrink",
    "Swish",
    "Gelu",
    "LRN",
    "Hardmax",
    "Softmax",
    "LogSoftmax",
    "LpNormalization",
)
def with_attributes(draw: Draw, name: str) -> Case:
    x = draw.floats(*draw.shape(2, empty=False))
    number = lambda: float(draw.floats(low=0.2, high=2))  # noqa: E731
    match name:
        case "Selu":
            return Case([x], {"alpha": number(), "gamma": number()})
        case "HardSigmoid":
            return Case([x], {"alpha": number(), "beta": number()})
        case "Shrink":
            return Case([x], {"lambd": number(), "bias": number()})
        case "Swish":
            alpha = number()
            return Case([x], {"alpha": alpha}, version=24, expected=x / (1 + np.exp(-alpha * x)))
        case "Gelu":
            return Case([x], {"approximate": draw.choice(["none", "tanh"])}, rtol=1e-3)
        case "LRN":
            x, size = draw.floats(2, 5, 3, 2), draw.int(1, 5)
            y = np.empty_like(x)
            for channel in range(5):
                window = x[:, max(0, channel - (size - 1) // 2) : channel + size // 2 + 1]
                y[:, channel] = x[:, channel] / (2 + 0.3 / size * (window**2).sum(1)) ** 0.75
            return Case([x], {"size": size, "alpha": 0.3, "bias": 2.0}, expected=y)
        case "LpNormalization":
            return Case([x], {"axis": draw.axis(x.ndim), "p": draw.int(1, 2)})
        case _:
            return Case([x], {"axis": draw.axis(x.ndim)}, version=13)


@case(
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Pow",
    "PRelu",
    "Mod",
    "Less",
    "Greater",
    "GreaterOrEqual",
    "LessOrEqual",
    "Equal",
)
def binary(draw: Draw, name: str) -> Case:
    one, other = draw.pair()
    if name == "PRelu":
        one, other = max(one, other, key=lambda s: (len(s), np.prod(s))), (1,)
    dtype = (
        draw.float_type()
        if name in ("Pow", "PRelu") or draw.bool()
        else draw.choice([np.int32, np.int64])
    )
    if np.dtype(dtype).kind == "f":
        low = 0.3 if name == "Pow" else -3
        x, y = draw.floats(*one, dtype=dtype, low=low), draw.floats(*other, dtype=dtype, low=low)
    else:
        x, y = draw.ints(*one, dtype=dtype), draw.ints(*other, dtype=dtype)
    if name in ("Div", "Mod"):
        y = np.where(y == 0, 1, y).astype(dtype)
    fmod = name == "Mod" and (np.dtype(dtype).kind == "f" or draw.bool())
    expected = (
        np.trunc(x / y).astype(dtype) if name == "Div" and np.dtype(dtype).kind == "i" else None
    )
    return Case([x, y], {"fmod": 1} if fmod else {}, expected=expected, version=16)


@case("And", "Or", "Xor")
def logical(draw: Draw) -> Case:
    one, other = draw.pair()
    return Case([draw.bools(*one), draw.bools(*other)])


@case("Not")
def negation(draw: Draw) -> Case:
    return Case([draw.bools(*draw.shape(0))])


@case("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift", "BitwiseNot")
def bits(draw: Draw, name: str) -> Case:
    one, other = draw.pair()
    dtype = draw.choice([np.uint8, np.uint16, np.uint32, np.uint64])
    x, y = (
        draw.ints(*one, low=0, high=100, dtype=dtype),
        draw.ints(*other, low=0, high=7, dtype=dtype),
    )
    if name == "BitwiseNot":
        return Case([x])
    return Case([x, y], {"direction": draw.choice(["LEFT", "RIGHT"])} if name == "BitShift" else {})


@case("Max", "Min", "Sum", "Mean")
def variadic(draw: Draw, name: str) -> Case:
    one, other = draw.pair()
    x, y, z = draw.floats(*one), draw.floats(*other), draw.floats(1)
    expected = {
        "Max": lambda: np.maximum(np.maximum(x, y), z),
        "Min": lambda: np.minimum(np.minimum(x, y), z),
        "Sum": lambda: x + y + z,
        "Mean": lambda: (x + y + z) / np.float32(3),
    }[name]()
    return Case([x, y, z], expected=expected)


@case("Where")
def where(draw: Draw) -> Case:
    one, other = draw.pair()
    return Case([draw.bools(*one), draw.floats(*other), draw.floats(1)])


@case("Clip")
def clip(draw: Draw) -> Case:
    x = draw.ints(*draw.shape(), dtype=np.int32) if draw.bool() else draw.floats(*draw.shape())
    low = np.array(-1, x.dtype) if draw.bool() else None
    return Case([x, low, np.array(2, x.dtype)])


@case("Dropout")
def dropout(draw: Draw) -> Case:
    return Case([draw.floats(*draw.shape())], outputs=2)


REDUCTIONS = (
    *(
        "ReduceSum",
        "ReduceMean",
        "ReduceProd",
        "ReduceMax",
        "ReduceMin",
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSum",
    ),
    *("ReduceLogSumExp", "ReduceSumSquare"),
)


@case(*REDUCTIONS)
def reduction(draw: Draw, name: str) -> Case:
    x = draw.floats(*draw.shape(1, 4, empty=False), low=0.1 if name == "ReduceLogSum" else -2)
    axes = draw.rng.permutation(x.ndim)[: draw.int(1, x.ndim)] - (x.ndim if draw.bool() else 0)
    attrs = {"keepdims": draw.int(0, 1)}
    if draw.bool():
        return Case([x, axes.astype(np.int64)], attrs, version=18, constant=(1,))
    if name == "ReduceSum":
        return Case([x], attrs, version=13)
    return Case([x], {**attrs, "axes": axes.tolist()}, version=13)


@case("ArgMax", "ArgMin")
def arg(draw: Draw) -> Case:
    x = draw.ints(
        *draw.shape(1, empty=False), low=0, high=4, dtype=draw.choice([np.int32, np.float32])
    )
    attrs = {
        "axis": draw.axis(x.ndim),
        "keepdims": draw.int(0, 1),
        "select_last_index": draw.int(0, 1),
    }
    return Case([x], attrs)


@case("CumSum", "CumProd")
def cumulative(draw: Draw, name: str) -> Case:
    x = draw.floats(*draw.shape(1, empty=False))
    axis = draw.axis(x.ndim)
    exclusive, reverse = draw.int(0, 1), draw.int(0, 1)
    flipped = np.flip(x, axis) if reverse else x
    y = np.cumsum(flipped, axis) if name == "CumSum" else np.cumprod(flipped, axis)
    if exclusive:
        start = np.full_like(np.take(y, [0], axis), 0 if name == "CumSum" else 1)
        y = np.concatenate([start, np.take(y, range(y.shape[axis] - 1), axis)], axis)
    y = np.flip(y, axis) if reverse else y
    version = 26 if name == "CumProd" else 14
    attrs = {"exclusive": exclusive, "reverse": reverse}
    return Case(
        [x, np.array(axis)], attrs, constant=(1,), expected=y.astype(x.dtype), version=version
    )


@case("TopK")
def top_k(draw: Draw) -> Case:
    x = draw.rng.permutation(24).reshape(2, 4, 3).astype(np.float32)
    axis = draw.axis(3)
    k = draw.int(1, x.shape[axis])
    return Case([x, np.array([k])], {"axis": axis, "largest": draw.int(0, 1)}, 2, constant=(1,))


@case(
    "Shape",
    "Size",
    "Flatten",
    "Transpose",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Expand",
    "Tile",
    "Concat",
    "Split",
)
def shapes(draw: Draw, name: str) -> Case:
    x = draw.floats(2, 1, 3, 5)
    match name:
        case "Shape":
            return Case([x], {"start": draw.int(-4, 2)})
        case "Size":
            return Case([x])
        case "Flatten":
            return Case([x], {"axis": draw.int(-4, 4)})
        case "Transpose":
            return Case([x], {"perm": draw.rng.permutation(4).tolist()})
        case "Reshape":
            return Case(
                [x, np.array(draw.choice([[-1, 5], [0, 3, -1], [30], [5, 3, 2, 1]]))], constant=(1,)
            )
        case "Squeeze":
            return Case([x, np.array([draw.choice([1, -3])])], constant=(1,))
        case "Unsqueeze":
            return Case([x, np.array(draw.choice([[0, 2], [-1], [3, 0, 5]]))], constant=(1,))
        case "Expand":
            return Case(
                [x, np.array(draw.choice([[2, 4, 3, 1], [4, 1, 5], [2, 2, 4, 3, 5]]))],
                constant=(1,),
            )
        case "Tile":
            return Case([x, np.array([draw.int(1, 3) for _ in range(4)])], constant=(1,))
        case "Concat":
            axis = draw.axis(4)
            other = list(x.shape)
            other[axis] = draw.int(0, 3)
            return Case([x, draw.floats(*other), x], {"axis": axis})
        case _:
            sizes = [draw.int(0, 2), 1]
            return Case([x, np.array([*sizes, 5 - sum(sizes)])], {"axis": 3}, 3, constant=(1,))


@case("Constant")
def constant(draw: Draw) -> Case:
    kind = draw.choice(["value_floats", "value_ints", "value_int", "value_float"])
    value: Any = [1, 2, 3] if kind.endswith("s") else 4
    return Case([], {kind: value if "int" in kind else [1.5] * 3 if kind.endswith("s") else 2.5})


@case("ConstantOfShape", "EyeLike", "Range")
def generated(draw: Draw, name: str) -> Case:
    if name == "EyeLike":
        return Case([draw.floats(draw.int(1, 5), draw.int(1, 5))], {"k": draw.int(-2, 2)})
    if name == "ConstantOfShape":
        return Case([np.array(draw.shape(1))], constant=(0,))
    numbers = [draw.int(-5, 5), draw.int(-5, 9), draw.choice([1, 2, 3, -1, -2])]
    dtype = draw.choice([np.int64, np.float32])
    return Case([np.array(n, dtype) for n in numbers], constant=(0, 1, 2))


@case("Cast", "CastLike", "BitCast")
def casts(draw: Draw, name: str) -> Case:
    x = draw.floats(*draw.shape(), low=0, high=100)
    if name == "BitCast":
        return Case([x], {"to": 6}, version=26, expected=x.view(np.int32))
    if name == "CastLike":
        return Case([x, np.zeros(1, draw.choice([np.int32, np.float64, np.uint8]))], version=19)
    return Case([x], {"to": draw.choice([6, 7, 10, 11, 2, 9])})
