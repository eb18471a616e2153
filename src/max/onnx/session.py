"""A session with the method names of ONNX Runtime."""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from max import engine
from max.dtype import DType
from max.importers.onnx.element_types import numpy_of
from max.importers.onnx.importer import OnnxFramework
from max.importers.onnx.reader import read_model
from max.importers.program import Program
from max.importers.source import InputType
from max.onnx.settings import ExecutionMode

if TYPE_CHECKING:
    import onnx

__all__ = [
    "GraphOptimizationLevel", "InferenceSession", "NodeArg", "SessionOptions", "get_available_providers",
]  # fmt: skip

Array = npt.NDArray[Any]

_PROVIDERS = ["CPUExecutionProvider"]
_NAMES = {
    DType.float32: "float", DType.float64: "double", DType.float8_e4m3fn: "float8e4m3fn",
    DType.float8_e5m2: "float8e5m2",
}  # fmt: skip


def get_available_providers() -> list[str]:
    """The names of providers, as ONNX Runtime calls what executes ops: the CPU."""
    return list(_PROVIDERS)


class GraphOptimizationLevel(enum.IntEnum):
    """ONNX Runtime's levels of optimization. Without effect: graphs are always compiled in full."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_ALL = 99


class SessionOptions:
    """Options of a session, by ONNX Runtime's names. `intra_op_num_threads` sets the number of threads; the others are
    accepted and have no effect.
    """

    def __init__(self) -> None:
        self.intra_op_num_threads = 0
        self.inter_op_num_threads = 0
        self.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_ALL
        self.execution_mode = ExecutionMode.ORT_SEQUENTIAL
        self.log_severity_level = 2
        self.enable_cpu_mem_arena = True
        self.enable_mem_pattern = True
        self.enable_profiling = False
        self._entries: dict[str, str] = {}

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Keeps an entry. It has no effect.

        Args:
            key: The name.
            value: The value.
        """
        self._entries[key] = value

    def get_session_config_entry(self, key: str) -> str:
        """The value of an entry.

        Args:
            key: The name.

        Raises:
            RuntimeError: There is none.
        """
        if key not in self._entries:
            raise RuntimeError(f"no session option {key!r}")
        return self._entries[key]


@dataclass(frozen=True)
class NodeArg:
    """An input or output of a model.

    Attributes:
        name: Its name.
        shape: Sizes; the names of dynamic ones, or None.
        type: Its type as ONNX Runtime writes it, such as ``tensor(float)``.
    """

    name: str
    shape: list[int | str | None]
    type: str


def _describe_argument(name: str, type_: InputType) -> NodeArg:
    element = "string" if type_.kind == "text" else "undefined"
    if type_.dtype is not None:
        element = type_.stored_as or _NAMES.get(type_.dtype, type_.dtype.name)
    text = f"tensor({element})"
    if type_.kind == "sequence":
        text = f"seq({text})"
    return NodeArg(name, list(type_.shape or ()), f"optional({text})" if type_.optional else text)


class InferenceSession:
    """Runs an ONNX model, with the method names of ONNX Runtime: its programs work with ``import max.onnx as ort``.

    Models whose structure depends on data are compiled in parts, for the sizes that occur. Calls from several threads
    are executed one after the other.

    Args:
        path_or_bytes: The path of a model, the bytes of a file, or an `onnx.ModelProto`.
        sess_options: Options.
        providers: Names of providers. One must be that of the CPU.
        provider_options: Accepted and ignored.
        kwargs: Accepted and ignored.

    Raises:
        ImportError: The package `onnx` is not installed.
        ModelFileError: It is no valid model.
        ValueError: No provider is available.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes | onnx.ModelProto,
        sess_options: SessionOptions | None = None,
        providers: Sequence[str | tuple[str, Mapping[str, Any]]] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        names = [p if isinstance(p, str) else p[0] for p in providers or _PROVIDERS]
        if not set(names) & set(_PROVIDERS):
            raise ValueError(
                f"InferenceSession: providers is {names}, expected one of {_PROVIDERS}"
            )
        options = SessionOptions() if sess_options is None else sess_options
        model = read_model(path_or_bytes)
        self._model = model
        session = engine.InferenceSession(num_threads=options.intra_op_num_threads or None)
        self._program = Program(model.graph, OnnxFramework(model), session)
        self._inputs = dict(model.graph.inputs)
        self._outputs = [name for name, _ in model.graph.outputs]
        self._stored = {name: t.stored_as for name, t in model.graph.outputs if t.stored_as}
        self._dtypes = {name: _dtype_taken(type_) for name, type_ in self._inputs.items()}
        self._places = {name: index for index, name in enumerate(self._outputs)}
        self._is_plain = not self._stored and None not in self._dtypes.values()
        """Whether values go in and out as they are."""
        self._options = options
        self._lock = threading.Lock()

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: object = None,
    ) -> list[Any]:
        """Executes the model.

        Args:
            output_names: The outputs to return; None or empty: all.
            input_feed: The inputs by name: arrays, lists of arrays for sequences, None for absent optional ones.
            run_options: Accepted and ignored.

        Returns:
            The outputs: arrays, or lists of arrays for sequences.

        Raises:
            ValueError: A name is unknown, an input is missing, or its type or shape does not fit.
            UnsupportedOpsError: Nodes cannot be executed.
        """
        known = not output_names or self._places.keys() >= set(output_names)
        if known and self._is_plain:
            results = self._program.run_whole(input_feed)
            if results is not None:
                return [results[self._places[n]] for n in output_names] if output_names else results
        unknown = sorted(set(output_names) - set(self._outputs)) if output_names else None
        if unknown:
            raise ValueError(
                f"run: no output {unknown[0]!r}; the outputs are {', '.join(self._outputs)}"
            )
        feeds = self._feeds(input_feed)
        with self._lock:
            values = self._program.run(feeds)
        if self._stored:
            names = zip(self._outputs, values, strict=True)
            values = [_outward(value, self._stored.get(name, "")) for name, value in names]
        if not output_names:
            return values
        results = dict(zip(self._outputs, values, strict=True))
        return [results[name] for name in output_names]

    def _feeds(self, given_inputs: Mapping[str, Any]) -> dict[str, Any]:
        feeds: dict[str, Any] = {}
        constants = self._model.graph.constants
        for name in given_inputs:
            if name not in self._inputs and name not in constants:
                raise ValueError(
                    f"run: no input {name!r}; the inputs are {', '.join(self._inputs)}"
                )
        for name, type_ in self._inputs.items():
            value = given_inputs.get(name)
            # most inputs are arrays that fit: in a fifth of the time of the checks that name what does not
            if (
                type(value) is np.ndarray
                and value.dtype is self._dtypes[name]
                and _fits(value.shape, type_.shape)
            ):
                feeds[name] = value
                continue
            if name not in given_inputs and not type_.optional:
                raise ValueError(f"run: the input {name!r} is missing")
            feeds[name] = _inward(name, value, type_)
        return feeds

    def get_inputs(self) -> list[NodeArg]:
        """The inputs."""
        return [_describe_argument(name, type_) for name, type_ in self._inputs.items()]

    def get_outputs(self) -> list[NodeArg]:
        """The outputs."""
        return [_describe_argument(name, type_) for name, type_ in self._model.graph.outputs]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """None: constants of the model are compiled."""
        return []

    def get_providers(self) -> list[str]:
        """The names of what executes the model."""
        return list(_PROVIDERS)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """The options of each provider: none."""
        return {name: {} for name in _PROVIDERS}

    def set_providers(
        self, providers: Sequence[Any] | None = None, provider_options: object = None
    ) -> None:
        """Without effect: the CPU executes the model.

        Args:
            providers: Names.
            provider_options: Options.
        """

    def get_session_options(self) -> SessionOptions:
        """The options of the session."""
        return self._options

    def get_modelmeta(self) -> ModelMetadata:
        """What the file says of the model."""
        proto = self._model.proto
        entries = {entry.key: entry.value for entry in proto.metadata_props}
        return ModelMetadata(
            proto.producer_name, proto.graph.name, proto.domain, proto.doc_string, proto.graph.doc_string,
            proto.model_version, entries,
        )  # fmt: skip


@dataclass(frozen=True)
class ModelMetadata:
    """What a file says of its model."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str]


def _dtype_taken(type_: InputType) -> np.dtype[Any] | None:
    """The dtype of arrays that an input takes as they are; None: there is none."""
    if type_.kind != "tensor" or type_.dtype is None or type_.stored_as or type_.shape is None:
        return None
    return type_.dtype.to_numpy()


def _fits(sizes: Sequence[int], declared: Sequence[int | str | None] | None) -> bool:
    """Whether a shape agrees with a declared one, whose names and Nones are any size."""
    if declared is None or len(sizes) != len(declared):
        return False
    for size, wanted in zip(sizes, declared, strict=True):
        if size != wanted and isinstance(wanted, int):
            return False
    return True


def _inward(name: str, value: Any, type_: InputType) -> Any:
    """A value of the caller as the program takes it.

    Raises:
        ValueError: It does not fit the input.
    """
    if value is None:
        if type_.optional:
            return None
        raise ValueError(f"run: the input {name!r} is None")
    if type_.kind == "sequence":
        if not isinstance(value, list | tuple):
            raise ValueError(
                f"run: the input {name!r} is a {type(value).__name__}, expected a list of arrays"
            )
        return [_array(name, item, type_) for item in value]
    return _array(name, value, type_)


def _array(name: str, value: Any, type_: InputType) -> Array:
    array = np.asarray(value)
    if (
        isinstance(value, list | tuple | int | float)
        and type_.dtype is not None
        and array.dtype.kind in "biuf"
    ):
        # lists of numbers have the element type of the input
        array = array.astype(type_.dtype.to_numpy())
    if type_.kind == "text" or array.dtype.kind in "US":
        array = array.astype(object)
        flat = [
            item.decode("utf-8", "surrogateescape") if isinstance(item, bytes) else item
            for item in array.flat
        ]
        texts = np.empty(len(flat), object)
        texts[:] = flat
        return texts.reshape(array.shape)
    if type_.stored_as and type_.dtype is not None:
        array = array.astype(type_.dtype.to_numpy())
    if type_.dtype is not None and array.dtype != type_.dtype.to_numpy():
        raise ValueError(
            f"run: the input {name!r} has the element type {array.dtype}, expected {type_.dtype.to_numpy()}"
        )
    shape = type_.shape if type_.kind == "tensor" else None
    if shape is not None and not _fits(array.shape, shape):
        wanted = [size if size is not None else "?" for size in shape]
        raise ValueError(
            f"run: the input {name!r} has the shape {list(array.shape)}, expected {wanted}"
        )
    return array


def _outward(value: Any, stored_type: str) -> Any:
    if isinstance(value, list):
        return [_outward(item, stored_type) for item in value]
    return value.astype(numpy_of(stored_type)) if stored_type and value is not None else value
