"""Ensembles of decision trees: the sums of the values of the leaves that rows reach.

A node holds where an element of the row is at most the node's limit; NaN takes the flag ``missing``. In the form of
masks the leaves of a tree are bits, from the left: a node that does not hold takes away the leaves below its first
child, and the row's leaf is the lowest bit that is left. In the form of walks a row goes from node to node.
"""

from __future__ import annotations

from max.dtype import DType
from max.mlir.declare import NamedTypes, declare
from max.mlir.dims import DimExpr
from max.mlir.operand import Operand
from max.mlir.operation import Attrs, Types, define, tensor
from max.mlir.types import TensorType

_FLOATS = (DType.float32, DType.float64)
_I32, _FLAGS = (DType.int32,), (DType.uint8,)


def _sums(op: str, types: NamedTypes, attrs: Attrs) -> Types:
    """The result, ``[rows, outputs]`` of the dtype of `x`."""
    x, outputs = types["x"], attrs["outputs"]
    if outputs < 1:
        raise ValueError(f"{op}: outputs is {outputs}, expected 1 or more")
    for name in ("limits", "weights"):
        if types[name].dtype is not x.dtype:
            raise TypeError(f"{op}: {name} is {types[name].short}, expected {x.dtype.name} as x")
    shape = x.with_shape((x.shape[0], outputs)).shape
    return (TensorType.get(x.dtype, shape, x.device),)


def _check_shapes(op: str, types: NamedTypes, first: str, axes: int, *names: str) -> None:
    """Checks that operands agree in their first axes."""
    for name in names:
        if types[name].shape[:axes] != types[first].shape[:axes]:
            raise ValueError(
                f"{op}: {name} is {types[name].short}, {first} {types[first].short}; expected one shape"
            )


def _mask_types(types: NamedTypes, attrs: Attrs) -> Types:
    op = "trees.masks"
    _check_shapes(op, types, "limits", 2, "features", "missing", "masks")
    _check_shapes(op, types, "limits", 1, "counts", "weights", "targets")
    return _sums(op, types, attrs)


def _tests_of_masks(operands: Types, results: Types) -> DimExpr:
    """A test for each node and row."""
    rows = tensor("trees.masks", operands, 0).shape[0]
    return rows * tensor("trees.masks", operands, 2).num_elements


define(
    declare(
        "mo.trees.masks",
        (
            # tables of [trees, nodes]; counts: the nodes of each tree; masks: the leaves that stay
            Operand("x", _FLOATS, 2),
            Operand("features", _I32, 2),
            Operand("limits", _FLOATS, 2),
            Operand("missing", _FLAGS, 2),
            Operand("masks", (DType.uint32, DType.uint64), 2),
            Operand("counts", _I32, 1),
            # [trees, leaves, values], added to the outputs from targets on
            Operand("weights", _FLOATS, 3),
            Operand("targets", _I32, 1),
        ),
        1,
        _mask_types,
        attributes={"outputs": int},
        flops=_tests_of_masks,
        takes=(
            "x `[rows, features]`; features i32, limits, missing u8, masks u32 or u64, all "
            "`[trees, nodes]`; counts i32 `[trees]`; weights `[trees, leaves, values]`; "
            "targets i32 `[trees]`"
        ),
        gives=(
            "`[rows, outputs]`: sums over the trees of the weights of the leaf that a row "
            "reaches; leaves are bits, a node whose test `x <= limit` fails leaves those of"
            " its mask"
        ),
        doc="trees by masks of leaves",
    )
)


def _walk_types(types: NamedTypes, attrs: Attrs) -> Types:
    op = "trees.walk"
    _check_shapes(op, types, "limits", 1, "features", "missing", "yes", "no", "leaves")
    _check_shapes(op, types, "roots", 1, "depths", "targets")
    return _sums(op, types, attrs)


define(
    declare(
        "mo.trees.walk",
        (
            # tables of the nodes of all trees; a leaf is its own successor
            Operand("x", _FLOATS, 2),
            Operand("features", _I32, 1),
            Operand("limits", _FLOATS, 1),
            Operand("missing", _FLAGS, 1),
            Operand("yes", _I32, 1),
            Operand("no", _I32, 1),
            # the row of weights of a leaf
            Operand("leaves", _I32, 1),
            Operand("roots", _I32, 1),
            # the steps from a root to the deepest leaf
            Operand("depths", _I32, 1),
            # [leaves, values]
            Operand("weights", _FLOATS, 2),
            Operand("targets", _I32, 1),
        ),
        1,
        _walk_types,
        attributes={"outputs": int},
        takes=(
            "x `[rows, features]`; features, yes, no and leaves i32, limits, missing u8, "
            "all `[nodes]`; roots, depths and targets i32 `[trees]`; weights `[leaves, "
            "values]`"
        ),
        gives="the same; a row goes from node to node, a leaf is its own successor",
        doc="trees from node to node",
    )
)
