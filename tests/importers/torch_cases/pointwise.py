"""Cases of ops that work element by element, and of those that create tensors."""

from __future__ import annotations

import torch

from tests.importers.torch_cases.case import Case, Draw, case


def two(draw: Draw, name: str, kinds: str = "fib") -> list:
    """Two operands that broadcast, of equal or different types; a number as the second of scalar ops."""
    shape = draw.shape()

    def one(kind: str, sizes: tuple[int, ...]) -> torch.Tensor:
        if kind == "f":
            return draw.floats(*sizes, dtype=draw.choice([torch.float32, torch.float64]))
        if kind == "b":
            return draw.bools(*sizes)
        return draw.ints(*sizes, dtype=draw.choice([torch.int32, torch.int64]))

    x = one(draw.choice(kinds), shape)
    if "Scalar" in name:
        return [x, draw.choice([2, -3, 1.5, 0.25] if "f" in kinds else [2, 3, 1])]
    return [x, one(draw.choice(kinds), draw.broadcast(shape))]


@case("aten.add.Tensor", "aten.add.Scalar")
def add(draw, name):
    args = two(draw, name)
    return Case(args, {"alpha": 2} if draw.bool() and args[0].dtype is not torch.bool else {})


@case("aten.sub.Tensor", "aten.sub.Scalar", "aten.rsub.Scalar", "aten.rsub.Tensor")
def sub(draw, name):
    return Case(two(draw, name, "fi"), {"alpha": 3} if draw.bool() else {})


@case(
    "aten.mul.Tensor", "aten.mul.Scalar", "aten.eq.Tensor", "aten.eq.Scalar", "aten.ne.Tensor", "aten.ne.Scalar",
    "aten.gt.Tensor", "aten.gt.Scalar", "aten.ge.Tensor", "aten.ge.Scalar", "aten.lt.Tensor", "aten.lt.Scalar",
    "aten.le.Tensor", "aten.le.Scalar", "aten.logical_and.default", "aten.logical_or.default",
    "aten.logical_xor.default", "aten.maximum.default", "aten.minimum.default",
)  # fmt: skip
def binary(draw, name):
    return Case(two(draw, name))


@case(
    "aten.bitwise_and.Tensor", "aten.bitwise_and.Scalar", "aten.bitwise_or.Tensor", "aten.bitwise_or.Scalar",
    "aten.bitwise_xor.Tensor", "aten.bitwise_xor.Scalar",
)  # fmt: skip
def bitwise(draw, name):
    return Case(two(draw, name, "ib"))


@case(
    "aten.bitwise_left_shift.Tensor", "aten.bitwise_left_shift.Tensor_Scalar", "aten.bitwise_right_shift.Tensor",
    "aten.bitwise_right_shift.Tensor_Scalar",
)  # fmt: skip
def shift(draw, name):
    shape = draw.shape()
    amount = draw.int(0, 5) if "Scalar" in name else draw.ints(*shape, low=0, high=5)
    return Case([draw.ints(*shape), amount])


def divisor(draw, args):
    """No zero among the second operands."""
    x, y = args
    return [x, torch.where(y == 0, torch.ones_like(y), y) if isinstance(y, torch.Tensor) else y]


@case("aten.div.Tensor", "aten.div.Scalar")
def div(draw, name):
    return Case(divisor(draw, two(draw, name)))


@case("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def div_mode(draw, name):
    args = divisor(draw, two(draw, name, draw.choice(["f", "i"])))
    return Case(args, {"rounding_mode": draw.choice([None, "trunc", "floor"])})


@case(
    "aten.floor_divide.default", "aten.remainder.Tensor", "aten.remainder.Scalar", "aten.fmod.Tensor",
    "aten.fmod.Scalar",
)  # fmt: skip
def divided(draw, name):
    return Case(divisor(draw, two(draw, name, draw.choice(["f", "i"]))))


@case("aten.pow.Tensor_Tensor", "aten.pow.Tensor_Scalar", "aten.pow.Scalar")
def power(draw, name):
    shape = draw.shape()
    base = draw.floats(*shape, low=0.2)
    if name.endswith("Tensor_Tensor"):
        return Case([base, draw.floats(*draw.broadcast(shape))])
    if name.endswith("pow.Scalar"):
        return Case([1.7, base])
    if draw.bool():
        return Case([draw.ints(*shape), draw.choice([1, 2, 3])])
    return Case([base, draw.choice([0, 0.5, 1, 2, 3, -1, -0.5, 1.7])])


@case("aten.atan2.default")
def atan2(draw):
    shape = draw.shape()
    return Case([draw.floats(*shape), draw.floats(*draw.broadcast(shape))])


@case("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where(draw, name):
    shape = draw.shape()
    x, y = draw.floats(*shape), draw.ints(*draw.broadcast(shape))
    condition = draw.bools(*draw.broadcast(shape))
    if name.endswith("ScalarOther"):
        return Case([condition, x, 2.5])
    if name.endswith("ScalarSelf"):
        return Case([condition, -1.5, x])
    if name.endswith("Scalar"):
        return Case([condition, 1.5, 2.5])
    return Case([condition, x, y])


@case("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(draw, name):
    shape = draw.shape()
    value = torch.tensor(1.5) if name.endswith("Tensor") else float("-inf")
    return Case([draw.floats(*shape), draw.bools(*draw.broadcast(shape)), value])


@case("aten.clamp.default", "aten.clamp.Tensor")
def clamp(draw, name):
    shape = draw.shape()
    if name.endswith("Tensor"):
        return Case([draw.floats(*shape), draw.floats(*shape), None])
    limits = draw.choice([(None, 1.0), (-1.0, None), (-0.5, 0.5)])
    return Case([draw.floats(*shape), *limits])


@case("aten.lerp.Scalar", "aten.lerp.Tensor")
def lerp(draw, name):
    shape = draw.shape()
    weight = draw.floats(*shape) if name.endswith("Tensor") else 0.3
    return Case([draw.floats(*shape), draw.floats(*shape), weight])


@case("aten.addcmul.default", "aten.addcdiv.default")
def addc(draw, name):
    shape = draw.shape()
    parts = [draw.floats(*shape) for _ in range(2)]
    return Case([*parts, draw.floats(*shape, low=0.5)], {"value": 0.5} if draw.bool() else {})


RANGES = {
    "log": (0.1, 9), "log2": (0.1, 9), "log10": (0.1, 9), "log1p": (-0.9, 9), "sqrt": (0, 9), "rsqrt": (0.1, 9),
    "atanh": (-0.9, 0.9), "acos": (-1, 1), "asin": (-1, 1), "acosh": (1, 9), "tan": (-1.4, 1.4), "reciprocal": (0.2, 5),
}  # fmt: skip
UNARY = (
    "exp log log1p sqrt rsqrt sin cos tanh sigmoid erf atanh acos expm1 sinh cosh tan asinh acosh atan asin reciprocal "
    "log2 log10 exp2"
).split()


@case(*(f"aten.{name}.default" for name in UNARY))
def floating(draw, name):
    low, high = RANGES.get(name.split(".")[1], (-3, 3))
    shape = draw.shape()
    if draw.int(0, 3) == 0:
        return Case([draw.ints(*shape, low=1, high=1)])
    dtype = draw.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    rtol = 2e-2 if dtype is torch.bfloat16 else 1e-4
    return Case([draw.floats(*shape, low=low, high=high, dtype=dtype)], rtol=rtol)


@case("aten.neg.default", "aten.sign.default", "aten.relu.default", "aten.abs.default")
def keeping(draw, name):
    shape = draw.shape()
    return Case([draw.ints(*shape) if draw.bool() else draw.floats(*shape)])


@case("aten.floor.default", "aten.ceil.default", "aten.trunc.default", "aten.round.default")
def rounded(draw, name):
    shape = draw.shape()
    return Case([draw.ints(*shape) if draw.int(0, 3) == 0 else draw.ints(*shape) / 4])


@case("aten.isnan.default", "aten.isinf.default")
def classified(draw, name):
    shape = draw.shape()
    x = draw.floats(*shape)
    x = torch.where(draw.bools(*shape), x, torch.full_like(x, draw.choice([1, -1]) * float("inf")))
    return Case([torch.where(draw.bools(*shape), x, torch.full_like(x, float("nan")))])


@case("aten.logical_not.default")
def logical_not(draw):
    return Case([draw.any(*draw.shape())])


@case("aten.bitwise_not.default")
def bitwise_not(draw):
    shape = draw.shape()
    return Case([draw.bools(*shape) if draw.bool() else draw.ints(*shape, dtype=torch.int32)])


@case(
    "aten.silu.default", "aten.hardsigmoid.default", "aten.hardswish.default", "aten.mish.default",
)  # fmt: skip
def activation(draw, name):
    return Case([draw.floats(*draw.shape(), low=-6, high=6)])


@case("aten.gelu.default")
def gelu(draw):
    return Case([draw.floats(*draw.shape())], {"approximate": draw.choice(["none", "tanh"])})


@case("aten.leaky_relu.default")
def leaky_relu(draw):
    return Case([draw.floats(*draw.shape()), draw.choice([0.01, 0.3])])


@case("aten.elu.default")
def elu(draw):
    return Case(
        [draw.floats(*draw.shape()), *draw.choice([(), (1.5,), (1.6, 1.05), (1.2, 1, 0.7)])]
    )


@case("aten.hardtanh.default")
def hardtanh(draw):
    return Case([draw.floats(*draw.shape()), *draw.choice([(), (-0.5, 2.0), (0.0, 6.0)])])


@case("aten.softplus.default")
def softplus(draw):
    return Case([draw.floats(*draw.shape(), high=25), *draw.choice([(), (2.0,), (0.5, 5.0)])])


@case("aten._prelu_kernel.default")
def prelu_kernel(draw):
    return Case([draw.floats(2, 3, 5), draw.floats(1, 3, 1)])


@case("aten.prelu.default")
def prelu(draw):
    shape = (2, 3, 5)[: draw.int(2, 3)]
    return Case([draw.floats(*shape), draw.floats(draw.choice([1, 3]))])


@case(
    "aten.clone.default", "aten.alias.default", "aten.detach.default", "aten.lift_fresh_copy.default",
    "aten.contiguous.default", "aten.lift.default",
)  # fmt: skip
def copied(draw, name):
    return Case([draw.any(*draw.shape())])


@case("aten.dropout.default")
def dropout(draw):
    return Case([draw.floats(*draw.shape()), 0.4, False])


TYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.bool, torch.bfloat16]


@case("aten._to_copy.default")
def to_copy(draw):
    return Case([draw.any(*draw.shape())], {"dtype": draw.choice(TYPES)}, rtol=1e-2)


@case("prims.convert_element_type.default")
def convert_element_type(draw):
    return Case([draw.any(*draw.shape()), draw.choice(TYPES)], rtol=1e-2)


@case("aten.copy.default")
def copy(draw):
    shape = draw.shape()
    return Case([draw.floats(*shape), draw.ints(*draw.broadcast(shape))])


@case("aten.fill.Scalar", "aten.fill.Tensor")
def fill(draw, name):
    value = torch.tensor(7) if name.endswith("Tensor") else 2.5
    return Case([draw.floats(*draw.shape()), value])


# creation ------------------------------------------------------------------------------------------


@case("aten.full.default")
def full(draw):
    value = draw.choice([1, 2.5, True, float("inf"), float("-inf")])
    return Case([list(draw.shape()), value], {"dtype": torch.float32} if draw.bool() else {})


@case("aten.full_like.default")
def full_like(draw):
    return Case([draw.any(*draw.shape()), draw.choice([1, 0])])


@case("aten.zeros.default", "aten.ones.default")
def constant(draw, name):
    return Case([list(draw.shape())], {"dtype": draw.choice(TYPES)})


@case("aten.empty.memory_format")
def empty(draw):
    return Case([[0, *draw.shape()]])


@case("aten.empty_permuted.default")
def empty_permuted(draw):
    shape = [0, *draw.shape()]
    return Case([shape, [int(i) for i in draw.rng.permutation(len(shape))]])


@case("aten.empty_strided.default")
def empty_strided(draw):
    shape = [0, *draw.shape()]
    return Case([shape, [1] * len(shape)], {"dtype": draw.choice(TYPES)})


@case("aten.empty_like.default")
def empty_like(draw):
    return Case([draw.any(0, *draw.shape())])


@case("aten.zeros_like.default", "aten.ones_like.default")
def constant_like(draw, name):
    return Case([draw.any(*draw.shape())], {"dtype": draw.choice(TYPES)} if draw.bool() else {})


@case("aten.scalar_tensor.default")
def scalar_tensor(draw):
    return Case([draw.choice([1, 2.5, float("-inf")])], {"dtype": torch.float32})


@case("aten.arange.start_step", "aten.arange.start", "aten.arange.default")
def arange(draw, name):
    start, stop = draw.int(-5, 5), draw.int(5, 12)
    kwargs = {"dtype": draw.choice([torch.float32, torch.int64])} if draw.bool() else {}
    if name.endswith("default"):
        return Case([stop], kwargs)
    return Case([start, stop, draw.int(1, 3)] if "step" in name else [start, stop], kwargs)


@case("prims.iota.default")
def iota(draw):
    kwargs = {
        "start": draw.int(-3, 3), "step": draw.int(1, 3), "dtype": torch.int64, "device": torch.device("cpu"),
        "requires_grad": False,
    }  # fmt: skip
    return Case([draw.int(0, 9)], kwargs)


@case("aten.eye.default", "aten.eye.m")
def eye(draw, name):
    return Case([draw.int(1, 5), draw.int(1, 5)] if name.endswith("m") else [draw.int(1, 5)])


@case("aten.linspace.default")
def linspace(draw):
    return Case([draw.int(-5, 0), draw.int(1, 7), draw.int(1, 9)])
