"""Operations of torch whose kernels are compiled graphs."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Self, overload
from weakref import WeakValueDictionary

import torch
from torch.autograd import forward_ad

from max._host.process_caches import cached_results
from max._host.reentry import LockLevel, hold_lock, reentrant_lock
from max.driver import CPU, Tensor
from max.engine import InferenceSession, Model
from max.graph import Graph, KernelLibrary, TensorType, Value
from max.torch._convert import tensor_of, type_of, view_of

Forward = Callable[..., "Iterable[Value[Any]] | Value[Any] | None"]
Form = tuple[Any, ...]


@cached_results()
def session() -> InferenceSession:
    """The session of all operations."""
    return InferenceSession(devices=[CPU()])


def library_of(kernels: Path | KernelLibrary | None) -> KernelLibrary | None:
    """The kernel library of an argument, which is a path or the library itself."""
    if kernels is None or isinstance(kernels, KernelLibrary):
        return kernels
    return KernelLibrary(paths=[Path(kernels)])


class Compiled:
    """Loaded graphs, one for each form of the arguments: dtypes, and shapes unless they are symbols.

    Args:
        name: The operation's name, for messages.
        roles: The use of each argument: the first ones are ``output``, the others ``input`` or ``inout``.
        build: Makes the graph for given arguments, results included.
        by_shape: Whether the graph depends on the arguments' shapes.
    """

    def __init__(
        self, name: str, roles: Sequence[str], build: Callable[..., Graph], by_shape: bool = True
    ) -> None:
        self.name, self.roles, self.build, self.by_shape = name, roles, build, by_shape
        self.outputs = roles.count("output")
        self.in_place = [index for index, role in enumerate(roles) if role == "inout"]
        self.models: dict[Form, Model] = {}
        self.lock = reentrant_lock(LockLevel.PROGRAMS)

    def model_for(self, tensors: Sequence[torch.Tensor]) -> Model:
        """The graph for the form of the arguments, compiled when it is first needed."""
        if self.by_shape:
            form = tuple([(t.dtype, t.is_cpu, t.shape) for t in tensors])
        else:
            form = tuple([(t.dtype, t.is_cpu, t.dim()) for t in tensors])
        model = self.models.get(form)
        return self._compiled_graph(form, tensors) if model is None else model

    @hold_lock("lock")
    def _compiled_graph(self, form: Form, tensors: Sequence[torch.Tensor]) -> Model:
        model = self.models.get(form)
        if model is None:
            model = self.models[form] = session().load(self.build(*tensors))
        return model

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Runs the graph, and writes its results to the first arguments; without a copy if these are contiguous.

        Raises:
            ValueError: A result has another shape or dtype than the argument that is to take it, or an argument
                that is changed in place is not contiguous.
        """
        count = self.outputs
        model = self.model_for(tensors)
        operands = [
            self._operand(tensor, role)
            for tensor, role in zip(tensors[count:], self.roles[count:], strict=True)
        ]
        outputs = tensors[:count]
        # what the graph cannot write in place gets an empty tensor, and a result of its own
        memory = [
            view_of(out if out.is_contiguous() and not out.is_neg() else torch.empty(0))
            for out in outputs
        ]
        results = model._execute_into(operands, memory)  # pyright: ignore[reportPrivateUsage]
        if len(results) != len(outputs):
            raise ValueError(
                f"{self.name}: the graph has {len(results)} results, and {len(outputs)} are expected; "
                "num_outputs or output_types says how many"
            )
        for index, (out, place, result) in enumerate(zip(outputs, memory, results, strict=True)):
            if result is place:
                # for torch's check that values saved for a backward are unchanged
                torch.autograd.graph.increment_version(out)
                continue
            value = tensor_of(result)
            if value.shape != out.shape or value.dtype != out.dtype:
                raise ValueError(
                    f"{self.name}: result {index} is {value.dtype} {list(value.shape)}, and the tensor "
                    f"that is to take it is {out.dtype} {list(out.shape)}"
                )
            # torch forbids writes to a leaf that needs a gradient
            (out.detach() if out.requires_grad else out).copy_(value)
        for index in self.in_place:
            torch.autograd.graph.increment_version(tensors[index])

    def _operand(self, tensor: torch.Tensor, role: str) -> Tensor:
        if role == "inout" and (not tensor.is_contiguous() or tensor.is_neg()):
            raise ValueError(
                f"{self.name}: a tensor of shape {list(tensor.shape)} is changed in place, and is not "
                "contiguous; give a contiguous one and copy it back"
            )
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        return view_of(tensor.contiguous())


# torch keeps registered operations for ever, so one operation serves all graphs of a name and uses. Its last
# argument is the number of the graph, which is freed with its `Operation`. Numbers are counted for each name, so that a
# saved program of torch.export finds its graphs in another process
_fragment = torch.library.Library("max", "FRAGMENT")
_running: WeakValueDictionary[tuple[str, int], Compiled] = WeakValueDictionary()
_numbers: defaultdict[str, count[int]] = defaultdict(count)
_registration = reentrant_lock()
"""Held while an operation is registered: torch takes each name once."""


def _registered_name(name: str, roles: Sequence[str]) -> str:
    """The name of an operation in torch: the user's name, and letters for the uses of the tensors."""
    plain = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
    return f"{plain}_{''.join({'output': 'o', 'inout': 'm'}.get(role, 'i') for role in roles)}"


@functools.cache
def _register_operation(name: str, roles: tuple[str, ...]) -> Callable[..., None]:
    """Registers an operation with torch, once for each name. The caller holds `_registration`.

    Args:
        name: What `_registered_name` gives.
        roles: The use of each tensor; see `Compiled`.
    """

    def run(*arguments: Any) -> None:
        *tensors, number = arguments
        compiled = _running.get((name, number))
        if compiled is None:
            raise RuntimeError(
                f"max::{name}: graph {number} of the operation is not in this process; make operations, in the same "
                "order, before a program that calls them runs, and keep them as long as it does"
            )
        compiled(*tensors)

    terms = [
        f"Tensor x{i}" if role == "input" else f"Tensor(a{i}!) x{i}" for i, role in enumerate(roles)
    ]
    # not by torch.library.custom_op, whose wrappers take as long as a call of a small graph
    _fragment.define(
        f"{name}({', '.join([*terms, 'int graph'])}) -> ()", tags=torch.Tag.pt2_compliant_tag
    )
    _fragment.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"max::{name}", lambda *arguments: None, lib=_fragment)
    return getattr(torch.ops.max, name).default


def _is_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a call may skip torch's dispatcher, which costs more than a small graph.

    It may not if something observes the call: a compiler, subclasses such as fake tensors, modes, `torch.func`.
    """
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            return False
    return not torch._C._len_torch_dispatch_stack() and not _is_transformed()


def _is_transformed() -> bool:
    """Whether a transform of `torch.func` runs outside of a compiler's trace."""
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return not torch.compiler.is_compiling() and functorch.peek_interpreter_stack() is not None


class _Differentiable(torch.autograd.Function):
    """A call with operands that need a gradient: its results become part of torch's autograd graph."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, *tensors: torch.Tensor) -> Any:
        operation.call(*tensors)
        results = tensors[: operation.outputs]
        _keep(ctx, operation, tensors, results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        operation: Operation = ctx.operation
        if operation.backward is None:
            raise RuntimeError(
                f"{operation.name}: the operation has no gradient; give one with register_autograd, or call it on "
                "detached tensors"
            )
        returned = operation.backward(ctx, *gradients)
        operand_gradients = returned if isinstance(returned, tuple) else (returned,)
        if len(operand_gradients) != operation.operands:
            raise RuntimeError(
                f"{operation.name}: its backward returned {len(operand_gradients)} gradients, expected "
                f"{operation.operands}, one an operand"
            )
        return None, *[None] * operation.outputs, *operand_gradients


class _Transformed(_Differentiable):
    """The same under transforms of `torch.func`, in the form that they need, which makes a plain call 15 µs slower."""

    @staticmethod
    def forward(operation: Operation, *tensors: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        operation.call(*tensors)
        return tensors[: operation.outputs]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        operation, *tensors = inputs
        _keep(ctx, operation, tensors, output)


def _keep(
    ctx: Any,
    operation: Operation,
    tensors: Sequence[torch.Tensor],
    results: tuple[torch.Tensor, ...],
) -> None:
    """Saves the values that the backward of a call needs."""
    count = operation.outputs
    ctx.operation = operation
    ctx.mark_dirty(*tensors[:count])
    if operation.setup_context is not None:
        operands = tuple(tensors[count:])
        operation.setup_context(ctx, operands, results[0] if count == 1 else results)


class Operation:
    """An operation of torch: called with tensors, eagerly or within `torch.compile` and `torch.export`.

    Args:
        run: Runs it on plain tensors.
    """

    backward: Callable[..., Any] | None = None
    """Computes the gradients of the operands; see :meth:`register_autograd`."""
    setup_context: Callable[..., None] | None = None
    """Saves the values that the backward needs; see :meth:`register_autograd`."""

    def __init__(self, run: Compiled) -> None:
        self.name = run.name
        self._run = run  # kept alive by this object: `_running` has weak references
        name = _registered_name(run.name, run.roles)
        with _registration:
            self._number = next(_numbers[name])
            _running[name, self._number] = run
            self._operation = _register_operation(name, tuple(run.roles))
        self.outputs = run.outputs
        self.operands = len(run.roles) - run.outputs

    def __repr__(self) -> str:
        return f"<operation {self.name}>"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self  # as a function's: a copy of a module calls the same operation

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Runs it: the first tensors are written.

        Args:
            tensors: The tensors for the results, then the operands.

        Raises:
            TypeError: The number of tensors is wrong, or an argument is not a dense tensor.
            ValueError: A result has another shape or dtype than the tensor that is to take it, or a tensor is not
                on the CPU.
            RuntimeError: A tensor that is changed in place needs a gradient.
        """
        # checked here, as the errors of torch's dispatcher say less
        if len(tensors) != self.outputs + self.operands:
            raise TypeError(
                f"{self.name}: {len(tensors)} tensors, expected {self.outputs + self.operands}: {self.outputs} for "
                f"results, then {self.operands} operands"
            )
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
                raise TypeError(
                    f"{self.name}: argument {index} is a {kind.removeprefix('builtins.')}, expected a torch.Tensor"
                )
            if tensor.is_nested:
                raise TypeError(
                    f"{self.name}: argument {index} is a nested tensor; make it dense with .to_padded_tensor()"
                )
            if tensor.layout is not torch.strided:
                raise TypeError(
                    f"{self.name}: argument {index} has the layout {tensor.layout}; make it dense with .to_dense()"
                )
        if forward_ad._current_level >= 0 and any(
            [forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors]
        ):
            raise RuntimeError(
                f"{self.name}: the operation has no derivative in forward mode; register_autograd gives it one in "
                "reverse mode"
            )
        if torch.is_grad_enabled() and any([t.requires_grad for t in tensors]):
            for index in self._run.in_place:
                if tensors[index].requires_grad:
                    raise RuntimeError(
                        f"{self.name}: argument {index} is changed in place and needs a gradient; detach it"
                    )
            (_Transformed if _is_transformed() else _Differentiable).apply(self, *tensors)
            return
        self.call(*tensors)

    def call(self, *tensors: torch.Tensor) -> None:
        """Runs it without a gradient; see :meth:`__call__`."""
        if _is_plain(tensors):
            self._run(*tensors)
        else:
            self._operation(*tensors, self._number)

    def register_autograd(
        self, backward: Callable[..., Any], /, *, setup_context: Callable[..., None] | None = None
    ) -> None:
        """Gives the operation a gradient, as `torch.library.register_autograd` does.

        Args:
            backward: ``backward(ctx, *gradients)``: of the gradients of the results those of the operands, one or a
                tuple; None for an operand without one.
            setup_context: ``setup_context(ctx, inputs, output)`` with the operands and the result (a tuple of
                several): saves the values that the backward needs, by ``ctx.save_for_backward``.
        """
        self.backward, self.setup_context = backward, setup_context


@overload
def graph_op(
    fn: Forward,
    name: str | None = None,
    kernel_library: Path | KernelLibrary | None = None,
    input_types: Sequence[TensorType] | None = None,
    output_types: Sequence[TensorType] | None = None,
    num_outputs: int | None = None,
) -> Operation: ...


@overload
def graph_op(
    fn: None = None,
    name: str | None = None,
    kernel_library: Path | KernelLibrary | None = None,
    input_types: Sequence[TensorType] | None = None,
    output_types: Sequence[TensorType] | None = None,
    num_outputs: int | None = None,
) -> Callable[[Forward], Operation]: ...


def graph_op(
    fn: Forward | None = None,
    name: str | None = None,
    kernel_library: Path | KernelLibrary | None = None,
    input_types: Sequence[TensorType] | None = None,
    output_types: Sequence[TensorType] | None = None,
    num_outputs: int | None = None,
) -> Operation | Callable[[Forward], Operation]:
    """Turns a function that stages a graph into an operation of torch.

    The operation takes the tensors for the results first, and writes them. It is compiled for each form
    of its arguments; sizes that vary are symbols in `input_types`. `torch.compile` takes it as it is. It
    has the gradient that ``operation.register_autograd`` gives it; without one a backward through it is an error.

    Args:
        fn: Stages the graph out of its inputs, and returns its results. Without it, a decorator.
        name: The operation's name; the function's by default.
        kernel_library: Custom ops that the graph uses.
        input_types: The types of the graph's inputs; those of the arguments by default.
        output_types: The types of the results, checked against what the function returns.
        num_outputs: How many results there are; 1 by default.

    Returns:
        The operation.

    Raises:
        TypeError: The function takes arguments that are not positional.
        ValueError: `output_types` and `num_outputs` do not go together. When the operation is called: a result has
            another shape or dtype than the tensor that is to take it, or a tensor is not on the CPU.
    """
    if fn is None:
        return lambda fn: graph_op(fn, name, kernel_library, input_types, output_types, num_outputs)
    base = name or getattr(fn, "__name__", type(fn).__name__)
    if output_types is not None and num_outputs not in (None, len(output_types)):
        raise ValueError(
            f"graph_op {base}: num_outputs is {num_outputs}, and {len(output_types)} output_types are given"
        )
    outputs = len(output_types) if output_types is not None else num_outputs or 1
    library = library_of(kernel_library)

    def build(*tensors: torch.Tensor) -> Graph:
        types = input_types
        if types is None:
            types = [type_of(tensor) for tensor in tensors[outputs:]]
        graph = Graph(base, fn, input_types=types, kernel_library=library)
        if output_types is not None and list(graph.output_types) != list(output_types):
            raise ValueError(
                f"graph_op {base}: the function returns {graph.output_types}, and output_types is "
                f"{list(output_types)}"
            )
        return graph

    roles = ["output"] * outputs + ["input"] * _count(base, fn, input_types)
    return Operation(Compiled(base, roles, build, by_shape=input_types is None))


def _count(base: str, fn: Forward, input_types: Sequence[TensorType] | None) -> int:
    """The number of a function's inputs."""
    count = 0
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL and input_types is not None:
            count = max(count, len(input_types))
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            count += 1
        else:
            raise TypeError(
                f"graph_op {base}: {parameter} is no positional argument; each argument of the function is "
                "a tensor of the operation"
            )
    if input_types is not None and count != len(input_types):
        raise TypeError(
            f"graph_op {base}: the function takes {count} arguments, and {len(input_types)} "
            "input_types are given"
        )
    return count
