"""The importer of ONNX: its table of functions, and the expansion of functions that the standard or a model defines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from max.importers.errors import Unsupported
from max.importers.node import Node
from max.importers.onnx import ops as _ops
from max.importers.onnx.element_types import code_of
from max.importers.onnx.reader import GraphReader, Model, require_onnx
from max.importers.onnx.table import TABLE
from max.importers.source import InputType, SourceGraph
from max.importers.values import Imported, Items, Value

if TYPE_CHECKING:
    import onnx

__all__ = ["OnnxFramework"]


class OnnxFramework:
    """The ops of ONNX, for the functions of one model.

    Args:
        model: The model, whose own functions expand to their bodies.
    """

    table = TABLE
    in_parts = (
        "max.onnx.InferenceSession runs such a model in parts; or give the shapes of its inputs"
    )

    def __init__(self, model: Model) -> None:
        self._model = model
        self._cache: dict[Any, SourceGraph | None] = {}

    def expand(self, node: Node) -> SourceGraph | None:
        """The body of a function that the model or the standard defines, else None."""
        source = node.source
        # a function of the model comes before one of the standard with its name
        own = self._model.functions.get((source.domain, source.op))
        if own is not None:
            return _body(own, source.attributes, self._model.opsets)
        schema = _schema(node)
        function = None if schema is None else _standard(node, schema)
        if schema is None or function is None:
            return None
        # the body refers to attributes by name: those that the node leaves out have their defaults
        given = {
            **{name: _default(entry) for name, entry in schema.attributes.items()},
            **source.attributes,
        }
        attributes = {name: value for name, value in given.items() if value is not None}
        return _body(function, attributes, self._model.opsets)


def _body(function: onnx.FunctionProto, attributes: Any, opsets: Mapping[str, int]) -> SourceGraph:
    """The graph of a function, with a call's attributes. Op sets that it does not name are those of the model."""
    given = dict(attributes)
    # "ai.onnx" is another name of the default domain
    own = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in function.opset_import}
    reader = GraphReader(
        {**opsets, **own},
        None,
        f"function {function.name}",
        given,
    )
    for default in function.attribute_proto:
        if default.name not in given:
            given[default.name] = reader.attribute(default)
    unknown = InputType()
    return SourceGraph(
        function.name,
        tuple((name, unknown) for name in function.input),
        tuple((name, unknown) for name in function.output),
        tuple(reader.nodes(function.node, 1)),
    )


def _schema(node: Node) -> Any:
    """What the standard says of an op; None: nothing."""
    onnx = require_onnx()
    source = node.source
    try:
        return onnx.defs.get_schema(source.op, source.version, source.domain)
    except onnx.defs.SchemaError:
        return None


def _default(attribute: onnx.defs.OpSchema.Attribute) -> Any:
    """The value of an attribute that a node leaves out; None: it has none."""
    proto = attribute.default_value
    return GraphReader({}, None, "schema").attribute(proto) if proto.type else None


def _standard(node: Node, schema: Any) -> onnx.FunctionProto | None:
    """The definition of an op of the standard by other ops, if it has one."""
    onnx = require_onnx()
    source = node.source
    if schema.has_function:
        versions = [v for v in schema.function_opset_versions if v <= source.version]
        if versions:
            text = schema.get_function_with_opset_version(max(versions))
            return onnx.FunctionProto.FromString(text) if isinstance(text, bytes) else text
    if schema.has_context_dependent_function:
        versions = [
            v for v in schema.context_dependent_function_opset_versions if v <= source.version
        ]
        # such a definition is made for one node: its attributes and types of operands
        if versions:
            types = [_type_proto(onnx, value).SerializeToString() for value in node.operands]
            text = schema.get_context_dependent_function_with_opset_version(
                max(versions), _node_proto(onnx, node).SerializeToString(), types
            )
            if text:
                return onnx.FunctionProto.FromString(text)
    return None


def _node_proto(onnx: Any, node: Node) -> onnx.NodeProto:
    source = node.source
    proto = onnx.NodeProto()
    proto.op_type, proto.domain, proto.name = source.op, source.domain, source.label
    proto.input.extend(source.inputs)
    proto.output.extend(source.outputs)
    origin = {a.name: a for a in source.origin.attribute} if source.origin is not None else {}
    for name, value in source.attributes.items():
        # an attribute that refers to one of an enclosing function has its value in `value` only
        if name in origin and not origin[name].ref_attr_name:
            proto.attribute.append(origin[name])
        elif isinstance(value, SourceGraph):
            raise Unsupported(f"passes the graph {name!r} on to a function")
        else:
            array = onnx.numpy_helper.from_array(value) if hasattr(value, "dtype") else value
            proto.attribute.append(onnx.helper.make_attribute(name, array))
    return proto


def _type_proto(onnx: Any, value: Value) -> onnx.TypeProto:
    proto = onnx.TypeProto()
    if isinstance(value, Imported):
        _set_tensor(proto.tensor_type, value)
    elif isinstance(value, Items):
        tensor = proto.sequence_type.elem_type.tensor_type
        if value:
            tensor.elem_type = code_of(value[0].dtype)
    return proto


def _set_tensor(proto: onnx.TypeProto.Tensor, value: Imported) -> None:
    proto.elem_type = code_of(value.dtype)
    # a shape without dimensions is that of a scalar; no shape is an unknown one
    proto.shape.SetInParent()
    for dim in value.shape:
        entry = proto.shape.dim.add()
        try:
            entry.dim_value = int(dim)
        except TypeError:
            entry.dim_param = str(dim)


LOADED = _ops.__name__
"""Importing the package fills the table."""
