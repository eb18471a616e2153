"""A TorchScript module as a module that torch.export takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from max.importers.errors import ImportFailure
from max.importers.torch.script.walk import Place, ScriptWalk

__all__ = ["ScriptProgram"]


class ScriptProgram(torch.nn.Module):
    """A method of a TorchScript module. Its arguments are a tuple, and a tuple of the attributes that it sets.

    Args:
        script: The module.
        method: The method.

    Attributes:
        parameters_: The names of the method's arguments, and their types as text.
        state: The paths of the attributes that the method sets.
    """

    def __init__(self, script: torch.jit.ScriptModule, method: str = "forward") -> None:
        super().__init__()
        inner = script._c
        if not inner._has_method(method):
            raise ImportFailure(f"the TorchScript module has no method {method!r}")
        graph = inner._get_method(method).graph.copy()
        torch._C._jit_pass_inline(graph)  # pyright: ignore[reportAttributeAccessIssue]
        # in a tuple, as torch would register a module as a part
        self._held = (script, graph)
        # the first input is the object
        inputs = list(graph.inputs())[1:]
        schema = inner._get_method(method).schema.arguments[1:]
        self.parameters_ = [(a.name, str(v.type())) for a, v in zip(schema, inputs, strict=True)]
        self.defaults = [a.default_value if a.has_default_value() else ... for a in schema]
        self.state = sorted(set(_set_paths(graph)))
        self._final = SimpleNamespace(values={})
        self._names: dict[str, str] = {}
        self._take_tensors(script, "")
        # what the method sets comes in as `state`
        for path in self.state:
            self._names.pop(path, None)
        self._take_constants(graph, method)

    @property
    def final(self) -> dict[str, Any]:
        """What the last call, or the last trace, set those attributes to that are no tensors."""
        return self._final.values

    def initial(self) -> dict[str, Any]:
        """The attributes that the method sets, as the module has them."""
        script, _ = self._held
        found: dict[str, Any] = {}
        for path in self.state:
            value: Any = script
            for name in path.split("."):
                value = getattr(value, name)
            found[path] = value.detach() if isinstance(value, torch.Tensor) else value
        return found

    def _take_tensors(self, script: Any, prefix: str) -> None:
        """Registers all tensors among the attributes of the module and those within it."""
        inner = getattr(script, "_c", script)
        for name in [n for n, _ in _attributes(inner)]:
            value = getattr(script, name, None)
            path = f"{prefix}{name}"
            if isinstance(value, torch.Tensor):
                self._register(path, value)
            elif isinstance(value, torch.jit.ScriptModule):
                self._take_tensors(value, f"{path}.")

    def _take_constants(self, graph: Any, prefix: str) -> None:
        for node in _nodes(graph):
            if node.kind() == "prim::Constant":
                value = node.output().toIValue()
                if isinstance(value, torch.Tensor):
                    self._register(f"{prefix}#{node.output().debugName()}", value)

    def _register(self, path: str, tensor: torch.Tensor) -> None:
        name = f"tensor_{len(self._names)}"
        self._names[path] = name
        self.register_buffer(name, tensor.detach())

    def forward(self, args: Sequence[Any], state: Sequence[Any]) -> tuple[Any, list[Any]]:
        script, graph = self._held
        tensors = {path: getattr(self, name) for path, name in self._names.items()}
        walk = ScriptWalk(tensors, dict(zip(self.state, state, strict=True)))
        result = walk.call(graph, [Place("", script), *args], _method_of(self._names))
        final = {path: walk.state[path] for path in self.state}
        # torch.export restores plain attributes
        self._final.values = {
            path: value for path, value in final.items() if not isinstance(value, torch.Tensor)
        }
        return result, [value for value in final.values() if isinstance(value, torch.Tensor)]


def _method_of(names: dict[str, str]) -> str:
    constants = [path for path in names if "#" in path]
    return constants[0].partition("#")[0] if constants else ""


def _attributes(inner: Any) -> list[tuple[str, Any]]:
    type_ = inner._type()
    if hasattr(type_, "getAttributes"):
        return list(type_.getAttributes())
    names = [name for name, _ in torch._C.ModuleDict(inner).items()]  # pyright: ignore[reportAttributeAccessIssue]
    names += [name for name, _ in torch._C.ParameterDict(inner).items()]  # pyright: ignore[reportAttributeAccessIssue]
    names += [name for name, _ in torch._C.BufferDict(inner).items()]  # pyright: ignore[reportAttributeAccessIssue]
    return [(name, None) for name in names]


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _set_paths(graph: Any) -> Iterator[str]:
    """The paths of the attributes that a graph sets."""
    # the objects within the module by the names of the values that hold them
    objects = {list(graph.inputs())[0].debugName(): ""}
    for node in _nodes(graph):
        if node.kind() not in ("prim::GetAttr", "prim::SetAttr"):
            continue
        owner = objects.get(list(node.inputs())[0].debugName())
        if owner is None:
            continue
        path = f"{owner}.{node.s('name')}" if owner else node.s("name")
        if node.kind() == "prim::SetAttr":
            yield path
        else:
            objects[node.output().debugName()] = path
