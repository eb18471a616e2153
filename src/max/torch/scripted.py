"""TorchScript modules as graphs, and as functions that keep the module's state."""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.utils import _pytree

from max.dtype import DType
from max.engine import InferenceSession, Model, TorchInputSpec
from max.graph import Graph
from max.importers.errors import ImportFailure, ModelFileError, error_line
from max.importers.torch.archive import load_script
from max.importers.torch.script.program import ScriptProgram
from max.torch._convert import max_dtype_to_torch, tensor_of, view_of
from max.torch.exported import from_exported

__all__ = ["ScriptedModule", "from_script"]

Source = str | os.PathLike[str] | torch.jit.ScriptModule

_SIZES = (8, 32, 64, 224, 512, 1600, 16000)
"""What dynamic sizes are while a module is traced: the first that the module takes."""
_INTEGERS: dict[str, type[int]] = {"int": int, "bool": bool}


def _module(source: Source) -> torch.jit.ScriptModule:
    return source if isinstance(source, torch.jit.ScriptModule) else load_script(source)


def from_script(
    source: Source,
    inputs: Sequence[TorchInputSpec | torch.Tensor | Any],
    name: str = "main",
    method: str = "forward",
) -> Graph:
    """A TorchScript module as a graph.

    The graph's inputs are the tensors that the method takes, and its outputs those that it returns. Numbers and texts
    among the arguments are constants. Tensors among the attributes that the method sets are inputs behind the others,
    and their new values outputs behind the others; other such attributes keep the values of the file:
    `ScriptedModule` follows them. Branches and loops follow the values that are known: numbers, sizes, attributes.

    Args:
        source: The path of a file of `torch.jit.save`, or a module.
        inputs: For each argument a `TorchInputSpec`, with names or None for dynamic sizes; an example tensor; or the
            number or text itself. Arguments with a default may be left out.
        name: The name of the graph.
        method: The method.

    Returns:
        The graph, to be loaded with `max.engine.InferenceSession.load`, or saved.

    Raises:
        ModelFileError: The file holds no TorchScript module.
        UnsupportedOpsError: Ops cannot be staged; it lists all of them.
        ImportFailure: The arguments do not fit, or the module cannot be traced with them.
    """
    program = ScriptProgram(_module(source), method)
    given = _complete(program, inputs)
    error: Exception | None = None
    is_dynamic = any(
        isinstance(x, TorchInputSpec) and not all(isinstance(size, int) for size in x.shape or ())
        for x in given
    )
    for size in _SIZES if is_dynamic else _SIZES[:1]:
        try:
            return from_exported(_export_program(program, given, size), name)
        except ImportFailure:
            raise
        except Exception as failure:
            error = error or failure
    assert error is not None
    raise ImportFailure(f"{method}{tuple(given)} cannot be traced: {error_line(error)}") from error


def _complete(program: ScriptProgram, inputs: Sequence[Any]) -> list[Any]:
    """The arguments with defaults, and numbers of the declared types."""
    given = list(inputs)
    names = [f"{name}: {type_}" for name, type_ in program.parameters_]
    missing = program.defaults[len(given) :]
    if len(given) > len(names) or any(default is ... for default in missing):
        raise ImportFailure(
            f"got {len(given)} inputs, and the module takes ({', '.join(names)}); give a TorchInputSpec for each"
        )
    types = [type_ for _, type_ in program.parameters_]
    return [_as_declared(x, type_) for x, type_ in zip([*given, *missing], types, strict=True)]


def _as_declared(value: Any, type_: str) -> Any:
    """A number as torch passes it to a parameter of a type, a list with its items so; else the value itself."""
    inner = re.fullmatch(r"(?:Optional|List)\[(.*)\]", type_)
    if inner is not None:
        if isinstance(value, list):
            return [_as_declared(item, inner[1]) for item in cast("list[Any]", value)]
        return _as_declared(value, inner[1])
    if type_ == "float" and isinstance(value, int):
        return float(value)
    # a bool is an int, too
    return _INTEGERS[type_](value) if type_ in _INTEGERS and isinstance(value, int) else value


def _export_program(program: ScriptProgram, arguments: Sequence[Any], size: int) -> Any:
    named: dict[str, Any] = {}
    args: list[Any] = []
    dynamic: list[Any] = []
    for argument in arguments:
        if not isinstance(argument, TorchInputSpec):
            args.append(argument)
            dynamic.append(None)
            continue
        if argument.shape is None:
            raise ImportFailure("a TorchInputSpec has no shape, which TorchScript does not declare")
        shape: list[int] = []
        dims: dict[int, Any] = {}
        for axis, length in enumerate(argument.shape):
            if isinstance(length, int):
                shape.append(length)
                continue
            key = length or f"size_{len(named)}"
            dims[axis] = named.setdefault(key, torch.export.Dim(_identifier(key)))
            # different names have different sizes, so that torch does not take them for one
            shape.append(size + 2 * list(named).index(key))
        dtype = max_dtype_to_torch(argument.dtype or DType.float32)
        args.append(torch.zeros(shape, dtype=dtype))
        dynamic.append(dims or None)
    state = tuple(program.initial().values())
    fixed = tuple(None for _ in state)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        specs = (tuple(dynamic), fixed) if named else None
        return torch.export.export(
            program, (tuple(args), state), dynamic_shapes=specs, strict=False
        )


def _identifier(name: str) -> str:
    safe = "".join(c if c.isalnum() else "_" for c in name)
    return safe if safe.isidentifier() else f"size_{safe}"


def _form_of(leaf: Any) -> tuple[Any, ...]:
    """What of an argument or a state a graph depends on."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0
    return type(leaf), leaf.hex() if isinstance(leaf, float) else leaf


class ScriptedModule:
    """A TorchScript module that runs in MAX, with the state that it keeps between calls.

    A graph is made for each combination of shapes, numbers and texts among the arguments and the state. Other methods
    than `forward` run in torch, on the same state.

    ::

        model = max.torch.ScriptedModule("silero_vad.jit")
        for chunk in audio.split(512):
            speech = model(chunk[None], 16000)
        model.reset_states()

    Args:
        source: The path of a file of `torch.jit.save`, or a module.
        session: What compiles the graphs.

    Raises:
        ModelFileError: The file holds no TorchScript module.
    """

    _MOST_GRAPHS = 256

    def __init__(self, source: Source, session: InferenceSession | None = None) -> None:
        self._script = _module(source)
        self._session = session or InferenceSession()
        self._program = ScriptProgram(self._script)
        self._graphs: dict[Any, tuple[Model, dict[str, Any], Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Any:
        """What `forward` returns.

        Args:
            inputs: Tensors, numbers and texts.

        Raises:
            UnsupportedOpsError: Ops cannot be staged.
            ImportFailure: The module cannot be traced with these arguments.
        """
        given = _complete(self._program, inputs)
        with self._lock, torch.no_grad():
            state = self._program.initial()
            leaves = _pytree.tree_leaves((tuple(given), tuple(state.values())))
            key = tuple([_form_of(leaf) for leaf in leaves])
            if key not in self._graphs:
                if len(self._graphs) >= self._MOST_GRAPHS:
                    del self._graphs[next(iter(self._graphs))]
                self._graphs[key] = self._compile_call(given)
            model, final, out_spec = self._graphs[key]
            tensors = [x.detach().contiguous() for x in leaves if isinstance(x, torch.Tensor)]
            results = [tensor_of(r) for r in model.execute(*map(view_of, tensors))]
            return self._method_result(results, final, out_spec)

    def _compile_call(self, arguments: Sequence[Any]) -> tuple[Model, dict[str, Any], Any]:
        try:
            exported = _export_program(self._program, arguments, 0)
        except (ImportFailure, ModelFileError):
            raise
        except Exception as error:
            raise ImportFailure(f"forward cannot be traced: {error_line(error)}") from error
        final = dict(self._program.final)
        model = self._session.load(from_exported(exported))
        return model, final, exported

    def _method_result(
        self, results: list[torch.Tensor], final: dict[str, Any], program: Any
    ) -> Any:
        """The method's result; the state is set."""
        outputs = [spec.arg for spec in program.graph_signature.output_specs]
        taken = iter(results)
        # graphs leave out results that are None only
        leaves = [next(taken) if getattr(arg, "value", 0) is not None else None for arg in outputs]
        leaves = [getattr(arg, "value", leaf) for arg, leaf in zip(outputs, leaves, strict=True)]
        result, tensors = _pytree.tree_unflatten(leaves, program.call_spec.out_spec)
        values = iter(tensors)
        for path in self._program.state:
            value = final[path] if path in final else next(values)
            owner: Any = self._script
            *outer, last = path.split(".")
            for name in outer:
                owner = getattr(owner, name)
            setattr(owner, last, value)
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._script, name)
        return partial(value) if callable(value) else value

    def __repr__(self) -> str:
        return f"ScriptedModule({self._script.original_name})"
