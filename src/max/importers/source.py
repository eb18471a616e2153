"""A model as an importer reads it: nodes in execution order, constants, inputs and outputs, all by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy.typing as npt

from max.dtype import DType

__all__ = ["InputType", "SourceGraph", "SourceNode"]


@dataclass(frozen=True)
class InputType:
    """The declared type of an input or output.

    Attributes:
        kind: "tensor", "sequence" (of tensors), or "text" (a tensor of strings).
        dtype: The element type of the tensors; None for text, or where the model does not say.
        shape: Sizes, names of dynamic sizes, None for dynamic ones without a name; None: the rank is not declared.
        optional: Whether the value may be absent.
        stored_as: The NumPy dtype of arrays that callers see where it is not that of `dtype`, such as "int4".
    """

    kind: str = "tensor"
    dtype: DType | None = None
    shape: tuple[int | str | None, ...] | None = None
    optional: bool = False
    stored_as: str = ""


@dataclass(frozen=True)
class SourceNode:
    """An op of the source model.

    Attributes:
        op: The name of the op.
        domain: The domain of the name; "" for the framework's own.
        version: The version of the op's definition.
        inputs: Names of values; "" for an operand that is left out.
        outputs: Names of results; "" for a result that nothing uses.
        attributes: Numbers, texts, arrays, lists, and `SourceGraph` for bodies of control flow.
        label: The name of the node for messages.
        number: The position in the file.
        origin: The node as the framework has it; None for one that an importer made.
        depth: The number of functions and branches that it was expanded from.
    """

    op: str
    domain: str
    version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    number: int = 0
    origin: Any = field(default=None, compare=False, repr=False)
    depth: int = 0

    @property
    def full_name(self) -> str:
        """The op with its domain."""
        return f"{self.domain}:{self.op}" if self.domain else self.op

    @property
    def bodies(self) -> list[SourceGraph]:
        """The graphs among the attributes."""
        return [value for value in self.attributes.values() if isinstance(value, SourceGraph)]

    @cached_property
    def names_read(self) -> frozenset[str]:
        """The names that the node reads: its operands, and what its bodies capture."""
        captured = [body.captured_names for body in self.bodies]
        return frozenset(name for name in self.inputs if name).union(*captured)


@dataclass(frozen=True)
class SourceGraph:
    """A graph of a source model, or the body of a branch or loop.

    Attributes:
        name: The name of the graph.
        inputs: Names and declared types of the inputs.
        outputs: Names and declared types of the outputs.
        nodes: The nodes, each behind those whose results it uses.
        constants: Arrays by name. Arrays of object hold strings.
        file: The path of the model, for source locations.
    """

    name: str
    inputs: tuple[tuple[str, InputType], ...]
    outputs: tuple[tuple[str, InputType], ...]
    nodes: tuple[SourceNode, ...]
    constants: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    file: str = "model"

    @cached_property
    def captured_names(self) -> frozenset[str]:
        """The names of enclosing graphs that the graph and its bodies read."""
        defined = {name for name, _ in self.inputs} | set(self.constants)
        read: set[str] = set()
        for node in self.nodes:
            read |= node.names_read - defined
            defined |= set(node.outputs)
        return frozenset(read | {name for name, _ in self.outputs if name not in defined})

    def with_prefix(self, prefix: str, bound: Mapping[str, str]) -> SourceGraph:
        """The graph with a prefix for the names that it defines.

        Args:
            prefix: The prefix.
            bound: New names that are used as they are, such as those of the values that stand for inputs.
        """
        names = dict(bound)
        for name in (*self.constants, *(name for name, _ in self.inputs)):
            names.setdefault(name, prefix + name)
        for node in self.nodes:
            for name in node.outputs:
                if name:
                    names.setdefault(name, prefix + name)
        return SourceGraph(
            self.name,
            tuple((names[name], type_) for name, type_ in self.inputs),
            tuple((names.get(name, name), type_) for name, type_ in self.outputs),
            tuple(_renamed_node(node, names) for node in self.nodes),
            {names[name]: array for name, array in self.constants.items()},
            self.file,
        )

    def capturing(self, names: Mapping[str, str]) -> SourceGraph:
        """A body with new names for what it captures; names that it defines itself stay.

        Args:
            names: New names by name.
        """
        own = {name for name, _ in self.inputs} | set(self.constants)
        own |= {name for node in self.nodes for name in node.outputs}
        outer = {
            name: names[name] for name in self.captured_names if name in names and name not in own
        }
        if not outer:
            return self
        return replace(
            self,
            outputs=tuple((outer.get(name, name), type_) for name, type_ in self.outputs),
            nodes=tuple(_renamed_node(node, outer) for node in self.nodes),
        )


def _renamed_node(node: SourceNode, names: Mapping[str, str]) -> SourceNode:
    attributes = {
        key: value.capturing(names) if isinstance(value, SourceGraph) else value
        for key, value in node.attributes.items()
    } if node.bodies else node.attributes  # fmt: skip
    return replace(
        node,
        inputs=tuple(names.get(name, name) for name in node.inputs),
        outputs=tuple(names.get(name, name) for name in node.outputs),
        attributes=attributes,
    )
