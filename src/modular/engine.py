"""The Python API of 2023: `InferenceSession.load` of a model file, `Model.execute` with names.

::

    from modular import engine

    session = engine.InferenceSession()
    model = session.load("model.onnx")
    outputs = model.execute(input=x)

ONNX files are read (``pip install "supremum[onnx]"``), programs of torch.export and TorchScript modules
(``"supremum[torch]"``), SavedModels, Keras and TFLite files (``"supremum[tensorflow]"``).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from max import dtype as dtypes
from max import onnx
from max.engine import InferenceSession as EngineSession
from max.engine import Model as EngineModel
from max.engine import TorchInputSpec
from max.graph import Graph
from max.importers.tensorflow.convert import kind_of, onnx_of

__all__ = [
    "CommonLoadOptions", "DType", "InferenceSession", "Model", "TensorFlowLoadOptions", "TensorSpec",
    "TorchLoadOptions",
]  # fmt: skip


class DType(enum.Enum):
    """The tensor data type."""

    bool = 0
    int8 = 1
    int16 = 2
    int32 = 3
    int64 = 4
    uint8 = 5
    uint16 = 6
    uint32 = 7
    uint64 = 8
    float16 = 9
    float32 = 10
    float64 = 11
    unknown = 12


@dataclass(frozen=True)
class TensorSpec:
    """The properties of a tensor.

    Attributes:
        shape: The sizes; None for a dynamic one.
        dtype: The element type.
        name: The name.
    """

    shape: list[int | None]
    dtype: DType
    name: str


@dataclass(frozen=True)
class TensorFlowLoadOptions:
    """How to load TensorFlow models.

    Attributes:
        exported_name: The exported name from the model's signature.
        type: The kind of model.
    """

    exported_name: str = "serving_default"
    type: str = "tf"


@dataclass(frozen=True)
class CommonLoadOptions:
    """Common options for how to load models.

    Attributes:
        custom_ops_path: The path from which to load custom ops. Models of ONNX have none.
    """

    custom_ops_path: str = ""


@dataclass(frozen=True)
class TorchLoadOptions:
    """How to load TorchScript modules, which do not declare their inputs.

    Attributes:
        input_specs: The shape and dtype of each input.
    """

    input_specs: Sequence[TorchInputSpec] = ()


class _GraphSession:
    """A compiled graph with the names of a session of ONNX.

    Args:
        model: The model.
        names: The names of its inputs; they are ``input0`` and so on where the file has none.
    """

    def __init__(self, model: EngineModel, names: Sequence[str] | None) -> None:
        self._model = model
        self._names = names

    def get_inputs(self) -> list[onnx.NodeArg]:
        specs = self._model.input_metadata
        names = self._names or [f"input{i}" for i in range(len(specs))]
        return [_argument(name, spec) for name, spec in zip(names, specs, strict=True)]

    def get_outputs(self) -> list[onnx.NodeArg]:
        return [_argument(f"result{i}", s) for i, s in enumerate(self._model.output_metadata)]

    def run(self, names: None, feeds: Mapping[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        results = self._model.execute(*[feeds[argument.name] for argument in self.get_inputs()])
        return [result.to_numpy() for result in results]


def _argument(name: str, spec: Any) -> onnx.NodeArg:
    shape = [None] * 0 if spec.shape is None else spec.shape
    return onnx.NodeArg(name, list(shape), f"tensor({spec.dtype.name})")


def _spec(argument: onnx.NodeArg) -> TensorSpec:
    name = argument.type.removeprefix("tensor(").removesuffix(")")
    name = {"float": "float32", "double": "float64"}.get(name, name)
    shape = [size if isinstance(size, int) else None for size in argument.shape]
    return TensorSpec(shape, DType.__members__.get(name, DType.unknown), argument.name)


class Model:
    """A loaded model that you can execute. `InferenceSession.load` makes it."""

    def __init__(self, session: onnx.InferenceSession | _GraphSession) -> None:
        self._session = session

    def execute(self, *args: Any, **kwargs: Any) -> dict[str, npt.NDArray[Any]]:
        """Executes the model.

        Args:
            args: One dictionary of inputs by name, for names that are no keywords.
            kwargs: The inputs by name: arrays.

        Returns:
            The outputs by name.

        Raises:
            RuntimeError: Names or shapes are not those that the model expects.
            TypeError: An element type cannot be cast to the one that the model expects.
        """
        given = {**(args[0] if args else {}), **kwargs}
        specs = {spec.name: spec for spec in self.input_metadata}
        if set(given) != set(specs):
            raise RuntimeError(f"execute: got the inputs {sorted(given)}, expected {sorted(specs)}")
        feeds = {name: self._cast(np.asarray(value), specs[name]) for name, value in given.items()}
        try:
            outputs = self._session.run(None, feeds)
        except ValueError as error:
            raise RuntimeError(f"execute: {error}") from error
        names = [argument.name for argument in self._session.get_outputs()]
        return dict(zip(names, outputs, strict=True))

    @staticmethod
    def _cast(array: npt.NDArray[Any], spec: TensorSpec) -> npt.NDArray[Any]:
        if spec.dtype is DType.unknown:
            return array
        wanted = getattr(dtypes.DType, spec.dtype.name).to_numpy()
        if not np.can_cast(array.dtype, wanted, "same_kind"):
            raise TypeError(f"execute: the input {spec.name!r} is {array.dtype}, expected {wanted}")
        return array.astype(wanted)

    @property
    def input_metadata(self) -> list[TensorSpec]:
        """Shapes, dtypes and names of the inputs."""
        return [_spec(argument) for argument in self._session.get_inputs()]

    @property
    def output_metadata(self) -> list[TensorSpec]:
        """Shapes, dtypes and names of the outputs."""
        return [_spec(argument) for argument in self._session.get_outputs()]


class InferenceSession:
    """Loads models.

    Args:
        num_threads: The number of threads; that of the physical cores by default.
        device: The device: the CPU.

    Raises:
        RuntimeError: The device is another one.
    """

    def __init__(self, num_threads: int | None = None, device: str | None = None) -> None:
        if device is not None and device.lower() != "cpu":
            raise RuntimeError(f"InferenceSession: the device is {device!r}, expected 'cpu'")
        self._options = onnx.SessionOptions()
        self._options.intra_op_num_threads = num_threads or 0

    def load(
        self,
        model_path: str | Path,
        *options: TensorFlowLoadOptions | TorchLoadOptions | CommonLoadOptions,
        **kwargs: Any,
    ) -> Model:
        """Loads a model.

        Args:
            model_path: The path of an ONNX model, a SavedModel's folder, a Keras, TFLite or PyTorch file.
            options: Options of the kinds above.
            kwargs: Accepted and ignored.

        Raises:
            RuntimeError: The path is invalid, or the file holds no model that can be read.
        """
        path = Path(model_path)
        kind = kind_of(path)
        if kind is None and not path.is_file():
            what = "a folder without saved_model.pb" if path.is_dir() else "no file"
            raise RuntimeError(f"load: {path} is {what}")
        try:
            if kind is not None:
                return Model(
                    onnx.InferenceSession(onnx_of(path, _exported_name(options)), self._options)
                )
            if path.suffix.lower() in _TORCH:
                return Model(self._torch(path, options))
            return Model(onnx.InferenceSession(path, self._options))
        except (ValueError, NotImplementedError, ImportError, OSError) as error:
            raise RuntimeError(f"load: {error}") from error

    def _torch(self, path: Path, options: Sequence[Any]) -> _GraphSession:
        from max.torch.files import from_file, input_names

        specs = [s for o in options if isinstance(o, TorchLoadOptions) for s in o.input_specs]
        graph: Graph = from_file(path, specs or None)
        session = EngineSession(num_threads=self._options.intra_op_num_threads or None)
        return _GraphSession(session.load(graph), input_names(path, len(graph.inputs)))


_TORCH = (".pt2", ".pt", ".pth", ".jit", ".ts", ".torchscript")


def _exported_name(options: Sequence[Any]) -> str:
    names = [o.exported_name for o in options if isinstance(o, TensorFlowLoadOptions)]
    return names[-1] if names else TensorFlowLoadOptions().exported_name
