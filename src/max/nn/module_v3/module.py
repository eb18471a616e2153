"""The base of layers of eager tensors."""

# compiled modules access the private memory of tensors
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, dataclass_transform, overload

from max import driver
from max._html import text_html
from max._names import keyword_aliases
from max.driver import Device, DLPackArray
from max.dtype import DType
from max.engine import InferenceSession
from max.experimental.programs.sessions import session_of
from max.experimental.tensor import Tensor, defaults
from max.experimental.tensors.placement import Layout, OnDevice
from max.graph import BufferType, Graph, Type, ops
from max.nn.module_v3.result_structure import flatten_result, result_of

__all__ = ["Module", "TransparentModule", "module_dataclass"]

_M = TypeVar("_M", bound="type[Module]")

if TYPE_CHECKING:
    # an unsubscripted `Module` has any arguments and result
    from typing_extensions import ParamSpec
    from typing_extensions import TypeVar as _TypeVar

    _P = ParamSpec("_P", default=...)
    _R = _TypeVar("_R", default=Any)
else:
    from typing import ParamSpec

    _P = ParamSpec("_P")
    _R = TypeVar("_R")


class _ParameterDevice:
    """The attribute `Module.device`.

    Not a property: a subclass may set an attribute `device` of its own, and a dataclass may have it as a field.
    """

    def __get__(self, module: Module | None, owner: type[Module]) -> Device:
        if module is None:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute 'device'")
        first = next(iter(module.parameters), None)
        return defaults()[1] if first is None else first[1].device


class Module(Generic[_P, _R]):
    """A layer or model: a tree of modules with tensors as parameters, and a `__call__` that applies it.

    Attributes that are tensors are the parameters of the module; those that are modules are its children. The qualified
    name of a parameter is the path of attributes to it, joined by periods::

        @module_dataclass
        class Linear(Module):
            weight: Tensor
            bias: Tensor | int = 0

            def __call__(self, x: Tensor) -> Tensor:
                return x @ self.weight.T + self.bias

        linear = Linear(Tensor.zeros([5, 4]))
        linear(Tensor.ones([4]))                    # runs eagerly
        linear.compile(TensorType(...))             # compiles the whole module

    ``Module[[Tensor], Tensor]`` states the arguments and the result of a module for type checkers.
    """

    device = _ParameterDevice()
    """The device of the first parameter; the default device if there is none."""

    name_transparent: bool = False
    """Whether the qualified names of descendants leave out the name of this module; see `TransparentModule`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the module. Subclasses define it, or `forward`."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the module: `__call__` by another name."""
        if type(self).__call__ is Module.__call__:
            raise NotImplementedError(
                f"{type(self).__name__} does not define __call__, nor forward"
            )
        return self(*args, **kwargs)

    def __tree_flatten__(self) -> tuple[dict[str, Any], None]:
        """The attributes, as children of a node of `max.tree`."""
        return dict(vars(self)), None

    @classmethod
    def __tree_empty__(cls, meta: object) -> Self:
        """A module without attributes, which `max.tree` sets."""
        return cls.__new__(cls)

    @property
    def local_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Name and tensor of each parameter that the module itself holds."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                yield name, value

    @property
    def children(self) -> Iterable[tuple[str, Module]]:
        """Name and module of each child."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    @property
    def descendants(self) -> Iterable[tuple[str, Module]]:
        """Qualified name and module of each child and of its descendants, depth first."""
        for name, child in self.children:
            yield name, child
            prefix = _prefix(name, child)
            for inner, descendant in child.descendants:
                yield prefix + inner, descendant

    @property
    def parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Qualified name and tensor of each parameter: those of the module itself, then those of its children.

        Raises:
            ValueError: Two parameters have the same name, because a `TransparentModule` omits its own name.
        """
        seen: set[str] = set()
        for name, parameter in self._all_parameters(""):
            if name in seen:
                raise ValueError(
                    f"two parameters of {type(self).__name__} have the name {name!r}, as a module is name_transparent"
                )
            seen.add(name)
            yield name, parameter

    def _all_parameters(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.local_parameters:
            yield prefix + name, parameter
        for name, child in self.children:
            yield from child._all_parameters(prefix + _prefix(name, child))

    def apply_to_local_parameters(self, f: Callable[[str, Tensor], Tensor]) -> None:
        """Replaces each parameter that the module itself holds.

        Args:
            f: Maps a name and the current value to the new value.
        """
        for name, parameter in list(self.local_parameters):
            setattr(self, name, f(name, parameter))

    def apply_to_parameters(self, f: Callable[[str, Tensor], Tensor]) -> None:
        """Replaces each parameter of the module and its descendants.

        Args:
            f: Maps a qualified name and the current value to the new value.
        """
        self.apply_to_local_parameters(f)
        for child_name, child in self.children:
            prefix = _prefix(child_name, child)
            child.apply_to_parameters(lambda name, tensor, prefix=prefix: f(prefix + name, tensor))

    def map_parameters(self, f: Callable[[str, Tensor], Tensor]) -> Self:
        """A copy of the module with mapped parameters; this module is not changed.

        Args:
            f: Maps a qualified name and the current value to the new value.
        """
        # parameters are replaced, so their memory need not be copied
        shared = {id(tensor): tensor for _, tensor in self.parameters}
        mapped = copy.deepcopy(self, shared)
        mapped.apply_to_parameters(f)
        return mapped

    def load_state(self, lookup: Callable[[str], DLPackArray]) -> None:
        """Replaces each parameter of the module and its descendants by an array, without a copy.

        Args:
            lookup: Maps a qualified name to the new value.

        Raises:
            ValueError: The shape or dtype of a value is not that of the parameter.
        """
        self._replace(self._new_values("load_state", lookup, auto_cast=False))

    def load_state_dict(
        self, state: Mapping[str, DLPackArray], strict: bool = True, *, auto_cast: bool = False
    ) -> None:
        """Replaces each parameter of the module and its descendants by the values of a dictionary.

        Args:
            state: Values by qualified name.
            strict: Whether a value without a parameter of its name is an error.
            auto_cast: Whether values are converted between float32 and bfloat16 to the dtype of the parameter.

        Raises:
            KeyError: A parameter has no value.
            ValueError: A value has no parameter (if `strict`), or does not fit its parameter.
        """
        self._replace(self._values_of_dict("load_state_dict", state, strict, auto_cast))

    def _replace(self, values: Mapping[str, Tensor]) -> None:
        self.apply_to_parameters(lambda name, _: values[name])

    def _new_values(
        self, op: str, lookup: Callable[[str], DLPackArray], auto_cast: bool
    ) -> dict[str, Tensor]:
        return {
            name: _loaded_value(op, name, old, lookup(name), auto_cast)
            for name, old in self.parameters
        }

    def _values_of_dict(
        self, op: str, state: Mapping[str, DLPackArray], strict: bool, auto_cast: bool
    ) -> dict[str, Tensor]:
        """The new value of each parameter; this module is not changed."""
        names = {name for name, _ in self.parameters}
        missing = sorted(names - set(state))
        unknown = sorted(set(state) - names)
        if missing:
            given = f"; it has {_listing(unknown)}" if unknown else ""
            raise KeyError(f"{op}: no value for {_listing(missing)}{given}")
        if strict and unknown:
            raise ValueError(
                f"{op}: no parameter has the name {_listing(unknown)}; the parameters are {_listing(sorted(names))}"
                + (". strict=False ignores them" if op == "load_state_dict" else "")
            )
        return self._new_values(op, state.__getitem__, auto_cast)

    @keyword_aliases(target="device")
    def to(self, device: Device | OnDevice) -> Self:
        """Moves the parameters to a device, in place.

        Args:
            device: The device, or a mesh or mapping of one device.

        Raises:
            ShardingError: A mesh has several devices.
        """
        self.apply_to_parameters(lambda _, tensor: tensor.to(device))
        return self

    def compile(
        self,
        *input_types: Type[Any] | Layout,
        weights: Mapping[str, DLPackArray] | None = None,
        session: InferenceSession | None = None,
        name: str | None = None,
        custom_extensions: Iterable[Path] = (),
        auto_cast: bool = False,
        allow_subgraphs: bool = True,
    ) -> Callable[..., Any]:
        """Compiles the module, with its current parameters, for inputs of given types.

        Symbolic sizes in the types may differ in each call. `__call__` runs once, on tensors without values: Python
        control flow may depend on their shapes, not on their elements.

        Args:
            input_types: The type of each positional argument of `__call__`, or its layout on one device.
            weights: The values of all parameters, by qualified name; by default those that the module holds.
            session: The session that compiles; by default one for the devices of the parameters and arguments.
            name: The name of the graph; by default that of the class.
            custom_extensions: Modules of custom ops that `__call__` uses.
            auto_cast: Whether `weights` are converted between float32 and bfloat16 to the dtype of the parameter.
            allow_subgraphs: Has no effect: equal parts share kernels with or without subgraphs.

        Returns:
            A function of one tensor or array per input type. It returns what `__call__` returns: a tensor, or a tuple,
            list or dictionary of tensors.

        Raises:
            TypeError: The types do not fit the signature of `__call__`, or it reads the elements of a tensor, or its
                result has another type.
            KeyError: A parameter has no value in `weights`.
            ValueError: A value in `weights` has no parameter, or does not fit its parameter.
        """
        name = type(self).__name__ if name is None else name
        values = dict(self.parameters)
        if weights is not None:
            values = self._values_of_dict(f"{name}.compile", weights, True, auto_cast)
        graph, structure = self._stage_call("compile", name, input_types, custom_extensions)
        registry = {path: _read_only(tensor) for path, tensor in values.items()}
        devices = [tensor.device for tensor in values.values()]
        devices += [_local_type(type_).device.to_device() for type_ in input_types]
        model = (session or session_of(devices)).load(graph, weights_registry=registry)

        writes = any(isinstance(_local_type(type_), BufferType) for type_ in input_types)

        def run_compiled(*inputs: Any) -> Any:
            arrays = [_memory(x, writes) if isinstance(x, Tensor) else x for x in inputs]
            storages = iter(model.execute(*arrays))
            return result_of(structure, storages)

        run_compiled.__doc__ = f"{name}, compiled for {', '.join(map(repr, input_types))}."
        return run_compiled

    def trace(
        self,
        *input_types: Type[Any] | Layout,
        name: str | None = None,
        custom_extensions: Iterable[Path] = (),
        allow_subgraphs: bool = True,
    ) -> Graph:
        """The graph that `compile` compiles; its parameters are external constants named by their qualified names.

        Args:
            input_types: The type of each positional argument of `__call__`, or its layout on one device.
            name: The name of the graph; by default that of the class.
            custom_extensions: Modules of custom ops that `__call__` uses.
            allow_subgraphs: As for `compile`.

        Raises:
            TypeError: The types do not fit the signature of `__call__`, or it reads the elements of a tensor, or its
                result has another type.
        """
        name = type(self).__name__ if name is None else name
        return self._stage_call("trace", name, input_types, custom_extensions)[0]

    def _stage_call(
        self, op: str, name: str, types: Sequence[Any], extensions: Iterable[Path]
    ) -> tuple[Graph, Any]:
        """The graph of `__call__`, and the structure of its result."""
        types = [_local_type(type_) for type_ in types]
        try:
            by_forward = type(self).__call__ is Module.__call__
            applied = self.forward if by_forward else self.__call__
            inspect.signature(applied).bind(*types)
        except TypeError as error:
            raise TypeError(
                f"{name}.{op}: {error}; give a type for each argument of __call__"
            ) from None
        graph = Graph(name, input_types=types, custom_extensions=extensions)
        outputs: list[Tensor] = []
        with graph:
            external = {
                path: Tensor.from_graph_value(ops.constant_external(path, tensor.type))
                for path, tensor in self.parameters
            }
            with self._replaced_parameters(external):
                result = self(*[Tensor.from_graph_value(value) for value in graph.inputs])
            structure = flatten_result(f"{name}.{op}", result, outputs)
            graph.output(*outputs)
        return graph, structure

    @contextlib.contextmanager
    def _replaced_parameters(self, values: Mapping[str, Tensor]) -> Generator[None]:
        """Replaces the parameters while a ``with`` block runs."""
        before = dict(self.parameters)
        self.apply_to_parameters(lambda name, _: values[name])
        try:
            yield
        finally:
            self.apply_to_parameters(lambda name, tensor: before.get(name, tensor))

    def _repr_items(self) -> Iterator[tuple[str, object]]:
        """Names and values for `repr`; a value with an empty name is shown without a name."""
        yield from self.children

    def __rich_repr__(self) -> Iterator[Any]:
        """The names and values of `repr`, for the library ``rich``."""
        for name, value in self._repr_items():
            yield (name, value) if name else value

    def _repr_html_(self) -> str:
        return text_html(repr(self))

    def __repr__(self) -> str:
        items = [f"{name}={value!r}" if name else repr(value) for name, value in self._repr_items()]
        line = f"{type(self).__name__}({', '.join(items)})"
        if len(line) <= 80 and "\n" not in line:
            return line
        body = ",\n".join("    " + item.replace("\n", "\n    ") for item in items)
        return f"{type(self).__name__}(\n{body}\n)"


class TransparentModule(Module[_P, _R]):
    """A module whose own name is not a part of the qualified names of its parameters and descendants.

    A transparent wrapper of a module keeps the parameter names of the checkpoint. Set ``name_transparent = False`` on
    an instance to include its name again.
    """

    name_transparent = True


def _local_type(type_: Any) -> Any:
    """The type of an argument; a layout on one device is replaced by its local type."""
    return type_.local_types[0] if isinstance(type_, Layout) else type_


def _prefix(name: str, child: Module) -> str:
    """The prefix of the names of a child's parameters."""
    return "" if child.name_transparent else name + "."


# the dtypes that `auto_cast` converts to each other
_CAST = (DType.float32, DType.bfloat16)


def _loaded_value(op: str, name: str, old: Tensor, value: DLPackArray, auto_cast: bool) -> Tensor:
    """Converts a new value of a parameter and puts it on the device of the parameter."""
    new = Tensor.from_dlpack(value)
    if auto_cast and new.dtype in _CAST and old.dtype in _CAST and new.shape == old.shape:
        new = new.cast(old.dtype)
    if (new.dtype, new.shape) != (old.dtype, old.shape):
        transposed = new.shape != old.shape and _shape(new) == _shape(old)[::-1]
        raise ValueError(
            f"{op}: {name} has shape {_shape(new)} and dtype {new.dtype.name}, expected {_shape(old)} and "
            f"{old.dtype.name}" + ("; it is transposed" if transposed else "")
        )
    return new.to(old.device) if new.device != old.device else new


def _shape(tensor: Tensor) -> list[int]:
    return [int(dim) for dim in tensor.shape]


def _listing(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:8]))
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def _memory(tensor: Tensor, writes: bool) -> driver.Tensor:
    """The memory of a tensor for one run, which may write to it."""
    return tensor.realize.driver_tensor if writes else tensor._materialize()


def _read_only(tensor: Tensor) -> driver.Tensor:
    """The memory of a tensor for a model that reads it."""
    tensor._materialize()
    assert tensor._cell is not None
    return tensor._cell.borrowed_storage()


@overload
def module_dataclass(cls: _M, /, *, repr: bool = False, **kwargs: Any) -> _M: ...
@overload
def module_dataclass(
    cls: None = None, /, *, repr: bool = False, **kwargs: Any
) -> Callable[[_M], _M]: ...
@dataclass_transform()
def module_dataclass(cls: Any = None, /, *, repr: bool = False, **kwargs: Any) -> Any:
    """Makes a subclass of `Module` a dataclass: its fields are parameters, children and other data.

    Args:
        cls: The class; None if the decorator is called with arguments.
        repr: Whether to generate the `repr` of dataclasses instead of that of modules.
        kwargs: Arguments of `dataclasses.dataclass`.

    Raises:
        TypeError: The class is not a subclass of `Module`.
    """

    def decorate(cls: Any) -> Any:
        if not issubclass(cls, Module):
            raise TypeError(f"module_dataclass: {cls.__name__} is not a subclass of Module")
        # modules compare and hash by identity, because `==` of tensors is element by element
        dataclass_type = dataclasses.dataclass(cls, repr=repr, **{"eq": False, **kwargs})
        if not repr and "_repr_items" not in vars(dataclass_type):
            setattr(dataclass_type, "_repr_items", _shown_fields)  # noqa: B010  (a class that is not known here)
        return dataclass_type

    return decorate if cls is None else decorate(cls)


def _shown_fields(module: Any) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(module):
        value = getattr(module, field.name)
        if field.default is not value and field.repr:
            yield field.name, value
