"""Walks the nodes of a TorchScript graph, and calls torch's ops of the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from max._host.process_caches import cached_results
from max.importers.errors import ImportFailure, ModelFileError
from max.importers.torch.script.functions import FUNCTIONS, NUMBERS, dtype_of_number, is_plain

__all__ = ["Place", "ScriptWalk"]

_MOST_STEPS = 500_000
"""Nodes that a call may execute, those of unrolled loops included."""
_DEEPEST = 64
"""Calls within calls, and blocks within blocks."""
_CPU = torch.device("cpu")
# lists that hold tensors, but need no op of torch
_OF_LISTS = {
    "__getitem__", "append", "_set_item", "extend", "insert", "pop", "len", "slice", "list", "copy", "clear", "reverse",
    "keys", "values", "items", "get", "__contains__", "dict", "update", "setdefault",
}  # fmt: skip


class Place:
    """An object of the program: the module or one within it.

    Attributes:
        path: Its place, with dots.
        script: The object of torch.
    """

    def __init__(self, path: str, script: Any) -> None:
        self.path = path
        self.script = script

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)


class _Fields:
    """An instance of a class that the program defines."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}


@cached_results(4096)
def _overload(schema: str) -> tuple[Any, tuple[tuple[str, str, bool], ...]]:
    """An op of torch, and the names, types and kinds of its parameters.

    Raises:
        ImportFailure: There is no such op.
    """
    parsed = torch._C.parse_schema(schema)
    namespace, _, name = parsed.name.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
        op = getattr(packet, parsed.overload_name or "default")
    except AttributeError as error:
        raise ImportFailure(f"the op {parsed.name} is not known to torch") from error
    parameters = tuple(
        (a.name, str(getattr(a, "real_type", a.type)), bool(a.kwarg_only)) for a in parsed.arguments
    )
    return op, parameters


class ScriptWalk:
    """A call of a TorchScript program.

    Args:
        tensors: Tensors that stand for attributes of the program and its constants, by path.
        state: The values of attributes that the program sets, by path; it is changed.
    """

    def __init__(self, tensors: Mapping[str, Any], state: dict[str, Any]) -> None:
        self._tensors = tensors
        self.state = state
        self._steps = 0
        self._depth = 0

    def call(self, graph: Any, arguments: Sequence[Any], prefix: str = "") -> Any:
        """The result of a graph.

        Args:
            graph: The graph.
            arguments: The object, and the arguments of the call.
            prefix: The name of the method, for its constants.
        """
        env: dict[str, Any] = {}
        inputs = list(graph.inputs())
        if len(inputs) != len(arguments):
            raise ImportFailure(
                f"the program takes {len(inputs) - 1} arguments, got {len(arguments) - 1}"
            )
        for value, argument in zip(inputs, arguments, strict=True):
            env[value.debugName()] = argument
        results = self._run(graph, env, prefix)
        return results[0] if len(results) == 1 else tuple(results)

    def _run(self, block: Any, env: dict[str, Any], prefix: str) -> list[Any]:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ModelFileError(f"the program is nested deeper than {_DEEPEST} levels")
        try:
            for node in block.nodes():
                self._steps += 1
                if self._steps > _MOST_STEPS:
                    raise ModelFileError(f"the program executes more than {_MOST_STEPS} nodes")
                self._step(node, env, prefix)
            return [env[value.debugName()] for value in block.outputs()]
        finally:
            self._depth -= 1

    def _step(self, node: Any, env: dict[str, Any], prefix: str) -> None:
        kind = node.kind()
        special = _SPECIAL.get(kind)
        if special is not None:
            special(self, node, env, prefix)
            return
        values = [env[value.debugName()] for value in node.inputs()]
        try:
            result = self._call_result(node, kind, values)
        except (
            RuntimeError,
            TypeError,
            NotImplementedError,
            KeyError,
            IndexError,
            ArithmeticError,
        ) as error:
            # torch.export handles its own errors, such as of conditions that depend on data
            if type(error).__module__.startswith("torch"):
                raise
            place = node.sourceRange().strip().splitlines()
            where = f" ({place[0].strip()})" if place else ""
            raise ImportFailure(f"{kind}: {error}{where}") from error
        self._bind(node, env, result)

    def _call_result(self, node: Any, kind: str, values: list[Any]) -> Any:
        name = kind.partition("::")[2]
        # ops of numbers have the names of ops of tensors, which would make tensors of them
        if kind.startswith("aten::") and name in NUMBERS and (
            is_plain(values) or (name in _OF_LISTS and isinstance(values[0], list | tuple | dict))
        ):  # fmt: skip
            return NUMBERS[name](*values)
        if kind in FUNCTIONS:
            return FUNCTIONS[kind](*values)
        schema = node.schema()
        if schema == "(no schema)":
            raise ImportFailure(f"the node {kind} of the program is not known")
        op, parameters = _overload(schema)
        arguments: list[Any] = []
        named: dict[str, Any] = {}
        for value, (label, type_, is_named) in zip(values, parameters, strict=False):
            if "ScalarType" in type_:
                value = dtype_of_number(value)
            elif "Device" in type_ and value is not None:
                value = _CPU
            elif "Layout" in type_:
                value = None if value is None else torch.strided
            elif "MemoryFormat" in type_:
                continue
            # TorchScript passes numbers where ops take tensors
            elif type_ == "Tensor" and not isinstance(value, torch.Tensor) and value is not None:
                value = torch.scalar_tensor(value, dtype=_dtype_of(value))
            if is_named:
                named[label] = value
            else:
                arguments.append(value)
        return op(*arguments, **named)

    @staticmethod
    def _bind(node: Any, env: dict[str, Any], result: Any) -> None:
        outputs = list(node.outputs())
        if len(outputs) == 1:
            env[outputs[0].debugName()] = result
        elif outputs:
            for value, item in zip(outputs, result, strict=True):
                env[value.debugName()] = item

    # nodes of their own kinds --------------------------------------------------------------------

    def _constant(self, node: Any, env: dict[str, Any], prefix: str) -> None:
        (output,) = node.outputs()
        name = output.debugName()
        # constants that are tensors are buffers of the traced module
        value = self._tensors.get(f"{prefix}#{name}")
        env[name] = node.output().toIValue() if value is None else value

    def _get_attribute(self, node: Any, env: dict[str, Any], prefix: str) -> None:
        (owner,) = [env[value.debugName()] for value in node.inputs()]
        name = node.s("name")
        if isinstance(owner, _Fields):
            found = owner.values[name]
        else:
            found = self.attribute(owner, name)
        self._bind(node, env, found)

    def attribute(self, owner: Place, name: str) -> Any:
        """The value of an attribute of an object."""
        path = f"{owner.path}.{name}" if owner.path else name
        # what the program has set, before what the module holds
        if path in self.state:
            return self.state[path]
        if path in self._tensors:
            return self._tensors[path]
        value = getattr(owner.script, name)
        is_object = isinstance(
            value, torch.jit.ScriptModule | torch._C.ScriptObject | torch._C.ScriptModule
        )
        if is_object or isinstance(value, torch.nn.Module):
            return Place(path, value)
        return value

    def _set_attribute(self, node: Any, env: dict[str, Any], prefix: str) -> None:
        owner, value = [env[value.debugName()] for value in node.inputs()]
        name = node.s("name")
        if isinstance(owner, _Fields):
            owner.values[name] = value
        else:
            self.state[f"{owner.path}.{name}" if owner.path else name] = value

    def _create(self, node: Any, env: dict[str, Any], prefix: str) -> None:
        self._bind(node, env, _Fields())

    def _call_method(self, node: Any, env: dict[str, Any], prefix: str) -> None:
        owner, *values = [env[value.debugName()] for value in node.inputs()]
        name = node.s("name")
        if not isinstance(owner, Place):
            raise ImportFailure(f"the method {name!r} of an object of the program is not known")
        script = getattr(owner.script, "_c", owner.script)
        graph = script._get_method(name).graph
        self._bind(node, env, self.call(graph, [owner, *values], f"{owner.path}.{name}"))

    def _if(self, node: Any, env: dict[str, Any], prefix: str) -> None:
        (condition,) = [env[value.debugName()] for value in node.inputs()]
        then, otherwise = node.blocks()
        results = self._run(then if bool(condition) else otherwise, env, prefix)
        for value, result in zip(node.outputs(), results, strict=True):
            env[value.debugName()] = result

    def _loop(self, node: Any, env: dict[str, Any], prefix: str) -> None:
        limit, going, *state = [env[value.debugName()] for value in node.inputs()]
        (body,) = node.blocks()
        names = [value.debugName() for value in body.inputs()]
        number = 0
        # a loop has both: a number of rounds, and a condition
        while number < limit and bool(going):
            env.update(zip(names, [number, *state], strict=True))
            going, *state = self._run(body, env, prefix)
            number += 1
        for value, result in zip(node.outputs(), state, strict=True):
            env[value.debugName()] = result

    def _list(self, node: Any, env: dict[str, Any], prefix: str) -> None:
        self._bind(node, env, [env[value.debugName()] for value in node.inputs()])

    def _tuple(self, node: Any, env: dict[str, Any], prefix: str) -> None:
        env[node.output().debugName()] = tuple(env[value.debugName()] for value in node.inputs())

    def _dictionary(self, node: Any, env: dict[str, Any], prefix: str) -> None:
        values = [env[value.debugName()] for value in node.inputs()]
        self._bind(node, env, dict(zip(values[::2], values[1::2], strict=True)))

    def _unpack(self, node: Any, env: dict[str, Any], prefix: str) -> None:
        (values,) = [env[value.debugName()] for value in node.inputs()]
        for output, value in zip(node.outputs(), values, strict=True):
            env[output.debugName()] = value

    def _tuple_index(self, node: Any, env: dict[str, Any], prefix: str) -> None:
        values, index = [env[value.debugName()] for value in node.inputs()]
        env[node.output().debugName()] = values[index]

    def _tuple_slice(self, node: Any, env: dict[str, Any], prefix: str) -> None:
        (values,) = [env[value.debugName()] for value in node.inputs()]
        env[node.output().debugName()] = values[node.i("beg") : node.i("end")]

    def _text(self, node: Any, env: dict[str, Any], prefix: str) -> None:
        text, *values = [env[value.debugName()] for value in node.inputs()]
        self._bind(node, env, text.format(*values))


_SPECIAL = {
    "prim::Constant": ScriptWalk._constant, "prim::GetAttr": ScriptWalk._get_attribute,
    "prim::SetAttr": ScriptWalk._set_attribute, "prim::CreateObject": ScriptWalk._create,
    "prim::CallMethod": ScriptWalk._call_method, "prim::If": ScriptWalk._if, "prim::Loop": ScriptWalk._loop,
    "prim::ListConstruct": ScriptWalk._list, "prim::TupleConstruct": ScriptWalk._tuple,
    "prim::DictConstruct": ScriptWalk._dictionary, "prim::ListUnpack": ScriptWalk._unpack,
    "prim::TupleUnpack": ScriptWalk._unpack, "prim::TupleIndex": ScriptWalk._tuple_index,
    "prim::TupleSlice": ScriptWalk._tuple_slice, "aten::format": ScriptWalk._text,
}  # fmt: skip


def _dtype_of(value: Any) -> torch.dtype:
    if isinstance(value, bool | torch.SymBool):
        return torch.bool
    return torch.int64 if isinstance(value, int | torch.SymInt) else torch.float32
