"""A graph of torch.compile as a model. Parameters and buffers are weights of the model, which it prepares once.

A weight is read again when torch has changed it: when the version counter of the tensor, or its memory, is another one.
A module that is called with other parameters, as equal layers are, has a model for each set of them, of one program.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from max._config import FlagError
from max._host.process_caches import cached_results
from max.engine import InferenceSession, Model
from max.importers.build import build_graph
from max.importers.errors import UnsupportedOpsError
from max.importers.torch.importer import TorchFramework
from max.importers.torch.reader import FxReader, op_name, source_line
from max.torch._convert import tensor_of, view_of

__all__ = ["CompiledGraph", "Left"]

Left = Callable[[str, str, str], None]
"""Told of what runs in torch: the op, its line of the source program, and why."""

_MOST_SETS = 1024
"""Sets of weights for which a graph keeps a model; the one that was not used for the longest time is dropped."""
_FEW_CHANGES = 4
_CALLS_PER_CHANGE = 4
"""A weight that changes more often becomes an input."""


@cached_results()
def session() -> InferenceSession:
    """The session of all graphs."""
    return InferenceSession()


class _State(NamedTuple):
    """What tells whether a weight is the one that a model has read."""

    position: int
    identity: int
    version: int
    pointer: int


@dataclass
class _Bound:
    """A model, and the weights that it has read."""

    model: Model
    states: Sequence[_State]

    def is_current(self, args: Sequence[Any]) -> bool:
        """Whether the weights are those that were read, unchanged."""
        for position, identity, version, pointer in self.states:
            given = args[position]
            if id(given) != identity or given._version != version or given.data_ptr() != pointer:
                return False
        return True


def _state(index: int, tensor: torch.Tensor) -> _State:
    return _State(index, id(tensor), tensor._version, tensor.data_ptr())


class _Form:
    """The graph with some of its placeholders as weights.

    Args:
        module: The graph.
        kept_outputs: The positions of outputs that are tensors or sizes; None: the graph has one output.
        weights: The positions of placeholders that are weights.
    """

    def __init__(
        self, module: torch.fx.GraphModule, kept_outputs: list[int] | None, weights: Collection[int]
    ) -> None:
        graph = module.graph
        names = [node.name for node in graph.nodes if node.op == "placeholder"]
        source = FxReader(graph, module, {}).read("main", kept_outputs)
        self.weights = sorted(weights)
        self.names = [names[i] for i in self.weights]
        staged = build_graph(source, TorchFramework(), weights=set(self.names))
        self.compiled = session().compile(staged)
        self.inputs = [names.index(n) for n, _ in source.inputs if n not in set(self.names)]
        self.models: OrderedDict[tuple[int, ...], _Bound] = OrderedDict()

    def key(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The identities of the weights."""
        return tuple([id(args[i]) for i in self.weights])

    def bind(self, args: Sequence[Any]) -> _Bound:
        """The model of the weights of a call."""
        key = self.key(args)
        given = [args[i] for i in self.weights]
        # before the weights are read: a change meanwhile is seen at the next call
        states = [_state(i, tensor) for i, tensor in zip(self.weights, given, strict=True)]
        registry = {
            name: view_of(tensor.detach().contiguous())
            for name, tensor in zip(self.names, given, strict=True)
        }
        bound = _Bound(session().init(self.compiled, weights_registry=registry), states)
        if key not in self.models:
            # the model goes with any of its tensors, which must not keep the graph alive
            forget = weakref.WeakMethod(self._forget)
            for tensor in given:
                weakref.finalize(tensor, _call, forget, key).atexit = False
        self.models[key] = bound
        if len(self.models) > _MOST_SETS:
            self.models.popitem(last=False)
        return bound

    def _forget(self, key: tuple[int, ...]) -> None:
        self.models.pop(key, None)


def _call(method: weakref.WeakMethod[Any], key: tuple[int, ...]) -> None:
    function = method()
    if function is not None:
        function(key)


class CompiledGraph:
    """A functional graph that runs in MAX. It is staged at the first call, and runs in torch if that fails.

    Args:
        module: The graph.
        static: The positions of placeholders that are parameters or buffers.
        on_taken: Told of the number of ops that run in MAX.
        on_left: Told of what runs in torch.
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        static: Collection[int],
        on_taken: Callable[[int], None],
        on_left: Left,
    ) -> None:
        self._module = module
        self._static = set(static)
        self._taken = on_taken
        self._left = on_left
        self._lock = threading.RLock()
        self._run: Callable[..., Any] | None = None
        self._changes: Counter[int] = Counter()
        self._calls = 0

    def __call__(self, *args: Any) -> Any:
        run = self._run
        if run is None:
            with self._lock:
                run = self._run = self._run or self._stage_call(args)
        return run(*args)

    def _stage_call(self, args: Sequence[Any]) -> Callable[..., Any]:
        nodes = [node for node in self._module.graph.nodes if node.op == "call_function"]
        try:
            run = self._load_graph(args)
        except FlagError:
            raise
        except (UnsupportedOpsError, ValueError, TypeError, NotImplementedError) as error:
            if isinstance(error, UnsupportedOpsError):
                for problem in error.problems:
                    self._left(problem.op, problem.node, problem.reason)
            else:
                warnings.warn(
                    f'torch.compile(backend="max"): {len(nodes)} ops run in torch, as their graph cannot be compiled: '
                    f"{error}",
                    stacklevel=2,
                )
                for node in nodes:
                    self._left(op_name(node), source_line(node), str(error))
            return self._module.forward
        self._taken(sum(op_name(node) != "getitem" for node in nodes))
        return run

    def _load_graph(self, args: Sequence[Any]) -> Callable[..., Any]:
        graph = self._module.graph
        (results,) = graph.find_nodes(op="output")[0].args
        single = isinstance(results, torch.fx.Node)
        listed: list[Any] = [results] if single else list(results)
        # other outputs are None or numbers, and stay as they are
        kept = [i for i, value in enumerate(listed) if isinstance(value, torch.fx.Node)]
        sizes = [not hasattr(listed[i].meta.get("val"), "shape") for i in kept]
        self._kept = None if single else kept
        places = [node for node in graph.nodes if node.op == "placeholder"]
        self._static = {
            i for i in self._static if places[i].users and _can_be_weight(places[i], args[i])
        }
        form = _Form(self._module, self._kept, self._static)
        last = form.bind(args)

        def run(*args: Any) -> Any:
            nonlocal form, last
            bound = last
            self._calls += 1
            if not bound.is_current(args):
                with self._lock:
                    form, bound = self._current(form, args)
                    last = bound
            tensors = [view_of(args[i].detach().contiguous()) for i in form.inputs]
            outputs: list[Any] = list(listed)
            for i, is_size, result in zip(kept, sizes, bound.model.execute(*tensors), strict=True):
                outputs[i] = int(result.to_numpy()) if is_size else tensor_of(result)
            return outputs[0] if single else outputs

        return run

    def _current(self, form: _Form, args: Sequence[Any]) -> tuple[_Form, _Bound]:
        """The model of the weights of a call, where they are not those of the last one."""
        key = form.key(args)
        bound = form.models.get(key)
        if bound is None:
            return form, form.bind(args)
        form.models.move_to_end(key)
        if bound.is_current(args):
            return form, bound
        changed = [s.position for s in bound.states if s != _state(s.position, args[s.position])]
        self._changes.update(changed)
        often = {
            i for i in changed
            if self._changes[i] > _FEW_CHANGES and self._calls < _CALLS_PER_CHANGE * self._changes[i]
        }  # fmt: skip
        # an input costs less than a weight that is prepared again and again
        if often:
            self._static -= often
            form = _Form(self._module, self._kept, self._static)
        return form, form.bind(args)


def _can_be_weight(place: torch.fx.Node, tensor: Any) -> bool:
    """Whether a parameter or buffer has a static shape, and torch counts its changes."""
    value = place.meta.get("val")
    return (
        isinstance(tensor, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and all(isinstance(size, int) for size in value.shape)
        and not tensor.is_inference()
    )
