"""The `mok` dialect: the ops that the compiler adds to `mo` between the graph and kernels.

- `mok.region`: one kernel; its body has the `mo` ops that it computes. Kinds: ``map`` (element-wise), ``rows``
  (with reductions over one axis), ``library`` (a library op, the first op that is no view, and its epilogue).
- `mok.once`: ops on weights and constants only, run once when a model is loaded.
- `mok.matmul`: `mo.matmul` with the attribute `transpose_b`.
- `mok.attention`: attention over keys and values that are plain tensors.
- `mok.cast_within`: `mo.cast` of floats that the integers of the result hold, none of them NaN.
- `mok.check`: a condition over dims that the sizes of an execution must meet.
- `mok.device_copy`: a copy of a value in the memory of another device.
- `mok.yield`: ends the body of a region or of a `mok.once`.

The passes of backends add further ops (`backend_op`), such as products with packed weights. Those with results in parts
are a `ProductsOp`, those with a launch for each operand a `PackingOp`; a library kernel carries out any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy.typing as npt
from xdsl.ir import Attribute, Dialect, OpTraits, SSAValue
from xdsl.traits import IsTerminator

from max._compiler.mok.bodies import BodyOp, OnceOp, RegionOp
from max._compiler.mok.products import MatmulOp, PackingOp, ProductsOp, parts_of
from max.dtype import DType
from max.mlir import MO, DimExpr, MoOp, OpSpec, TensorType, to_attr
from max.mlir.builtin import LocationAttr, ModuleOp
from max.mlir.conditions import Condition
from max.mlir.operation import Attrs
from max.mlir.ops.elementwise import CastOp
from max.mlir.types import short_types

__all__ = [
    "AttentionOp",
    "BodyOp",
    "CastWithinOp",
    "CheckOp",
    "DeviceCopyOp",
    "MatmulOp",
    "OnceOp",
    "PackingOp",
    "ProductsOp",
    "RegionOp",
    "YieldOp",
    "backend_op",
    "parse",
    "parts_of",
]


class YieldOp(MoOp):
    """``mok.yield(%a, %b) : (…) -> ()``"""

    name = "mok.yield"
    spec = OpSpec("mok.yield", (0, None), 0, pure=False, terminator=True)
    traits = OpTraits(lambda: (IsTerminator(),))


class CastWithinOp(MoOp):
    """`mo.cast` of floats to integers that hold them: without limits and NaN it is a single instruction."""

    name = "mok.cast_within"
    spec = replace(CastOp.spec, name=name)


class CheckOp(MoOp):
    """A condition: the first of the `sides` is at least the second, or equal to it if `exact`."""

    name = "mok.check"
    spec = OpSpec(
        "mok.check",
        (0, 0),
        0,
        attributes={"sides": tuple, "exact": bool, "message": str},
        pure=False,
    )

    @classmethod
    def of(cls, condition: Condition, location: LocationAttr) -> CheckOp:
        """The check of a condition; `location` is that of the op with the condition."""
        attrs = {
            "sides": (condition.actual, condition.required),
            "exact": condition.exact,
            "message": condition.message,
        }
        return cls.create(
            attributes={name: to_attr(value) for name, value in attrs.items()}, location=location
        )

    @property
    def condition(self) -> Condition:
        """The condition that is checked."""
        actual, required = self.attr("sides")
        return Condition(actual, required, self.attr("message"), self.attr("exact"))


def _infer_attention(types: Sequence[Attribute], attrs: Attrs) -> Sequence[Attribute]:
    """The result: the batch axes of q with the queries inserted at `axis`, then the size of a value."""
    tensors = [t for t in types if isinstance(t, TensorType)]
    if len(tensors) != len(types):
        raise TypeError("attention: an operand is no tensor")
    q, keys, values, *masks = tensors
    # q is [batch…, queries, size], keys and values [batch…, keys, size]
    batch, axis, fills = q.shape[:-2], attrs["axis"], attrs["fills"]
    if len(batch) != q.rank - 2 or not keys.shape[:-2] == values.shape[:-2] == batch:
        raise ValueError(f"attention: the batch axes of {short_types(types[:3])} differ")
    if keys.shape[-1] != q.shape[-1] or keys.shape[-2] != values.shape[-2]:
        raise ValueError(f"attention: the sizes of {short_types(types[:3])} do not fit")
    if not 0 <= axis <= len(batch) or len(fills) != len(masks):
        raise ValueError(
            f"attention: axis {axis} of {len(batch)} batch axes, {len(fills)} fills for {len(masks)} masks"
        )
    # one for the scaled scores, one after each mask, one for the probabilities
    if len(attrs["roundings"]) != len(masks) + 2:
        raise ValueError(
            f"attention: {len(attrs['roundings'])} roundings, expected {len(masks) + 2}"
        )
    if (guard := attrs.get("guard", "nan")) not in ("nan", "masked"):
        raise ValueError(f"attention: guard is {guard!r}, expected 'nan' or 'masked'")
    scores = (*batch, q.shape[-2], keys.shape[-2])
    for mask, fill in zip(masks, fills, strict=True):
        # masks broadcast as in NumPy, from the last axis on
        score_dims = scores[len(scores) - mask.rank :]
        if mask.rank > len(scores) or any(
            actual not in (1, required)
            for actual, required in zip(mask.shape, score_dims, strict=True)
        ):
            raise ValueError(f"attention: {mask.short} does not spread over the scores")
        # a mask of bools needs a fill, and an added mask has none
        if (mask.dtype is DType.bool) is (fill is None):
            raise TypeError(f"attention: {mask.short} with the fill {fill}")
    # where a later transpose moves the queries, so that the kernel writes them there
    shape = (*batch[:axis], q.shape[-2], *batch[axis:], values.shape[-1])
    return (TensorType.get(attrs["dtype"], shape, q.device),)


def _attention_flops(operands: Sequence[Attribute], results: Sequence[Attribute]) -> DimExpr:
    """Those of the scores, and of the sums of values."""
    q, keys, values = (cast("TensorType", type_).shape for type_ in operands[:3])
    # twice, as each element is a multiplication and an addition
    rows = math.prod(q[:-1], start=DimExpr.of(2))
    return rows * keys[-2] * (q[-1] + values[-1])


class AttentionOp(MoOp):
    """`softmax(scale * q @ keysᵀ + masks) @ values`, of `[batch…, queries, size]` and `[batch…, keys, size]`.

    Masks broadcast to the scores. Each has a fill: None if the mask is added, else the score where the mask is false.
    In the result the axis of queries is before the batch axis `axis`; its dtype is that of the graph's probabilities.
    `roundings` has the dtypes that casts of the graph round to: the scaled scores, the scores after each mask, and the
    probabilities; None: they stay in f32. `guard` says which rows are 0: "nan", those whose probabilities are NaN;
    "masked", those whose scores are all -inf; absent: none.
    """

    name = "mok.attention"
    spec = OpSpec(
        "mok.attention",
        (3, None),
        1,
        attributes={
            "scale": float,
            "fills": tuple,
            "roundings": tuple,
            "axis": int,
            "dtype": DType,
        },
        optional={"guard": str},
        infer=_infer_attention,
        flops=_attention_flops,
        separates=True,
    )

    @classmethod
    def of(
        cls,
        operands: Sequence[SSAValue],
        scale: float,
        fills: Sequence[float | None],
        roundings: Sequence[DType | None],
        axis: int,
        dtype: DType,
        location: LocationAttr,
        guard: str,
    ) -> AttentionOp:
        """The op for queries, keys, values and masks."""
        attrs = {
            "scale": scale,
            "fills": tuple(fills),
            "roundings": tuple(roundings),
            "axis": axis,
            "dtype": dtype,
            **({"guard": guard} if guard else {}),
        }
        return cls.create(
            operands=operands,
            result_types=_infer_attention([v.type for v in operands], attrs),
            attributes={key: to_attr(value) for key, value in attrs.items()},
            location=location,
        )


def _check_device_copy(
    operands: Sequence[Attribute], results: Sequence[Attribute], attrs: Attrs
) -> None:
    """Checks that only the device changes."""
    x, y = cast("TensorType", operands[0]), cast("TensorType", results[0])
    if (x.dtype, x.shape) != (y.dtype, y.shape) or x.device == y.device:
        raise ValueError(
            f"device_copy: {x.short} to {y.short} changes more, or less, than the device"
        )


class DeviceCopyOp(MoOp):
    """A contiguous copy of a tensor in the memory of another device; between devices of one memory `mo.transfer` is a
    view.
    """

    name = "mok.device_copy"
    spec = OpSpec("mok.device_copy", (1, 1), 1, check=_check_device_copy)

    @classmethod
    def of(cls, x: SSAValue, result: TensorType, location: LocationAttr) -> DeviceCopyOp:
        """The copy of a tensor; `result` differs from its type in the device only."""
        return cls.create(operands=(x,), result_types=(result,), location=location)


_backend_ops: list[type[MoOp]] = []
_OpClass = TypeVar("_OpClass", bound=type[MoOp])


def backend_op(cls: _OpClass) -> _OpClass:
    """Adds an op to the dialect, for the passes of a backend: a decorator of its class."""
    _backend_ops.append(cls)
    return cls


MOK = Dialect(
    "mok",
    [
        YieldOp,
        CastWithinOp,
        CheckOp,
        MatmulOp,
        AttentionOp,
        DeviceCopyOp,
        RegionOp,
        OnceOp,
    ],
    [],
)


def parse(text: str, resources: Mapping[str, npt.NDArray[Any]] | None = None) -> ModuleOp:
    """Reads a module of `mo` and `mok`, for tests and for the check that the printed form parses.

    Args:
        text: The output of `max.mlir.print_module`.
        resources: The large constants by name.
    """
    # the parser and xDSL's builtin dialect take 0.1 s to import, and only tests and MAX_CHECK=3 parse
    from xdsl.context import Context
    from xdsl.dialects.builtin import Builtin
    from xdsl.parser import Parser

    context = Context()
    # attributes of large constants look up their arrays here
    setattr(context, "resources", resources or {})  # noqa: B010
    for dialect in (Builtin, MO, MOK):
        context.load_dialect(dialect)
    for op in _backend_ops:
        context.load_op(op)
    return ModuleOp.adopt(Parser(context, text).parse_module())
