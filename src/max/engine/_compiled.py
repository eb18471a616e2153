"""Models that are compiled and have no weights yet, and the files that hold them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max import mlir
from max._dataclass import dataclass
from max._lazy import lazy_module
from max.engine._options import CustomExtensionsType
from max.engine._tensor_spec import InputSpec
from max.engine.load.opaque_buffers import with_buffers
from max.engine.load.program_store import Loaded
from max.kernel.language.extensions import load_extensions

if TYPE_CHECKING:
    from max import graph as graphs
    from max.graph import saved as saved_files
    from max.graph import weights as weight_files
else:
    # the graph layer is imported by callers that stage graphs
    graphs = lazy_module("max.graph")
    saved_files = lazy_module("max.graph.saved")
    weight_files = lazy_module("max.graph.weights")

__all__ = ["CompiledGraph", "CompiledModel", "graphs_of", "read"]

FOREIGN = {".mef": "a compiled model of MAX", ".pb": "a graph of TensorFlow 1"}
"""Suffixes of files that are not graphs of this engine, with a description of each."""

_TORCH = ("max.torch.files", "from_file")
_TENSORFLOW = ("max.tensorflow", "from_tensorflow")
READERS = {
    ".onnx": ("max.onnx.graphs", "from_onnx"),
    **dict.fromkeys((".pt2", ".pt", ".pth", ".jit", ".ts", ".torchscript"), _TORCH),
    **dict.fromkeys((".keras", ".tflite"), _TENSORFLOW),
}
"""Suffixes of files of other frameworks, with the module and the function that make a graph of one."""


@dataclass(frozen=True)
class CompiledGraph:
    """A graph, its module as it is compiled, the values that were saved with it, and its program.

    Attributes:
        program: None where modules are interpreted.
    """

    graph: graphs.Graph
    module: mlir.ModuleOp
    saved_weights: Mapping[str, Any]
    program: Loaded | None = None


class CompiledModel:
    """A compiled model without weights: `InferenceSession.compile` makes it, `InferenceSession.init` binds weights.

    It may be bound several times, to other weights each time.
    """

    __module__ = "max.engine"

    def __init__(self, parts: Iterable[CompiledGraph], session: object = None) -> None:
        self._parts = tuple(parts)
        self._session = session

    def export_mef(self, path: str | os.PathLike[str]) -> None:
        """Writes the model to a file that `InferenceSession.load` and `compile`, and `max.engine.read`, take.

        The file is that of `max.graph.Graph.save`: it holds the graph, for any machine. Machine code stays in the
        cache in ``MAX_CACHE_DIR``; if it is not there, loading the file compiles the graph.

        Args:
            path: The file.

        Raises:
            ValueError: The model has several graphs.
            OSError: The file cannot be written.
        """
        self.single_graph("export_mef").graph.save(Path(path))

    def single_graph(self, op: str) -> CompiledGraph:
        """The model's graph.

        Args:
            op: The call, for the error.

        Raises:
            ValueError: There are several.
        """
        if len(self._parts) != 1:
            names = ", ".join(part.graph.name for part in self._parts) or "none"
            raise ValueError(
                f"{op}: the model has {len(self._parts)} graphs ({names}), expected one; load_all and init_all take "
                "several"
            )
        return self._parts[0]

    def __repr__(self) -> str:
        return f"CompiledModel({', '.join(part.graph.name for part in self._parts)})"


def read(source: str | os.PathLike[str]) -> CompiledModel:
    """Reads a model that `CompiledModel.export_mef` or `max.graph.Graph.save` wrote.

    `InferenceSession.init` finds its machine code in the cache, or compiles it.

    Args:
        source: The file.

    Raises:
        RuntimeError: The path is not that of such a file.
        TypeError: It is no path.
    """
    if not isinstance(source, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"read: expected the path of a saved graph, got {type(source).__name__}")
    return CompiledModel(graphs_of("read", Path(source)))


def graphs_of(
    op: str,
    model: object,
    extensions: Iterable[CustomExtensionsType | None] = (),
    input_specs: Iterable[InputSpec] | Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[CompiledGraph]:
    """The graphs of a model, whose custom ops are registered, with their modules; they are not compiled.

    Args:
        op: The call, for error messages.
        model: A graph, a `max.graph.Module`, or the path of a saved graph or of a model of another framework.
        extensions: Files and folders with custom ops.
        input_specs: The types of the inputs, for a model of another framework; of some, shapes by name.
        options: Arguments of the function that reads such a model.

    Raises:
        TypeError: The model is none of these.
        ValueError: A model of another framework cannot be a graph.
        RuntimeError: The path is not that of a saved graph.
    """
    saved: Mapping[str, Any] = {}
    if isinstance(model, graphs.Graph):
        staged = [model]
    elif isinstance(model, graphs.Module):
        staged = list(model.graphs)
    elif isinstance(model, str | Path):
        path = Path(model)
        reader = _reader(path)
        # a saved graph may have any suffix
        if reader is not None and not saved_files.is_saved(path):
            staged = [_import_graph(path, reader, input_specs, options)]
        else:
            graph, saved = _read_saved(op, path)
            staged = [graph]
    else:
        raise TypeError(
            f"{op}: expected a Graph or the path of a saved one, got {type(model).__name__}"
        )
    for extension in extensions:
        load_extensions(extension)
    # those that the graph itself names
    for graph in staged:
        load_extensions(list(graph.kernel_libraries_paths))
    return [CompiledGraph(graph, with_buffers(graph.to_mlir()), saved) for graph in staged]


def _reader(path: Path) -> tuple[str, str] | None:
    """The module and function that make a graph of a model of another framework."""
    if path.is_dir() and (path / "saved_model.pb").is_file():
        return _TENSORFLOW
    return READERS.get(path.suffix.lower()) if path.is_file() else None


def _import_graph(
    path: Path,
    reader: tuple[str, str],
    input_specs: Iterable[InputSpec] | Mapping[str, Any] | None,
    options: Mapping[str, Any] | None,
) -> graphs.Graph:
    """The graph of a model of another framework."""
    module, name = reader
    function = getattr(importlib.import_module(module), name)
    specs: Any = input_specs
    if input_specs is not None and not isinstance(input_specs, Mapping):
        specs = list(input_specs)
    return function(path, specs, **(options or {}))


def _read_saved(op: str, path: Path) -> tuple[graphs.Graph, Mapping[str, Any]]:
    """The graph of a file, and the values of weights that were saved with it."""
    if not path.exists():
        raise RuntimeError(f"{op}: {path} does not exist")
    format = FOREIGN.get(path.suffix.lower())
    if format is not None and not saved_files.is_saved(path):
        raise RuntimeError(
            f"{op}: {path} is {format}, which is not read here; build a max.graph.Graph with its weights "
            "(max.graph.weights reads safetensors, GGUF and PyTorch files)"
        )
    try:
        return graphs.Graph(path.stem, path=path), saved_files.saved_weights(path)
    except weight_files.WeightsFileError as error:
        raise RuntimeError(f"{op}: {error}") from error
    except (ValueError, OSError) as error:
        raise RuntimeError(f"{op}: {path} is not a saved graph: {error}") from error
