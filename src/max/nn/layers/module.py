"""Modules: layers with weights by name, state dicts, subgraphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from max._lazy import lazy_module
from max._names import keyword_aliases
from max.driver import DLPackArray
from max.graph import (
    DeviceRef,
    Graph,
    ShardingStrategy,
    StaticDim,
    TensorValue,
    Type,
    Value,
    Weight,
)
from max.graph.weights._weight_data import WeightData
from max.nn.layers.layer import Layer
from max.nn.layers.module_tree import module_tree
from max.nn.layers.weight_values import (
    alignment_error,
    as_tensor,
    check_value,
    state_dict_error,
    value_of,
    zeros,
)

if TYPE_CHECKING:
    from max import engine
else:
    # models that are compiled elsewhere need no engine
    engine = lazy_module("max.engine")


class Module(Layer, ABC):
    """Base of layers with weights, and of models.

    An attribute of type `max.graph.Weight` is a weight of the module; an attribute of type `Module` is a part of it.
    The full name of a weight is the path of attributes to it, joined by dots, then its own name::

        class MLP(nn.Module):
            def __init__(self):
                self.up = nn.Linear(5, 10, DType.float32, DeviceRef.CPU())
                self.down = nn.Linear(10, 5, DType.float32, DeviceRef.CPU())

            def __call__(self, x):
                return self.down(ops.silu(self.up(x)))

        model = MLP()
        model.load_state_dict(checkpoint)  # "up.weight": an array of shape (10, 5), …
        graph = Graph("mlp", model, input_types=[...])
        session.load(graph, weights_registry=model.state_dict())

    `state_dict` and `load_state_dict` give the weights their full names, so call one of them before
    the graph is built. ``print(module)`` shows the tree of its parts with the shapes of the weights.
    """

    __module__ = "max.nn.layer"

    _omit_module_attr_name = False
    """Whether the names of the weights leave out the attribute that holds the module."""

    def __setattr__(self, name: str, value: Any) -> None:
        # a part that is replaced keeps its place in the order of the parts
        if not (isinstance(value, Module) and name in vars(self).get("_sublayers", {})):
            self._forget(name)
        if isinstance(value, Module):
            vars(self).setdefault("_sublayers", {})[name] = value
        elif isinstance(value, Weight):
            vars(self).setdefault("_layer_weights", {})[value.name] = value
            vars(self).setdefault("_weight_keys", {})[name] = value.name
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._forget(name)
        super().__delattr__(name)

    def _forget(self, name: str) -> None:
        """Removes the weight or part registered under an attribute."""
        state = vars(self)
        state.get("_sublayers", {}).pop(name, None)
        key = state.get("_weight_keys", {}).pop(name, None)
        if key is not None:
            state["_layer_weights"].pop(key, None)
            state.get("_shared_weights", set()).discard(key)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Stages the module's computation into the current graph."""

    @property
    def layer_weights(self) -> dict[str, Weight]:
        """The module's own weights by name, including weights that it shares with other modules."""
        return dict(vars(self).get("_layer_weights", {}))

    @property
    def sublayers(self) -> dict[str, Module]:
        """The parts of the module, by attribute."""
        return dict(vars(self).get("_sublayers", {}))

    def set_shared_weight(self, name: str, weight: Weight) -> None:
        """Shares a weight of another module.

        Args:
            name: The attribute.
            weight: The weight; state dicts list it under the name of its owner only.
        """
        if not isinstance(weight, Weight):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"set_shared_weight: {name!r} is {weight!r}, expected a Weight")
        setattr(self, name, weight)
        vars(self).setdefault("_shared_weights", set()).add(vars(self)["_weight_keys"][name])

    def to(self, *devices: DeviceRef, sharding_strategy: ShardingStrategy | None = None) -> None:
        """Moves the module's own weights, before a graph is built. Layers otherwise take devices as arguments.

        Args:
            devices: The device of the weights, or several devices to split them over.
            sharding_strategy: How weights are split over the devices; ``Weight.shard`` creates the parts.

        Raises:
            TypeError: An argument is not a `DeviceRef`.
            ValueError: There is no device, or there are several without a strategy.
        """
        for device in devices:
            if not isinstance(device, DeviceRef):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"{type(self).__name__}.to: {device!r} is not a DeviceRef")
        first = next(iter(devices), None)
        if first is None or (len(devices) > 1 and sharding_strategy is None):
            raise ValueError(
                f"{type(self).__name__}.to: {len(devices)} devices, expected one, or several and a sharding_strategy"
            )
        for weight in self.layer_weights.values():
            if weight.shard_idx is not None:
                # `Weight.shard` has set the device of a shard
                continue
            weight.device = first
            if sharding_strategy is not None:
                weight.sharding_strategy = sharding_strategy

    def named_modules(self) -> Iterable[tuple[str, Module]]:
        """The module and all its parts, breadth first, each once.

        Yields:
            The prefix of the names of a module's weights in state dicts, such as ``layers.3.mlp.`` (empty for this
            module), and the module.
        """
        seen: set[int] = set()
        for name, module in recursive_named_layers(self):
            if id(module) not in seen:
                seen.add(id(module))
                yield (f"{name}." if name else ""), module

    def replace_module(self, name: str, module: Module) -> None:
        """Replaces a part by another module.

        Args:
            name: The attribute that holds the part.
            module: The other module.

        Raises:
            KeyError: No part has the name.
            TypeError: `module` is not a `Module`.
        """
        if name not in vars(self).get("_sublayers", {}):
            parts = ", ".join(self.sublayers) or "none"
            raise KeyError(
                f"replace_module: {type(self).__name__} has no part {name!r}; its parts are {parts}"
            )
        if not isinstance(module, Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"replace_module: {name!r} is {module!r}, expected a Module")
        setattr(self, name, module)

    def _owned_weights(self) -> Iterator[tuple[str, Module, str, Weight]]:
        """Yields full name, owner, name within the owner, and weight; each weight once."""
        seen: set[int] = set()
        for path, layer in recursive_named_layers(self):
            shared = vars(layer).get("_shared_weights", ())
            for key, weight in layer.layer_weights.items():
                # a shard is a view; its whole weight is listed
                if key in shared or id(weight) in seen or weight.shard_idx is not None:
                    continue
                seen.add(id(weight))
                yield (f"{path}.{key}" if path else key), layer, key, weight

    def name_weights(self) -> None:
        """Gives the weights their full names, as `state_dict` and `load_state_dict` do."""
        for name, _, _, weight in self._owned_weights():
            weight.name = name

    def raw_state_dict(self) -> dict[str, Weight]:
        """All weights of the module and its parts, by full name.

        Before a graph is built their ``align``, ``dtype``, ``quantization_encoding`` and ``shape``
        may be changed.
        """
        return {name: weight for name, _, _, weight in self._owned_weights()}

    def state_dict(self, auto_initialize: bool = True) -> dict[str, DLPackArray]:
        """The values of all weights by full name, as set by `load_state_dict`.

        Args:
            auto_initialize: Whether weights without a value are set to zeros.

        Raises:
            ValueError: A weight has no value, and `auto_initialize` is false.
        """
        values: dict[str, DLPackArray] = {}
        for name, layer, key, weight in self._owned_weights():
            own = vars(layer).setdefault("_weight_values", {})
            if key not in own:
                if not auto_initialize:
                    raise ValueError(
                        f"{type(self).__name__}: the weight {name!r} has no value; load_state_dict "
                        "sets it"
                    )
                own[key] = zeros(name, weight)
            weight.name = name
            values[name] = own[key]
        return values

    def load_state_dict(
        self,
        state_dict: Mapping[str, DLPackArray | WeightData],
        *,
        override_quantization_encoding: bool = False,
        weight_alignment: int | None = None,
        strict: bool = True,
    ) -> None:
        """Sets the values of all weights. Nothing is copied, and nothing is set if this raises.

        A weight with symbols in its shape takes on the sizes of its value.

        Args:
            state_dict: A value for each weight, by full name.
            override_quantization_encoding: Whether a weight takes on the encoding (with dtype and
                shape) of a `WeightData`, or its lack of one.
            weight_alignment: The alignment of the values in bytes that kernels may assume; by default, and for 0, that
                of the dtype. It is checked.
            strict: Whether a missing or an unused value is an error.

        Raises:
            ValueError: A value is missing or not used (and `strict`), has another dtype, shape or
                encoding, is not aligned, or is not an array.
        """
        if not isinstance(state_dict, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"load_state_dict: the state dict is a {type(state_dict).__name__}, expected a mapping from names to "
                "arrays"
            )
        owned = list(self._owned_weights())
        names = {name for name, *_ in owned}
        missing = [name for name in names if name not in state_dict]
        unused = [name for name in state_dict if name not in names]
        wrong: list[str] = []
        assignments: list[tuple[str, Module, str, Weight, Any]] = []
        for name, layer, key, weight in owned:
            if name not in state_dict:
                continue
            value = state_dict[name]
            problem = check_value(name, weight, value, override_quantization_encoding)
            problem = problem or alignment_error(name, value, weight_alignment)
            if problem:
                wrong.append(problem)
            assignments.append((name, layer, key, weight, value))
        if wrong or (strict and (missing or unused)):
            raise state_dict_error(
                type(self).__name__, missing if strict else [], unused if strict else [], wrong
            )
        for name, _, _, weight in owned:
            weight.name = name
            if weight_alignment:
                weight.align = weight_alignment
        for _, layer, key, weight, value in assignments:
            if override_quantization_encoding:
                _take_encoding(weight, value)
            if any(not isinstance(dim, StaticDim) for dim in weight.shape):
                weight.shape = as_tensor(value).shape
            vars(layer).setdefault("_weight_values", {})[key] = value_of(value)

    @keyword_aliases(inputs="input_types")
    def build_subgraph(
        self,
        name: str,
        input_types: Sequence[Type[Any] | Value[Any] | list[Type[Any] | Value[Any]]],
        weight_prefix: str = "",
    ) -> Graph:
        """Adds a subgraph with the module's computation to the graph that is being built.

        Call it with ``ops.call(subgraph, *inputs, prefix=…)`` once for each module of the same
        form, with the prefix of that module's weights::

            block = self.layers[0].build_subgraph("block", [h.type], weight_prefix="layers.0.")
            for i in range(len(self.layers)):
                (h,) = ops.call(block, h, prefix=f"layers.{i}.")

        Args:
            name: The name of the subgraph, unique in the graph.
            input_types: The types of the module's arguments, or values of these types; a list of types stands for an
                argument that is a list of values. The subgraph takes them flat.
            weight_prefix: The prefix of this module's weights in the whole model.

        Raises:
            ValueError: A weight's name does not begin with the prefix, or the module uses a weight
                that is not its own.
        """
        # the subgraph's inputs are flat; lists are rebuilt for the module's arguments
        leaves = [t for item in input_types for t in (item if isinstance(item, list) else [item])]
        flat = [t.type if isinstance(t, Value) else t for t in leaves]
        subgraph = Graph.current.add_subgraph(name, input_types=flat)
        with subgraph, self._relative_names(weight_prefix) as own:
            values = deque(subgraph.inputs)
            arguments: list[Any] = [
                [values.popleft() for _ in item] if isinstance(item, list) else values.popleft()
                for item in input_types
            ]
            subgraph.output(*_flat_values(self(*arguments)))
            for weight in subgraph.added_weights.values():
                if id(weight) not in own:
                    raise ValueError(
                        f"build_subgraph {name}: {type(self).__name__} uses the weight "
                        f"{weight.name!r}, which is not its own; pass it as an input"
                    )
        return subgraph

    def trace(
        self,
        *input_types: Type[Any],
        name: str | None = None,
        custom_extensions: Iterable[Path] = (),
    ) -> Graph:
        """Builds a graph of `__call__` with one input per positional argument.

        Weights keep their current names; call `state_dict` or `load_state_dict` before to set their full names.

        Args:
            input_types: The types of the inputs.
            name: The name of the graph; by default that of the class.
            custom_extensions: Files or folders with custom ops.

        Raises:
            TypeError: The module returns anything other than graph values or lists of them.
        """
        graph = Graph(
            name or type(self).__name__,
            input_types=input_types,
            custom_extensions=custom_extensions,
        )
        with graph:
            graph.output(*_flat_values(self(*graph.inputs)))
        return graph

    def compile(
        self,
        *input_types: Type[Any],
        session: engine.InferenceSession,
        weights: Mapping[str, DLPackArray] | None = None,
        name: str | None = None,
        custom_extensions: Iterable[Path] = (),
    ) -> engine.Model:
        """Compiles the graph of `trace`.

        Args:
            input_types: The types of the inputs.
            session: The session that compiles.
            weights: The values of the weights by full name; by default those of `state_dict`.
            name: The name of the graph; by default that of the class.
            custom_extensions: Files or folders with custom ops.

        Raises:
            TypeError: As for `trace`.
            ValueError: A weight has no value in `weights`, or the value does not fit.
        """
        if weights is None:
            weights = self.state_dict()
        else:
            self.name_weights()
        graph = self.trace(*input_types, name=name, custom_extensions=custom_extensions)
        return session.load(graph, weights_registry=weights)

    @contextmanager
    def _relative_names(self, prefix: str) -> Iterator[set[int]]:
        """Sets the names of the weights relative to this module, within a ``with`` block."""
        owned = [(path, weight) for path, _, _, weight in self._owned_weights()]
        before = [weight.name for _, weight in owned]
        for path, weight in owned:
            # a weight that no state dict has named yet keeps the name within its layer
            if weight.name != prefix + path and not path.endswith(weight.name):
                raise ValueError(
                    f"build_subgraph: the weight {weight.name!r} is not {prefix + path!r}; the "
                    f"weight_prefix {prefix!r} is not that of this {type(self).__name__}"
                )
        try:
            for path, weight in owned:
                weight.name = path
            yield {id(weight) for _, weight in owned}
        finally:
            for (_, weight), name in zip(owned, before, strict=True):
                weight.name = name

    def __repr__(self) -> str:
        return module_tree(self)


def recursive_named_layers(parent: Module, prefix: str = "") -> Iterable[tuple[str, Module]]:
    """A module and all its parts with their names, breadth first.

    Args:
        parent: The module.
        prefix: Its name, which prefixes the names of its parts.
    """
    queue: deque[tuple[str, Module]] = deque([(prefix, parent)])
    while queue:
        name, layer = queue.popleft()
        yield name, layer
        for part, sublayer in layer.sublayers.items():
            part = "" if sublayer._omit_module_attr_name else part
            queue.append((".".join(filter(None, (name, part))), cast(Module, sublayer)))


def _take_encoding(weight: Weight, value: Any) -> None:
    """Sets the encoding, dtype and shape of a weight to those of its value."""
    if isinstance(value, WeightData) and value.quantization_encoding is not (
        weight.quantization_encoding
    ):
        weight.quantization_encoding = value.quantization_encoding
        weight.dtype, weight.shape = value.dtype, value.shape


def _flat_values(outputs: Any) -> list[Value[Any] | TensorValue]:
    if outputs is None:
        return []
    if isinstance(outputs, Value):
        return [outputs]
    if isinstance(outputs, Iterable):
        return [value for item in outputs for value in _flat_values(item)]
    raise TypeError(f"a module returned {outputs!r}; expected values of the graph")
