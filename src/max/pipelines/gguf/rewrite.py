"""Copies a GGUF file with new values for some tensors; metadata and all other tensors are copied unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from max.driver import Tensor
from max.dtype.blocks import BLOCK_FORMATS
from max.engine import InferenceSession
from max.graph.weights import GGUFFile, WeightData
from max.pipelines.checkpoints.quantize import Quantizer, encoding_for, of_whole_blocks
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.file_writer import GGUFEntry, write_gguf

__all__ = ["NewTensor", "rewrite_gguf"]

_FLOATS = {"F32": np.float32, "F64": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
"""The dtype in which new values of each float type are written."""
_WRITABLE = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0")
"""The block types that have an encoder."""
_NEAREST = {
    "Q4_1": "Q5_K", "Q5_0": "Q6_K", "Q5_1": "Q6_K", "Q8_1": "Q8_0", "Q8_K": "Q8_0",
}  # fmt: skip
"""Replacements of block types without an encoder, with at least as many bits; Q4_K replaces all others."""


@dataclass(frozen=True)
class NewTensor:
    """New values of a tensor.

    Args:
        shape: The shape.
        values: Computes the values as float32.
        like: The tensor of the file whose type it gets; empty: float32.
        own_name: The decoder's name of the weight.
    """

    shape: tuple[int, ...]
    values: Callable[[], npt.NDArray[np.float32]]
    like: str
    own_name: str


def rewrite_gguf(
    file: GGUFFile,
    path: Path,
    new_tensors: Mapping[str, NewTensor],
    session: InferenceSession,
    kind: str | None = None,
) -> int:
    """Writes a copy of a file with new values for some tensors.

    Args:
        file: The file, including all parts of a split file.
        path: The new file.
        new_tensors: The new tensors by name; names that the file lacks are appended.
        session: Compiles and runs the encoding kernels.
        kind: The type of new matrices, such as ``q8_0``; None: the tensor's type in the file, or if that has no
            encoder, one with at least as many bits.

    Returns:
        The size of the tensors in bytes.

    Raises:
        ModelFilesError: `path` is the file itself, or a tensor's type is unknown or not numeric.
    """
    if path.exists() and path.samefile(file.path):
        raise ModelFilesError(f"{path} is the model itself", "Give the name of a new file.")
    quantizer = Quantizer(session)
    entries: list[GGUFEntry] = []
    for name, tensor in file.tensors.items():
        if name in new_tensors:
            entries.append(_entry(file, name, new_tensors[name], quantizer, kind))
            continue
        if tensor.nbytes is None:
            raise ModelFilesError(
                f"{file.path}: the type {tensor.type_name} of {name!r} is not known"
            )
        entries.append(
            GGUFEntry(
                name, tensor.type_name, tensor.shape, tensor.nbytes, partial(file.read, tensor)
            )
        )
    further = (name for name in new_tensors if name not in file.tensors)
    entries += [_entry(file, name, new_tensors[name], quantizer, kind) for name in further]
    # the copy is a single file with the writer's alignment
    metadata = {
        key: value
        for key, value in file.stored_metadata.items()
        if not key.startswith("split.") and key != "general.alignment"
    }
    write_gguf(path, metadata, entries)
    return sum(entry.nbytes for entry in entries)


def _entry(
    file: GGUFFile, name: str, new: NewTensor, quantizer: Quantizer, kind: str | None
) -> GGUFEntry:
    """Encodes a new tensor."""
    stored = file.tensors[new.like].type_name if new.like else "F32"
    chosen = stored if stored in (*_FLOATS, *_WRITABLE) else _NEAREST.get(stored, "Q4_K")
    # vectors and small matrices, such as routers, keep their type
    if kind and encoding_for(new.own_name, new.shape, "q8_0"):
        chosen = (encoding_for(new.own_name, new.shape, kind) or kind).upper()
    if chosen in _FLOATS:
        dtype = np.dtype(_FLOATS[chosen])
        size = math.prod(new.shape) * dtype.itemsize
        # no kernel reads float64
        written = "F32" if chosen == "F64" else chosen
        return GGUFEntry(
            name, written, new.shape, size, lambda: new.values().reshape(new.shape).astype(dtype)
        )
    if chosen not in BLOCK_FORMATS:
        raise ModelFilesError(f"{name}: tensors of {stored} have no values that an adapter changes")
    chosen = of_whole_blocks(chosen.lower(), new.shape[-1]).upper()
    form = BLOCK_FORMATS[chosen]

    def blocks() -> npt.NDArray[Any]:
        values = WeightData.from_numpy(new.values().reshape(new.shape), name)
        return Tensor.from_dlpack(quantizer.encode(values, chosen.lower()).data).to_numpy()

    size = math.prod(new.shape) // form.elements * form.bytes
    return GGUFEntry(name, chosen, new.shape, size, blocks)
