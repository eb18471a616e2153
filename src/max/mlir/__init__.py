"""The `mo` dialect: what a graph is made of, on xDSL.

- `dims`: dimension expressions.
- `types`, `attributes`: the types of values, the attributes of ops.
- `operation`, `ops`: the table of ops; `build` makes one.
- `module`: modules, and their text.

::

    from max import mlir

    module = mlir.parse_module(text)
    for op in mlir.walk(module):
        if op.name == "mo.concat":
            axis = op.attr("axis")
"""

from max.mlir import ops  # fills the table of ops
from max.mlir.attributes import DenseAttr, ResourceAttr, constant_attr, from_attr, to_attr
from max.mlir.dims import DimExpr, DimParseError, FloorDiv, parse_dim
from max.mlir.module import (
    MO,
    ModuleOp,
    ParseError,
    VerifyError,
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
)

__all__ = [
    "MO",
    "OPS",
    "BufferType",
    "CallOp",
    "IfOp",
    "WhileOp",
    "control_callees",
    "ChainType",
    "DTypeAttr",
    "DenseAttr",
    "DeviceRefAttr",
    "DimAttr",
    "DimExpr",
    "DimParseError",
    "FloorDiv",
    "GraphOp",
    "MoOp",
    "ModuleOp",
    "OpSpec",
    "OpaqueType",
    "ParseError",
    "ResourceAttr",
    "ShapeAttr",
    "ShapedType",
    "SubgraphOp",
    "TensorType",
    "VerifyError",
    "bind_call",
    "build",
    "clone_module",
    "constant_attr",
    "entry",
    "from_attr",
    "graphs",
    "infer_types",
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
