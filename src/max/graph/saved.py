"""The file format of saved graphs: MLIR text, with binary data in safetensors files beside it.

A graph saved as ``model.mo`` consists of up to three files:

- ``model.mo``: the line ``// max graph 1``, then the module as MLIR text in UTF-8. It refers to large constants by name
  (``#mo.resource<...>``) and to weights as ``mo.constant.external``;
- ``model.constants.safetensors``: the large constants by name, if there are any;
- ``model.weights.safetensors``: the values of weights by name, if they were given; an ordinary checkpoint.

Loading maps both safetensors files into memory. MLIR text without the first line is accepted too.
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

__all__ = ["FORMAT_VERSION", "is_saved", "load_module", "save_module", "saved_weights"]

FORMAT_VERSION = 1
"""The version of written files; newer versions are rejected."""

_HEADER = re.compile(r"// max graph (\d+)\n")


def _beside(path: Path, table: str) -> Path:
    return path.with_suffix(f".{table}.safetensors")


def save_module(module: mlir.ModuleOp, path: Path, weights: Mapping[str, Any] | None) -> None:
    """Writes a module in the format above. Each existing file is replaced atomically.

    Args:
        module: The module.
        path: The path of the text file.
        weights: Values of weights by name: NumPy arrays, `Tensor` or other DLPack arrays.

    Raises:
        ValueError: A value has a dtype that safetensors files cannot hold, or the graph has no weight of a name.
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
    for table, arrays in tables.items():
        if arrays:
            write_safetensors(_beside(path, table), {k: _contiguous(v) for k, v in arrays.items()})
        else:
            # of a graph that was saved here before
            _beside(path, table).unlink(missing_ok=True)
    text = f"// max graph {FORMAT_VERSION}\n{mlir.print_module(module)}\n"
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    aside.write_text(text, encoding="utf-8")
    # atomic: a reader sees the old file or the whole new one
    aside.replace(path)


def _contiguous(value: Any) -> npt.NDArray[Any]:
    tensor = (
        Tensor.from_numpy(cast("npt.NDArray[Any]", value))
        if isinstance(value, np.ndarray)
        else Tensor.from_dlpack(value)
    )
    return np.asarray(tensor.to_numpy(), order="C")


def load_module(path: Path) -> mlir.ModuleOp:
    """Reads and verifies a saved module, and maps its large constants.

    Raises:
        WeightsFileError: The constants file is damaged or missing.
        ValueError: The text is not a valid module or has a newer version, or a constant is missing or of another shape.
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
            f"{_beside(path, 'constants')} is missing; it holds the constants of {path}"
        )
    module = mlir.parse_module(text, constants, str(path))
    mlir.verify_module(module)
    return module


def is_saved(path: Path) -> bool:
    """Whether a file begins with the first line that `save_module` writes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        # a byte is a character of latin-1, so any file is text
        return _HEADER.match(file.read(40).decode("latin-1")) is not None


def saved_weights(path: Path) -> dict[str, Tensor]:
    """Maps the weights that were saved with a graph, by name; empty if none were."""
    file = _open_beside(path, "weights")
    return {} if file is None else {name: file.read(name) for name in file.entries}


def _open_beside(path: Path, table: str) -> SafetensorsFile | None:
    """Opens a safetensors file beside a saved module; None if it does not exist.

    Raises:
        WeightsFileError: The file is damaged.
    """
    beside = _beside(path, table)
    if not beside.exists():
        return None
    try:
        return SafetensorsFile(beside)
    except WeightsFileError as error:
        raise WeightsFileError(
            f"the {table} of {path} are damaged: {error}; save the graph again"
        ) from error
