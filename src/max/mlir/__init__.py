"""The `mo` dialect, the IR of graphs, on xDSL.

- `dims`: dimension expressions.
- `types`, `attributes`: types of values, attributes of ops.
- `operation`, `ops`: the table of ops; `build` creates one.
- `conditions`: conditions over dimensions that are checked at run time.
- `module`: modules, their text, and the verifier.

::

    from max import mlir

    module = mlir.parse_module(text)
    for op in mlir.walk(module):
        if op.name == "mo.concat":
            axis = op.attr("axis")

Names are loaded at their first use, and xDSL with them. Layers above therefore take the dialect, and the names of xDSL
that they need, from here (``from max import mlir``); only `dims` and `conditions` may be imported directly. A start
that finds its program in the disk cache then imports no xDSL.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from max._host.garbage import rare_collections

if TYPE_CHECKING:
    from xdsl.ir import Attribute, BlockArgument, Operation, OpResult, Region, SSAValue

    from max.mlir import ops
    from max.mlir.attributes import (
        INLINE_LIMIT,
        DenseAttr,
        ResourceAttr,
        constant_attr,
        from_attr,
        to_attr,
    )
    from max.mlir.builtin import (
        Block,
        FileLineColLoc,
        LocationAttr,
        ModuleOp,
        StringAttr,
        SymbolRefAttr,
        line_location,
    )
    from max.mlir.context import Context, Location
    from max.mlir.dim_parser import DimParseError, parse_dim
    from max.mlir.dims import DimExpr, FloorDiv
    from max.mlir.key import key_text
    from max.mlir.module import (
        MO,
        ParseError,
        VerifyError,
        block_of,
        clone_module,
        entry,
        graphs,
        new_module,
        parse_module,
        print_module,
        resources,
        subgraphs,
        verify_module,
        walk,
    )
    from max.mlir.operand import Operand
    from max.mlir.operation import OPS, MoOp, OpSpec, build, infer_types
    from max.mlir.ops.control import (
        CallOp,
        GraphOp,
        IfOp,
        SubgraphOp,
        WhileOp,
        bind_call,
        control_callees,
        substitute_type,
    )
    from max.mlir.ops.elementwise import GELU_APPROXIMATIONS
    from max.mlir.ops.models.cache import check_window
    from max.mlir.ops.shape import PAD_MODES, slice_shape
    from max.mlir.types import (
        BufferType,
        ChainType,
        DeviceRefAttr,
        DimAttr,
        DTypeAttr,
        OpaqueType,
        ShapeAttr,
        ShapedType,
        TensorType,
        dims_text,
        short_types,
    )

_NAMES = {
    "max.mlir.builtin": "Block FileLineColLoc LocationAttr ModuleOp StringAttr SymbolRefAttr line_location",
    "xdsl.ir": "Attribute BlockArgument OpResult Operation Region SSAValue",
    "max.mlir.attributes": "DenseAttr INLINE_LIMIT ResourceAttr constant_attr from_attr to_attr",
    "max.mlir.context": "Context Location",
    "max.mlir.dim_parser": "DimParseError parse_dim",
    "max.mlir.dims": "DimExpr FloorDiv",
    "max.mlir.key": "key_text",
    "max.mlir.module": (
        "MO ParseError VerifyError block_of clone_module entry graphs new_module parse_module print_module resources "
        "subgraphs verify_module walk"
    ),
    "max.mlir.operand": "Operand",
    "max.mlir.operation": "MoOp OPS OpSpec build infer_types",
    "max.mlir.ops.models.cache": "check_window",
    "max.mlir.ops.control": "CallOp GraphOp IfOp SubgraphOp WhileOp bind_call control_callees substitute_type",
    "max.mlir.types": (
        "BufferType ChainType DTypeAttr DeviceRefAttr DimAttr OpaqueType ShapeAttr ShapedType TensorType dims_text "
        "short_types"
    ),
    "max.mlir.ops.shape": "PAD_MODES slice_shape",
    "max.mlir.ops.elementwise": "GELU_APPROXIMATIONS",
}
"""The names of each module."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES and name != "ops":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with rare_collections(keep=True):  # modules live as long as the process
        ops = import_module("max.mlir.ops")  # fills the table of ops, which all others rely on
        value = ops if name == "ops" else getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "ops"})


__all__ = [
    "GELU_APPROXIMATIONS",
    "PAD_MODES",
    "slice_shape",
    "INLINE_LIMIT",
    "dims_text",
    "short_types",
    "Attribute",
    "Block",
    "BlockArgument",
    "BufferType",
    "CallOp",
    "ChainType",
    "Context",
    "DTypeAttr",
    "DenseAttr",
    "DeviceRefAttr",
    "DimAttr",
    "DimExpr",
    "DimParseError",
    "FileLineColLoc",
    "FloorDiv",
    "GraphOp",
    "IfOp",
    "Location",
    "LocationAttr",
    "MO",
    "MoOp",
    "ModuleOp",
    "OPS",
    "OpResult",
    "OpSpec",
    "Operand",
    "OpaqueType",
    "Operation",
    "ParseError",
    "Region",
    "ResourceAttr",
    "SSAValue",
    "ShapeAttr",
    "ShapedType",
    "StringAttr",
    "SubgraphOp",
    "SymbolRefAttr",
    "TensorType",
    "VerifyError",
    "WhileOp",
    "bind_call",
    "block_of",
    "build",
    "check_window",
    "clone_module",
    "constant_attr",
    "control_callees",
    "entry",
    "from_attr",
    "graphs",
    "infer_types",
    "key_text",
    "line_location",
    "new_module",
    "ops",
    "parse_dim",
    "parse_module",
    "print_module",
    "resources",
    "subgraphs",
    "substitute_type",
    "to_attr",
    "verify_module",
    "walk",
]
