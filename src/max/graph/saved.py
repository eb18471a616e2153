"""Graphs in files: the text of the MLIR, and beside it what is not text.

A graph saved as ``model.mo`` is up to three files:

- ``model.mo``: a line ``// max graph 1``, then the module as MLIR text in UTF-8. The big constants stand in it by
  name (``dense_resource<...>``), the weights as ``mo.constant.external`` with a name;
- ``model.constants.safetensors``: the big constants by name, where there are any;
- ``model.weights.safetensors``: values of weights by name, where they were given. It is an ordinary checkpoint.

Both are mapped, not read, when the graph is loaded. A file that has only the text of a module, without the first
line, is a graph too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from max import mlir
from max.driver import Tensor
from max.graph.weights._safetensors_file import (
    SafetensorsFile,
    WeightsFileError,
    write_safetensors,
)

__all__ = ["FORMAT_VERSION", "load_module", "saved_weights", "save_module"]

FORMAT_VERSION = 1
"""The version that is written; newer ones are refused."""

_HEADER = re.compile(r"// max graph (\d+)\n")


def _beside(path: Path, what: str) -> Path:
    return path.with_suffix(f".{what}.safetensors")


def save_module(module: mlir.ModuleOp, path: Path, weights: Mapping[str, Any] | None) -> None:
    """Writes a module; see the format above. Files that are there are replaced whole, or not at all.

    Args:
        module: The module.
        path: Where its text goes.
        weights: Values of weights by name: NumPy arrays, `Tensor` or other DLPack arrays.

    Raises:
        ValueError: A weight's value has a dtype that no checkpoint can hold, or the graph has no such weight.
    """
    declared = {
        op.attr("name")
        for op in module.walk()
        if isinstance(op, mlir.MoOp) and op.name == "mo.constant.external"
    }
    unknown = sorted(name for name in weights or {} if name not in declared)
    if unknown:
        raise ValueError(f"save: the graph has no weight {unknown[0]!r}")
    tables = {"constants": mlir.resources(module), "weights": dict(weights or {})}
    for what, arrays in tables.items():
        if arrays:
            write_safetensors(_beside(path, what), {k: _contiguous(v) for k, v in arrays.items()})
        else:
            _beside(path, what).unlink(missing_ok=True)
    text = f"// max graph {FORMAT_VERSION}\n{mlir.print_module(module)}\n"
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _contiguous(value: Any) -> npt.NDArray[Any]:
    tensor = (
        Tensor.from_numpy(cast("npt.NDArray[Any]", value))
        if isinstance(value, np.ndarray)
        else Tensor.from_dlpack(value)
    )
    return np.asarray(tensor.to_numpy(), order="C")


def load_module(path: Path) -> mlir.ModuleOp:
    """Reads and verifies a saved module; its big constants are mapped.

    Raises:
        WeightsFileError: The file with its constants is damaged or missing.
        ValueError: The text is no valid module, of a newer format, or a constant is missing or of another shape.
        OSError: The file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error.reason} at byte {error.start}") from error
    header = _HEADER.match(text)
    if header is not None and int(header[1]) > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format {header[1]}, this version reads up to {FORMAT_VERSION}"
        )
    constants: dict[str, npt.NDArray[Any]] = {}
    if (file := _open_beside(path, "constants")) is not None:
        constants = {name: file.read(name).to_numpy() for name in file.entries}
    elif "#mo.resource<" in text:
        raise WeightsFileError(
            f"{_beside(path, 'constants')} is missing; it has the constants of {path}"
        )
    module = mlir.parse_module(text, constants, str(path))
    mlir.verify_module(module)
    return module


def saved_weights(path: Path) -> dict[str, Tensor]:
    """The values of weights that were saved with a graph, mapped; empty where there are none."""
    file = _open_beside(path, "weights")
    return {} if file is None else {name: file.read(name) for name in file.entries}


def _open_beside(path: Path, what: str) -> SafetensorsFile | None:
    """A file beside a saved module; None where there is none.

    Raises:
        WeightsFileError: It is damaged.
    """
    beside = _beside(path, what)
    if not beside.exists():
        return None
    try:
        return SafetensorsFile(beside)
    except WeightsFileError as error:
        raise WeightsFileError(
            f"the {what} of {path} are damaged: {error}; save the graph again"
        ) from error
