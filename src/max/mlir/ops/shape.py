"""Ops that move elements without computing: reshape, slice, concat, pad and others; ranges."""

from __future__ import annotations

from max.dtype import DType
from max.mlir.conditions import Condition
from max.mlir.dims import DimExpr
from max.mlir.operation import (
    Attrs,
    OpSpec,
    Types,
    axis_of,
    define,
    same_device,
    tensor,
)
from max.mlir.types import DeviceRefAttr, TensorType, dims_text

_CPU = DeviceRefAttr.get("cpu", 0)


def _same_but_shape(op: str, x: TensorType, y: TensorType) -> None:
    if x.with_shape(y.shape) != y.with_shape(y.shape):
        raise ValueError(f"{op}: {x.short} to {y.short} changes more than the shape")


def broadcast_fits(source: tuple[DimExpr, ...], target: tuple[DimExpr, ...]) -> bool:
    """Whether a tensor of shape `source` broadcasts to `target` by NumPy's rules."""
    offset = len(target) - len(source)
    return offset >= 0 and all(s == 1 or s == target[offset + i] for i, s in enumerate(source))


def _check_broadcast_to(operands: Types, results: Types, attrs: Attrs) -> None:
    """Checks that x broadcasts to the result's shape."""
    x, y = tensor("broadcast_to", operands, 0), tensor("broadcast_to", results, 0)
    _same_but_shape("broadcast_to", x, y)
    if not broadcast_fits(x.shape, y.shape):
        raise ValueError(
            f"broadcast_to: {x.short} does not broadcast to {dims_text(y.shape)}; each dimension, "
            "counted from the last, is 1 or equal"
        )


BroadcastToOp = define(
    OpSpec(
        "mo.broadcast_to",
        (1, 1),
        1,
        check=_check_broadcast_to,
        view=True,
        movable=True,
        in_order=True,
        resizes=True,
        takes="x",
        doc="to the result's shape (NumPy rules)",
    )
)


def _check_reshape(operands: Types, results: Types, attrs: Attrs) -> None:
    """Checks that x and the result have equally many elements."""
    x, y = tensor("reshape", operands, 0), tensor("reshape", results, 0)
    _same_but_shape("reshape", x, y)
    count, new_count = x.num_elements, y.num_elements
    if count != new_count:
        raise ValueError(
            f"reshape: {x.short} has {count} elements, {dims_text(y.shape)} has {new_count}"
            + (
                ""
                if count.is_static and new_count.is_static
                else "; state what is equal with rebind"
            )
        )


ReshapeOp = define(
    OpSpec(
        "mo.reshape",
        (1, 1),
        1,
        check=_check_reshape,
        view=True,
        movable=True,
        in_order=True,
        takes="x",
        doc="to the result's shape (NumPy rules)",
    )
)


def _check_rebind(operands: Types, results: Types, attrs: Attrs) -> None:
    """Checks that only the shape changes, and that no dim differs for all sizes."""
    x, y = tensor("rebind", operands, 0), tensor("rebind", results, 0)
    if x.dtype is not y.dtype or x.device != y.device:
        raise ValueError(f"rebind: {x.short} to {y.short} changes more than the shape")
    if x.rank != y.rank:
        raise ValueError(f"rebind: {x.short} has rank {x.rank}, {dims_text(y.shape)} has {y.rank}")
    for axis, (dim, new_dim) in enumerate(zip(x.shape, y.shape, strict=True)):
        difference = dim - new_dim
        if difference.is_static and difference.value:
            raise ValueError(
                f"rebind: axis {axis} of {x.short} is {dim}, which is never {new_dim}"
                + (f": {attrs['message']}" if attrs.get("message") else "")
            )


def _rebind_conditions(operands: Types, results: Types, attrs: Attrs) -> list[Condition]:
    """Conditions that each dim of x equals that of the result."""
    x, y = tensor("rebind", operands, 0), tensor("rebind", results, 0)
    note = f" ({attrs['message']})" if attrs.get("message") else ""
    return [
        Condition.equal(dim, new_dim, f"rebind: axis {axis} of {x.short} to {y.short}{note}")
        for axis, (dim, new_dim) in enumerate(zip(x.shape, y.shape, strict=True))
    ]


RebindOp = define(
    OpSpec(
        "mo.rebind",
        (1, 1),
        1,
        attributes={"message": str},
        check=_check_rebind,
        conditions=_rebind_conditions,
        view=True,
        in_order=True,
        introduces_symbols=True,
        takes="x",
        doc="asserts the result's shape at run time; a symbol that is new names the size",
    )
)


def _infer_transpose(types: Types, attrs: Attrs) -> Types:
    x = tensor("transpose", types, 0)
    perm: tuple[int, ...] = attrs["perm"]
    if sorted(perm) != list(range(x.rank)):
        raise ValueError(f"transpose: {list(perm)} does not permute the {x.rank} axes of {x.short}")
    return (x.with_shape([x.shape[axis] for axis in perm]),)


TransposeOp = define(
    OpSpec(
        "mo.transpose",
        (1, 1),
        1,
        attributes={"perm": tuple},
        infer=_infer_transpose,
        view=True,
        movable=True,
        takes="x",
        doc="axis i of the result is axis `perm[i]` of x",
    )
)

SLICE_ATTRIBUTES = {"start": tuple, "stop": tuple, "step": tuple}


def slice_shape(
    op: str,
    shape: tuple[DimExpr, ...],
    start: tuple[DimExpr, ...],
    stop: tuple[DimExpr, ...],
    step: tuple[DimExpr, ...],
) -> tuple[DimExpr, ...]:
    """The shape of a normalized slice.

    Raises:
        ValueError: The number of bounds differs from the rank, a step is symbolic or 0, or a static bound is out of
            range.
    """
    rank = len(shape)
    if not len(start) == len(stop) == len(step) == rank:
        raise ValueError(
            f"{op}: {len(start)} starts, {len(stop)} stops and {len(step)} steps for a tensor "
            f"of rank {rank}"
        )
    result: list[DimExpr] = []
    for axis, (dim, first, last, stride) in enumerate(zip(shape, start, stop, step, strict=True)):
        if not stride.is_static or stride.value == 0:
            raise ValueError(f"{op}: the step of axis {axis} is {stride}, expected an int, not 0")
        by = stride.value
        span = last - first if by > 0 else first - last
        # rounded up: the last element may be less than a step from the stop
        size = (span + (abs(by) - 1)) // abs(by)
        # a stop before the start is an empty slice, as in Python
        if size.is_static and size.value < 0:
            size = DimExpr.constant(0)
        # the half-open range of the elements, whatever the direction
        lowest, highest = (first, last) if by > 0 else (last + 1, first + 1)
        below = lowest.is_static and lowest.value < 0
        above = highest - dim
        if below or (above.is_static and above.value > 0):
            raise ValueError(
                f"{op}: {first}:{last}:{by} is out of range for axis {axis} of size {dim}"
            )
        result.append(size)
    return tuple(result)


def _check_slice(operands: Types, results: Types, attrs: Attrs) -> None:
    x, y = tensor("slice", operands, 0), tensor("slice", results, 0)
    _same_but_shape("slice", x, y)
    expected = slice_shape("slice", x.shape, attrs["start"], attrs["stop"], attrs["step"])
    check_slice_result("slice", expected, y.shape)


def check_slice_result(op: str, expected: tuple[DimExpr, ...], actual: tuple[DimExpr, ...]) -> None:
    """Checks that the actual shape, which is authoritative, can equal the computed one."""
    fits = len(expected) == len(actual) and not any(
        (difference := dim - actual_dim).is_static and difference.value
        for dim, actual_dim in zip(expected, actual, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{op}: the slice has shape {dims_text(expected)}, not {dims_text(actual)}"
        )


def slice_conditions(
    op: str, shape: tuple[DimExpr, ...], result: tuple[DimExpr, ...], attrs: Attrs
) -> list[Condition]:
    """The conditions that a normalized slice lies inside a tensor of shape `shape` and has shape `result`."""
    bounds: list[tuple[DimExpr, ...]] = [attrs[name] for name in SLICE_ATTRIBUTES]
    sizes = slice_shape(op, shape, *bounds)
    conditions: list[Condition] = []
    for axis, (dim, (start, stop, step)) in enumerate(
        zip(shape, zip(*bounds, strict=True), strict=True)
    ):
        index = f"{op}: {start}:{stop}:{step}"
        # an empty slice reads nothing, but its begin is a place of the axis
        end = start if sizes[axis] == 0 else stop
        lowest, highest = (start, end) if step.value > 0 else (end + 1, start + 1)
        message = f"{index} is out of range for axis {axis} of size {dim}"
        conditions.append(Condition.at_least(lowest, 0, message))
        conditions.append(Condition.at_least(dim, highest, message))
        message = f"{index} of axis {axis} has another size than the result"
        conditions.append(Condition.equal(sizes[axis], result[axis], message))
    return conditions


def _slice_conditions(operands: Types, results: Types, attrs: Attrs) -> list[Condition]:
    x, y = tensor("slice", operands, 0), tensor("slice", results, 0)
    return slice_conditions("slice", x.shape, y.shape, attrs)


SliceOp = define(
    OpSpec(
        "mo.slice",
        (1, 1),
        1,
        attributes=SLICE_ATTRIBUTES,
        check=_check_slice,
        conditions=_slice_conditions,
        view=True,
        resizes=True,
        movable=True,
        introduces_symbols=True,
        takes="x",
        doc=(
            "`start`, `stop`, `step` (one dim or integer an axis); static-step slice, "
            "normalized: `step != 0`, `0 <= start`; the result's shape is authoritative"
        ),
    )
)


def check_slice_bounds(op: str, types: Types, rank: int, device: DeviceRefAttr) -> None:
    """Checks that start, stop and step of a dynamic slice are int64 tensors ``[rank]``.

    Staging puts them on the CPU; the compiler may transfer them to the device of the op.

    Raises:
        TypeError: A type differs.
    """
    expected = TensorType.get(DType.int64, (rank,), _CPU)
    for index, name in enumerate(("start", "stop", "step")):
        bounds = tensor(op, types, index)
        if bounds not in (expected, TensorType.get(DType.int64, (rank,), device)):
            raise TypeError(f"{op}: {name} is {bounds.short}, expected {expected.short}")


def _check_slice_dynamic(operands: Types, results: Types, attrs: Attrs) -> None:
    x, y = tensor("slice", operands, 0), tensor("slice", results, 0)
    _same_but_shape("slice", x, y)
    if x.rank != y.rank:
        raise ValueError(f"slice: {x.short} has rank {x.rank}, the result {y.short} has {y.rank}")
    check_slice_bounds("slice", operands[1:], x.rank, x.device)


define(
    OpSpec(
        "mo.slice_dynamic",
        (4, 4),
        1,
        check=_check_slice_dynamic,
        size_rule="slice",
        introduces_symbols=True,
        takes="x, start, stop, step (1-d si64, on the CPU)",
        doc="as `mo.slice`, with bounds that are values; steps are not 0",
    )
)


def _infer_concat(types: Types, attrs: Attrs) -> Types:
    """The first operand's type, with the sum of all sizes along the axis."""
    tensors = [tensor("concat", types, i) for i in range(len(types))]
    first = tensors[0]
    axis = axis_of("concat", attrs["axis"], first.rank)
    total = first.shape[axis]
    for index, t in enumerate(tensors[1:], 1):
        if t.dtype is not first.dtype:
            raise TypeError(
                f"concat: operand {index} is {t.short}, operand 0 is {first.short}; "
                "expected one dtype (cast)"
            )
        if t.rank != first.rank:
            raise ValueError(
                f"concat: operand {index} is {t.short}, operand 0 is {first.short}; "
                "expected one rank"
            )
        for i in range(first.rank):
            if i != axis and t.shape[i] != first.shape[i]:
                raise ValueError(
                    f"concat: axis {i} of operand {index} is {t.shape[i]}, of operand 0 "
                    f"{first.shape[i]}; only axis {axis} may differ"
                )
        total = total + t.shape[axis]
    same_device("concat", tensors)
    return (first.with_shape([*first.shape[:axis], total, *first.shape[axis + 1 :]]),)


ConcatOp = define(
    OpSpec(
        "mo.concat",
        (1, None),
        1,
        attributes={"axis": int},
        infer=_infer_concat,
        reads_strided=True,
        takes="xs…",
        doc="the operands one after the other along `axis`; their other dims are equal",
    )
)

PAD_MODES = ("constant",)


def _infer_pad(types: Types, attrs: Attrs) -> Types:
    """The type of x, with `low` and `high` added to its dims."""
    x = tensor("pad", types, 0)
    low, high = attrs["low"], attrs["high"]
    if len(low) != x.rank or len(high) != x.rank:
        raise ValueError(f"pad: {len(low)} and {len(high)} paddings for {x.short} of rank {x.rank}")
    if attrs["mode"] not in PAD_MODES:
        raise ValueError(f"pad: mode is {attrs['mode']!r}, expected {', '.join(PAD_MODES)}")
    for axis, amounts in enumerate(zip(low, high, strict=True)):
        for amount in amounts:
            if amount.is_static and amount.value < 0:
                raise ValueError(f"pad: the padding {amount} of axis {axis} is negative")
    shape = [lo + dim + hi for lo, dim, hi in zip(low, x.shape, high, strict=True)]
    return (x.with_shape(shape),)


def _pad_conditions(operands: Types, results: Types, attrs: Attrs) -> list[Condition]:
    return [
        Condition.at_least(amount, 0, f"pad: the padding {amount} of axis {axis} is negative")
        for axis, amounts in enumerate(zip(attrs["low"], attrs["high"], strict=True))
        for amount in amounts
    ]


PadOp = define(
    OpSpec(
        "mo.pad",
        (1, 1),
        1,
        attributes={"low": tuple, "high": tuple, "mode": str, "value": (int, float)},
        infer=_infer_pad,
        conditions=_pad_conditions,
        takes="x",
        doc="`low` and `high` elements before and after each axis; of `value`; `mode` = constant",
    )
)


def _check_range(operands: Types, results: Types, attrs: Attrs) -> None:
    """Checks scalars of the result's dtype, and a result of rank 1."""
    y = tensor("range", results, 0)
    for index, name in enumerate(("start", "stop", "step")):
        t = tensor("range", operands, index)
        if t.rank != 0 or t.dtype is not y.dtype or t.device not in (_CPU, y.device):
            raise TypeError(
                f"range: {name} is {t.short}, expected a scalar of dtype {y.dtype.name} on cpu:0"
            )
    if y.rank != 1:
        raise ValueError(f"range: the result {y.short} has rank {y.rank}, expected 1")


define(
    OpSpec(
        "mo.range",
        (3, 3),
        1,
        check=_check_range,
        size_rule="range",
        introduces_symbols=True,
        takes="start, stop, step (rank 0)",
        doc="1-d: start, start + step, …, before stop",
    )
)


def _infer_shape_to_tensor(types: Types, attrs: Attrs) -> Types:
    return (TensorType.get(DType.int64, (len(attrs["shape"]),), _CPU),)


ShapeToTensorOp = define(
    OpSpec(
        "mo.shape_to_tensor",
        (0, 0),
        1,
        attributes={"shape": tuple},
        infer=_infer_shape_to_tensor,
        doc="1-d si64",
    )
)
