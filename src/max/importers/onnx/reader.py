"""Reads ONNX models, as untrusted input, into source graphs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from max.importers.errors import ModelFileError, Unsupported
from max.importers.onnx.element_types import TEXT, dtype_of, storage_of
from max.importers.onnx.large_data import read_file
from max.importers.onnx.tensors import array_of
from max.importers.source import InputType, SourceGraph, SourceNode

if TYPE_CHECKING:
    import onnx

__all__ = ["Model", "read_model", "require_onnx"]

Array = npt.NDArray[Any]

_DEEPEST = 16
"""Bodies within bodies."""
# far more than models have: bounds for files that are damaged or hostile
_MOST_NODES = 1_000_000
_MOST_INPUTS = 100_000
_LARGEST_RANK = 64


def require_onnx() -> Any:
    """The package `onnx`.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import onnx
    except ImportError as error:
        raise ImportError(
            'ONNX models are read with the package onnx: pip install "supremum[onnx]"'
        ) from error
    return onnx


class Model:
    """A model that was read.

    Attributes:
        graph: Its graph.
        opsets: The version of each op set by domain.
        functions: The functions that the model defines, by domain and name.
        proto: The protobuf message.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        folder: Path | None,
        file: str,
        large: Mapping[str, Array] | None = None,
    ) -> None:
        self.proto = proto
        self.opsets = _opsets(proto.opset_import)
        self.functions = {(_domain(f.domain), f.name): f for f in proto.functions}
        reader = GraphReader(self.opsets, folder, file, large=large)
        self.graph = reader.graph(proto.graph, 0)


def read_model(source: str | os.PathLike[str] | bytes | onnx.ModelProto) -> Model:
    """Reads a model.

    Args:
        source: A path, the bytes of a file, or the message itself.

    Raises:
        ImportError: The package `onnx` is not installed.
        ModelFileError: It is no valid model.
        OSError: The file cannot be read.
    """
    package = require_onnx()
    folder, file = None, "model.onnx"
    large: Mapping[str, Array] = {}
    if isinstance(source, bytes | bytearray | memoryview):
        proto = _parse(package, bytes(source), file)
    elif isinstance(source, str | os.PathLike):
        path = Path(source)
        folder, file = path.resolve().parent, str(path)
        data, large = read_file(path)
        proto = _parse(package, data, file)
    elif isinstance(source, package.ModelProto):
        proto = source
    else:
        raise TypeError(
            f"a model is a {type(source).__name__}, expected a path, bytes or an onnx.ModelProto"
        )
    if not proto.HasField("graph"):
        raise ModelFileError(f"{file} is not an ONNX model: it has no graph")
    try:
        return Model(proto, folder, file, large)
    except Unsupported as error:
        raise ModelFileError(f"{file}: an input or output {error}") from error
    except RecursionError as error:
        raise ModelFileError(f"{file}: the model is nested too deeply") from error


def _parse(package: Any, data: bytes, file: str) -> onnx.ModelProto:
    proto = package.ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception as error:
        raise ModelFileError(f"{file} is not an ONNX model: {error}") from error
    return proto


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _opsets(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    return {_domain(entry.domain): entry.version for entry in imports}


class GraphReader:
    """Reads the graphs of a model or of a function.

    Args:
        opsets: The version of each op set by domain.
        folder: The folder of the model's file, with its external data; None: it has none.
        file: The path of the file, for messages.
        references: Attributes of the call, for the nodes of a function.
        large: Bytes of tensors that were read before, by their locations.
    """

    def __init__(
        self,
        opsets: Mapping[str, int],
        folder: Path | None,
        file: str,
        references: Mapping[str, Any] | None = None,
        large: Mapping[str, Array] | None = None,
    ) -> None:
        self._opsets = opsets
        self._folder = folder
        self._file = file
        self._references = references
        self._large = large or {}

    def graph(self, proto: onnx.GraphProto, depth: int) -> SourceGraph:
        """A graph with its bodies.

        Raises:
            ModelFileError: It is not valid.
        """
        if depth > _DEEPEST:
            raise ModelFileError(f"{self._file}: bodies are nested deeper than {_DEEPEST}")
        constants = {t.name: self.array(t) for t in proto.initializer}
        for sparse in proto.sparse_initializer:
            constants[sparse.values.name] = self._dense(sparse)
        # files of old versions list initializers among the inputs too
        inputs = [(i.name, _type(i.type)) for i in proto.input if i.name not in constants]
        outputs = [(o.name, _type(o.type)) for o in proto.output]
        nodes = self.nodes(proto.node, depth)
        defined = [*constants, *(name for name, _ in inputs)]
        # a body sees the names around it, so only the outermost graph can be checked
        if depth == 0:
            nodes = self._sort_nodes(nodes, defined)
            self._check_outputs(nodes, defined, [name for name, _ in outputs])
        return SourceGraph(
            proto.name or "main", tuple(inputs), tuple(outputs), tuple(nodes), constants, self._file
        )

    def nodes(self, protos: Sequence[onnx.NodeProto], depth: int) -> list[SourceNode]:
        """Nodes with their attributes."""
        if len(protos) > _MOST_NODES:
            raise ModelFileError(f"{self._file}: {len(protos)} nodes, more than {_MOST_NODES}")
        return [self._node(node, number, depth) for number, node in enumerate(protos)]

    def _node(self, proto: onnx.NodeProto, index: int, depth: int) -> SourceNode:
        domain = _domain(proto.domain)
        if len(proto.input) > _MOST_INPUTS or len(proto.output) > _MOST_INPUTS:
            raise ModelFileError(
                f"{self._file}: node {index} has more than {_MOST_INPUTS} operands"
            )
        attributes: dict[str, Any] = {}
        for attribute in proto.attribute:
            if attribute.ref_attr_name:
                # in a function: the attribute of the call, if it has one
                value = (self._references or {}).get(attribute.ref_attr_name)
            else:
                value = self.attribute(attribute, depth)
            if value is not None:
                attributes[attribute.name] = value
        return SourceNode(
            proto.op_type, domain, self._opsets.get(domain, 1), tuple(proto.input),
            tuple(proto.output), attributes, proto.name, index, proto,
        )  # fmt: skip

    def attribute(self, proto: onnx.AttributeProto, depth: int = 1) -> Any:
        """The value of an attribute."""
        kinds = type(proto)
        match proto.type:
            case kinds.FLOAT:
                return proto.f
            case kinds.INT:
                return proto.i
            case kinds.STRING:
                return _text(proto.s)
            case kinds.TENSOR:
                return self.array(proto.t)
            case kinds.SPARSE_TENSOR:
                return self._dense(proto.sparse_tensor)
            case kinds.GRAPH:
                return self.graph(proto.g, depth + 1)
            case kinds.TYPE_PROTO:
                return _type(proto.tp)
            case kinds.FLOATS:
                return list(proto.floats)
            case kinds.INTS:
                return list(proto.ints)
            case kinds.STRINGS:
                return [_text(s) for s in proto.strings]
            case kinds.TENSORS:
                return [self.array(t) for t in proto.tensors]
            case _:
                raise ModelFileError(
                    f"{self._file}: the attribute {proto.name!r} has no known type"
                )

    def array(self, proto: onnx.TensorProto) -> Array:
        """The elements of a tensor."""
        return array_of(proto, self._folder, self._file, self._large)

    def _dense(self, proto: onnx.SparseTensorProto) -> Array:
        values, indices = self.array(proto.values), self.array(proto.indices)
        shape = tuple(proto.dims)
        size = 1
        for dim in shape:
            size *= dim
        # a damaged shape must not take any amount of memory
        if not 0 <= size <= 1 << 31:
            raise ModelFileError(f"{self._file}: a sparse tensor has the shape {shape}")
        dense = np.zeros(size, values.dtype)
        try:
            # positions in the flat tensor, or one row of coordinates per value
            flat = (
                indices
                if indices.ndim == 1
                else np.ravel_multi_index(tuple(indices.T.astype(np.int64)), shape)
            )
            dense[flat] = values
        except (ValueError, IndexError) as error:
            raise ModelFileError(f"{self._file}: a sparse tensor: {error}") from error
        return dense.reshape(shape)

    def _sort_nodes(
        self, nodes: list[SourceNode], defined_names: Iterable[str]
    ) -> list[SourceNode]:
        """The nodes behind those whose results they use; mostly as they are."""
        maker: dict[str, int] = {}
        known = set(defined_names)
        for index, node in enumerate(nodes):
            for name in node.outputs:
                if name and (name in maker or name in known):
                    raise ModelFileError(f"{self._file}: two nodes define {name!r}")
                if name:
                    maker[name] = index
        ready = set(known)
        # the standard demands this order; what follows mends files without it
        if all(_is_ready(node, ready) for node in nodes):
            return nodes
        uses = [{maker[name] for name in node.names_read if name in maker} for node in nodes]
        for node in nodes:
            unknown = sorted(
                name for name in node.names_read if name not in maker and name not in known
            )
            if unknown:
                raise ModelFileError(
                    f"{self._file}: node {node.number} ({node.op}) uses {unknown[0]!r}, which nothing defines"
                )
        users: list[list[int]] = [[] for _ in nodes]
        for index, makers in enumerate(uses):
            for other in makers:
                users[other].append(index)
        missing = [len(makers) for makers in uses]
        order = [index for index, count in enumerate(missing) if count == 0]
        # the list grows meanwhile
        for index in order:
            for user in users[index]:
                missing[user] -= 1
                if missing[user] == 0:
                    order.append(user)
        if len(order) < len(nodes):
            # nodes of a cycle, and those behind it, are never ready
            stuck = next(node for node, count in zip(nodes, missing, strict=True) if count)
            raise ModelFileError(
                f"{self._file}: node {stuck.number} ({stuck.op}) is part of a cycle"
            )
        return [nodes[index] for index in order]

    def _check_outputs(
        self, nodes: Sequence[SourceNode], defined_names: Iterable[str], outputs: Iterable[str]
    ) -> None:
        known = set(defined_names).union(*(node.outputs for node in nodes))
        for name in outputs:
            if name not in known:
                raise ModelFileError(f"{self._file}: nothing defines the output {name!r}")


def _is_ready(node: SourceNode, ready: set[str]) -> bool:
    if not node.names_read <= ready:
        return False
    ready.update(node.outputs)
    return True


def _text(data: bytes) -> str:
    # texts that are not UTF-8 stay distinct
    return data.decode("utf-8", errors="surrogateescape")


def _type(proto: onnx.TypeProto) -> InputType:
    match proto.WhichOneof("value"):
        case "optional_type":
            inner = _type(proto.optional_type.elem_type)
            return InputType(inner.kind, inner.dtype, inner.shape, True, inner.stored_as)
        case "sequence_type":
            inner = _type(proto.sequence_type.elem_type)
            return InputType("sequence", inner.dtype, None, False, inner.stored_as)
        case "tensor_type":
            tensor = proto.tensor_type
            code = tensor.elem_type
            shape = _shape(tensor.shape) if tensor.HasField("shape") else None
            if code == TEXT:
                return InputType("text", None, shape)
            return InputType(
                "tensor", dtype_of(code) if code else None, shape, False, storage_of(code)
            )
        case _:
            return InputType("tensor", None, None)


def _shape(proto: onnx.TensorShapeProto) -> tuple[int | str | None, ...]:
    if len(proto.dim) > _LARGEST_RANK:
        raise ModelFileError(f"a value of rank {len(proto.dim)}; at most {_LARGEST_RANK}")
    sizes: list[int | str | None] = []
    for dim in proto.dim:
        if dim.HasField("dim_value"):
            sizes.append(dim.dim_value if dim.dim_value >= 0 else None)
        else:
            sizes.append(dim.dim_param or None)
    return tuple(sizes)
