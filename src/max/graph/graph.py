"""Graphs: a function of tensors and buffers, staged op by op."""

# the documented names of chains and opaque values start with an underscore
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from max import mlir
from max._errors import ArgumentError
from max._host.reentry import refuse_in_collection
from max._lazy import lazy_module
from max.graph.graph_module import Module
from max.graph.graph_options import DevicePlacementPolicy, GraphDebugConfig
from max.graph.graph_options import ProfileScopeColor as ProfileScopeColor
from max.graph.kernel_library import KernelLibrary, default_custom_extensions
from max.graph.kernel_library import (
    default_custom_extensions_scope as default_custom_extensions_scope,
)
from max.graph.staging.added_weights import AddedWeights
from max.graph.staging.chains import DeviceChainMap
from max.graph.staging.current import CURRENT, current_graph
from max.graph.staging.graph_weights import GraphWeights
from max.graph.staging.staged_ops import StagedOps
from max.graph.staging.symbol_order import order_by_symbols
from max.graph.type import DeviceRef, Type, _ChainType
from max.graph.value import TensorValue, TensorValueLike, Value, value_of
from max.graph.weight import Weight, stage_weight
from max.graph.weights._hierarchical import Weights

if TYPE_CHECKING:
    from max import _html
    from max.graph import saved
else:
    # for notebooks
    _html = lazy_module("max._html")
    saved = lazy_module("max.graph.saved")

__all__ = ["Graph"]


class _CurrentGraph:
    """``Graph.current``: the graph that ops are staged into."""

    def __get__(self, instance: Graph | None, owner: type[Graph]) -> Graph:
        return cast("Graph", current_graph())


class Graph(StagedOps):
    """A function from tensors and buffers to tensors: built by staging ops, then compiled and executed.

    Either as a context::

        with Graph("add", input_types=[TensorType(DType.float32, ("n",), device)] * 2) as graph:
            x, y = graph.inputs
            graph.output(x.tensor + y.tensor)

    or from a function::

        graph = Graph("add", lambda x, y: x + y, input_types=[...])

    ``print(graph)`` shows its MLIR.

    Args:
        name: The name of the graph.
        forward: A function that takes the inputs (and `args`, `kwargs`) and returns the outputs.
        input_types: The types of the inputs.
        path: A file written by `save`, or any file with MLIR text, to load instead.
        args: Further positional arguments of `forward`.
        custom_extensions: Files or folders with custom ops, written in the kernel language.
        context: Accepted for compatibility and ignored: MLIR contexts are implicit.
        kernel_library: A library of custom ops to extend; a new one if None.
        module: The module to build the graph in; a new one if None. Graphs of one `Module` are loaded together.
        strict_device_placement: Without effect: no op moves a tensor to another device by itself.
        is_device_graph: Without effect: executions are recorded on GPUs only.
        kwargs: Further keyword arguments of `forward`. Without `forward`, `output_types` is accepted and ignored.

    Raises:
        ValueError: The name is empty, or a symbol of an input type occurs only inside expressions.
        TypeError: An input type is not a `Type`, or there are arguments but no `forward`.
    """

    current = _CurrentGraph()
    """The innermost graph that is being built. Raises LookupError outside of any graph."""

    root: Graph
    """The entry graph of the module; the graph itself unless it is a subgraph."""
    mlir_op: mlir.GraphOp
    """The op of the graph in its module."""
    device_chains: DeviceChainMap
    """The order of side effects of each device."""
    debug = GraphDebugConfig()
    """Options of debugging, for all graphs."""

    def __init__(
        self,
        name: str = "main",
        forward: Callable[..., None | Value[Any] | Iterable[Value[Any]]] | None = None,
        input_types: Iterable[Type[Any]] = (),
        path: Path | None = None,
        *args: Any,
        custom_extensions: Iterable[Path] = [],
        context: object = None,
        kernel_library: KernelLibrary | None = None,
        module: mlir.ModuleOp | Module | None = None,
        strict_device_placement: DevicePlacementPolicy = DevicePlacementPolicy.Warn,
        is_device_graph: bool = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(strict_device_placement, DevicePlacementPolicy):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"Graph {name}: strict_device_placement is {strict_device_placement!r}, expected a "
                "DevicePlacementPolicy"
            )
        self._init(name, kernel_library, custom_extensions)
        self.root = self
        if path is not None:
            self._load(Path(path))
            return
        self._module = mlir.new_module() if module is None or isinstance(module, Module) else module
        if isinstance(input_types, Type):
            raise TypeError(
                f"Graph {name}: input_types is {input_types!r}, expected a list of types, such as "
                "[TensorType(...)]"
            )
        self._build("mo.graph", list(input_types))
        self._module.body.block.add_op(self.mlir_op)
        self._forward(forward, args, kwargs)
        if isinstance(module, Module):
            module.add(self)
            self._together = module

    def _init(
        self, name: str, library: KernelLibrary | None, custom_extensions: Iterable[Path]
    ) -> None:
        if not name:
            raise ValueError("Graph: the name is empty")
        self._init_ops(name)
        self._kernel_library = KernelLibrary() if library is None else library
        self._kernel_library.load_paths(None, [*default_custom_extensions(), *custom_extensions])
        self._subgraphs: dict[str, Graph] = {}
        self._weights = AddedWeights(name)
        self._together: Module | None = None
        self.device_chains = DeviceChainMap(self._chains)

    def _build(self, op: str, input_types: Sequence[Type[Any]]) -> None:
        for index, t in enumerate(input_types):
            if not isinstance(t, Type):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(
                    f"Graph {self.name}: input type {index} is {t!r}, expected a TensorType or "
                    "BufferType"
                )
        types = [t.to_mlir() for t in input_types]
        self._symbols.declare_inputs(types, is_entry=op == "mo.graph")
        block = mlir.Block(arg_types=types)
        self._adopt(mlir.build(op, attrs={"sym_name": self.name}, regions=[mlir.Region(block)]))
        self._num_inputs = len(types)

    def _adopt(self, op: mlir.MoOp) -> None:
        assert isinstance(op, mlir.GraphOp)
        self.mlir_op = op
        self._block = op.block

    def _load(self, path: Path) -> None:
        self._take(saved.load_module(path))

    def _take(self, module: mlir.ModuleOp) -> None:
        """Makes the entry of a complete module this graph."""
        self._module = module
        self._adopt(mlir.entry(module))
        self._num_inputs = len(self._block.args)
        self._symbols.declare_inputs(self.mlir_op.input_types, is_entry=True)
        for op in self._block.ops:
            self._symbols.add_of([result.type for result in op.results])

    def _forward(
        self,
        forward: Callable[..., None | Value[Any] | Iterable[Value[Any]]] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        if forward is None:
            if args or set(kwargs) - {"output_types"}:
                raise TypeError(f"Graph {self.name}: arguments for forward, but no forward")
            return
        with self:
            outputs = forward(*self.inputs, *args, **kwargs)
            if outputs is None and self.has_output:
                return
            if outputs is None:
                outputs = ()
            elif isinstance(outputs, Value) or not hasattr(outputs, "__iter__"):
                outputs = (outputs,)
            self.output(*cast("Iterable[Value[Any]]", outputs))

    # Building

    def __enter__(self) -> Graph:
        refuse_in_collection("building a graph")
        CURRENT.set((*CURRENT.get(), self))
        return self

    def __exit__(self, *exc: object) -> None:
        stack = CURRENT.get()
        if not stack or stack[-1] is not self:
            raise RuntimeError(f"Graph {self.name}: left in another order than entered")
        CURRENT.set(stack[:-1])

    @property
    def inputs(self) -> Sequence[Value[Any]]:
        """The input values, in the order of `input_types`."""
        return tuple([value_of(arg) for arg in self._block.args[: self._num_inputs]])

    def output(self, *outputs: TensorValueLike | Value[Any]) -> None:
        """Sets the outputs and ends the graph.

        Args:
            outputs: Values of this graph, or anything that converts to a tensor.

        Raises:
            ValueError: The outputs are already set, or a value belongs to another graph.
            TypeError: An output is not a value, or is a buffer.
        """
        if self.has_output:
            raise ValueError(f"Graph {self.name}: the outputs are set already")
        with self if CURRENT.get()[-1:] != (self,) else nullcontext():
            values: list[Value[Any]] = []
            for index, output in enumerate(outputs):
                value = output if isinstance(output, Value) else TensorValue(output)
                if isinstance(value.to_mlir().type, mlir.BufferType):
                    raise TypeError(
                        f"Graph {self.name}: output {index} is a buffer; load it "
                        "(ops.buffer_load), or leave it out: the caller sees what is stored"
                    )
                values.append(value)
            # before `take_input`, which forgets the chain that callers pass
            has_effects = self._chains.has_advanced
            chain_input = self._chains.take_input()
            if chain_input is not None:
                if has_effects or chain_input.first_use is not None:
                    values.append(self._chains.current)
                else:
                    # calls need no chain
                    self._block.erase_arg(chain_input)
            self.stage("mo.output", values, result_types=())
            if self._symbols.later:
                blocks = {name: graph._block for name, graph in self._subgraphs.items()}
                for name in order_by_symbols(self._block, {*self._symbols.later}, blocks):
                    del self._symbols.later[name]

    @property
    def output_types(self) -> list[Type[Any]]:
        """The types of the outputs.

        Raises:
            ArgumentError: The outputs are not set yet.
        """
        if not self.has_output:
            raise ArgumentError(f"Graph {self.name}: the outputs are not set yet")
        types = [Type.from_mlir(t) for t in self.mlir_op.output_types]
        return [t for t in types if not isinstance(t, _ChainType)]

    # Subgraphs and weights

    def add_subgraph(
        self,
        name: str,
        forward: Callable[..., None | Value[Any] | Iterable[Value[Any]]] | None = None,
        input_types: Iterable[Type[Any]] = (),
        path: Path | None = None,
        custom_extensions: Iterable[Path] = [],
        devices: Iterable[DeviceRef] = [],
    ) -> Graph:
        """Creates a subgraph that this graph and other subgraphs can call with `max.graph.ops.call`.

        Names of its weights are relative to the prefix of a call. A subgraph with side effects has a chain among
        its inputs and outputs.

        Args:
            name: The name, unique among the graphs of the module.
            forward: A function from the inputs to the outputs; if None, build the subgraph in a ``with`` statement.
            input_types: The types of the inputs. Each call binds their symbols.
            path: A file with the MLIR of the subgraph, to load instead.
            custom_extensions: Files or folders with custom ops.
            devices: The devices that the subgraph uses, for `device_chains`.

        Raises:
            ValueError: The module already has a graph of this name, or the file has no such subgraph.
            TypeError: The name is not a str.
        """
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"add_subgraph: the name is {name!r}, expected text")
        root = self.root
        if name in root._subgraphs or name == root.name:
            raise ValueError(f"Graph {root.name}: there is a graph of the name {name!r} already")
        subgraph = Graph.__new__(Graph)
        subgraph._init(name, self._kernel_library, custom_extensions)
        subgraph.root = root
        subgraph._module = root._module
        if path is not None:
            loaded = mlir.subgraphs(saved.load_module(Path(path)))
            if name not in loaded:
                raise ValueError(f"add_subgraph: {path} has no subgraph @{name}")
            # it moves out of the module of the file
            op = loaded[name]
            op.detach()
            subgraph._adopt(op)
            inputs = [t for t in op.input_types if not isinstance(t, mlir.ChainType)]
            subgraph._num_inputs = len(inputs)
            subgraph._symbols.declare_inputs(inputs, is_entry=False)
        else:
            subgraph._build("mo.subgraph", list(input_types))
            # the chain comes behind the inputs; `output` removes it where no op needs it
            chain = subgraph._block.insert_arg(mlir.ChainType.get(), subgraph._num_inputs)
            subgraph._chains.begin(chain)
        for device in devices:
            subgraph.device_chains[device]
        root._module.body.block.insert_op_before(subgraph.mlir_op, root.mlir_op)
        root._subgraphs[name] = subgraph
        subgraph._forward(forward, (), {})
        return subgraph

    def add_weight(self, weight: Weight, force_initial_weight_on_host: bool = True) -> TensorValue:
        """Adds a weight to the graph; adding it again returns the same value.

        Args:
            weight: The weight.
            force_initial_weight_on_host: Whether the weight is loaded on the CPU and transferred to its device by
                the graph.

        Raises:
            ValueError: The graph has another weight of this name.
        """
        return self.add_weight_of(None, weight, force_initial_weight_on_host)

    def add_weight_of(self, branch: Graph | None, weight: Weight, on_host: bool) -> TensorValue:
        """`add_weight` for a branch of this graph. Branches share weights of one name and type.

        Raises:
            ValueError: The graph or the same branch has another weight of this name, or another branch has one of
                another type.
        """
        if (added := self._weights.find(branch, weight)) is not None:
            return added
        with self if CURRENT.get()[-1:] != (self,) else nullcontext():
            value = stage_weight(self, weight, on_host)
        self._weights.keep(branch, weight, value)
        return value

    @property
    def added_weights(self) -> dict[str, Weight]:
        """The weights of this graph by name, without those of its subgraphs."""
        return self._weights.by_name()

    def weights(self) -> Weights:
        """Allocates weights by hierarchical name: ``graph.weights().layers[0].weight.allocate(dtype, shape)``."""
        return GraphWeights(self.added_weights)

    @property
    def module(self) -> Module:
        """The module of the graph; with the graph alone unless it was made in another one."""
        root = self.root
        if root._together is None:
            root._together = Module()
            root._together.add(root)
        return root._together

    def copy(self) -> Graph:
        """A copy with ops of its own, in a module of its own. Large constants are shared.

        Raises:
            ValueError: The outputs are not set yet, or this is a subgraph.
        """
        if self.root is not self or not self.has_output:
            why = "the outputs are not set yet" if self.root is self else "copy the graph around it"
            raise ValueError(f"Graph {self.name}: it cannot be copied; {why}")
        graph = Graph.__new__(Graph)
        graph._init(self.name, None, self.kernel_libraries_paths)
        graph.root = graph
        graph._take(self._module.clone())
        return graph

    # Text

    def save(self, path: Path | str, weights: Mapping[str, Any] | None = None) -> None:
        """Writes the graph to files that `Graph(path=...)` and `InferenceSession.load` read.

        `path` holds the MLIR text; safetensors files beside it hold large constants and the values of weights. See
        `max.graph.saved` for the format. Custom ops are not saved: pass them to `load` again.

        Args:
            path: The file for the text, such as ``model.mo``.
            weights: Values of weights by name; `load` then needs none.

        Raises:
            ValueError: The format cannot hold the dtype of a value, or the graph has no weight of a name.
            OSError: The files cannot be written.
        """
        saved.save_module(self.to_mlir(), Path(path), weights)

    @property
    def kernel_libraries_paths(self) -> list[Path]:
        """The files and folders with custom ops."""
        return self._kernel_library.library_paths()

    def file_of_kernel(self, symbol: str) -> Path | None:
        """The file of custom ops that registers an op, or None."""
        return self._kernel_library.file_of(symbol)

    def to_mlir(self) -> mlir.ModuleOp:
        """The module of the graph and its subgraphs.

        Raises:
            UnboundDimError: Nothing gives a dimension its size; it is a ValueError and a RuntimeError.
        """
        root = self.root
        if root.has_output:
            root._symbols.check_bound()
        return root._module

    @property
    def _mlir_module(self) -> mlir.ModuleOp:
        return self.root._module

    def __str__(self) -> str:
        return mlir.print_module(self._mlir_module)

    def _repr_html_(self) -> str:
        inputs = ", ".join(str(value.type) for value in self.inputs)
        return _html.details_html(f"Graph {self.name}({inputs})", str(self))

    def __repr__(self) -> str:
        return f"Graph(name={self.name!r}, inputs={len(self.inputs)})"
