"""The headers of weight files: names, dtypes and shapes of tensors, without their data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from max._dataclass import dataclass
from max.dtype.blocks import BLOCK_FORMATS
from max.dtype.file_blocks import FILE_FORMATS
from max.graph import weights
from max.pipelines.checkpoints.encodings import SupportedEncoding, block_encoding
from max.pipelines.checkpoints.model_files import remedy_for
from max.pipelines.core.exceptions import ModelFilesError

_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
T = TypeVar("T")


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a safetensors file.

    Args:
        name: Its name.
        dtype: Its dtype as the file format spells it.
        shape: Its shape.
        begin: The byte offset of its data in the file.
        end: The byte offset after its data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_safetensors_header(path: Path) -> list[TensorEntry]:
    """The tensors of a safetensors file, without their data.

    Args:
        path: The file.

    Raises:
        ModelFilesError: The file is missing, truncated, or not a safetensors file.
    """
    entries = _open_weights(weights.SafetensorsFile, path).entries
    return [
        TensorEntry(name, e.type_name, e.shape, e.begin, e.begin + e.nbytes)
        for name, e in entries.items()
    ]


def read_gguf_entries(path: Path) -> list[TensorEntry]:
    """The tensors of a GGUF file, without their data.

    Args:
        path: The file.

    Raises:
        ModelFilesError: The file is missing, truncated, or not a GGUF file.
    """
    return [
        TensorEntry(t.name, t.type_name, t.shape, t.begin, t.begin + (t.nbytes or 0))
        for t in open_gguf(path).tensors.values()
    ]


def read_torch_entries(path: Path) -> list[TensorEntry]:
    """The tensors of a file of ``torch.save``, without their data; their places count from 0.

    Args:
        path: The file.

    Raises:
        ModelFilesError: The file is missing, damaged, or contains other objects than tensors.
    """
    entries = _open_weights(weights.TorchFile, path).entries
    return [TensorEntry(name, e.type_name, e.shape, 0, e.nbytes) for name, e in entries.items()]


ENTRY_READERS = {
    ".safetensors": read_safetensors_header,
    ".gguf": read_gguf_entries,
    **dict.fromkeys((".bin", ".pt", ".pth"), read_torch_entries),
}
"""The function that lists the tensors of a weight file, by the file's suffix."""


def open_gguf(path: Path) -> weights.GGUFFile:
    """Opens a GGUF file; its data is memory-mapped.

    Args:
        path: The file.

    Raises:
        ModelFilesError: The file is missing, truncated, or not a GGUF file.
    """
    return _open_weights(weights.open_gguf, path)


def _open_weights(open_file: Callable[[Path], T], path: Path) -> T:
    """The open weight file; its errors become `ModelFilesError`."""
    try:
        return open_file(path)
    except OSError as error:
        raise ModelFilesError(
            f"weight file {path} cannot be read: {error.strerror or error}", remedy_for(path)
        ) from error
    except ValueError as error:
        raise ModelFilesError(f"weight file {error}", remedy_for(path)) from error


def encodings_in(entries: list[TensorEntry]) -> set[SupportedEncoding]:
    """The encodings of a checkpoint's tensors.

    Args:
        entries: The tensors.
    """
    encodings = {SupportedEncoding.of_dtype(entry.dtype) for entry in entries}
    return {encoding for encoding in encodings if encoding is not None}


def encoding_of(entries: list[TensorEntry]) -> SupportedEncoding | None:
    """The encoding with the most bytes; None if no dtype has an encoding.

    Args:
        entries: The tensors of a checkpoint.
    """
    totals: dict[str, int] = {}
    for entry in entries:
        totals[entry.dtype] = totals.get(entry.dtype, 0) + entry.end - entry.begin
    # its tensors are integers, whose dtype is no encoding
    if any(entry.name.endswith(".qweight") for entry in entries):
        return SupportedEncoding.gptq
    encodings = {d: n for d, n in totals.items() if SupportedEncoding.of_dtype(d) is not None}
    if not encodings:
        return None
    return SupportedEncoding.of_dtype(max(encodings, key=lambda d: encodings[d]))


def bytes_of(
    entries: list[TensorEntry], encoding: SupportedEncoding, quantize: str | None = None
) -> int:
    """The bytes of a checkpoint in memory, after floats are converted to an encoding and blocks to those with kernels.

    Args:
        entries: The tensors of the checkpoint.
        encoding: The encoding.
        quantize: The type that float matrices are quantized to; None: they are not quantized.
    """
    floats = {"F64", "F32", "F16", "BF16"}
    into = {"float32": 4, "float16": 2, "bfloat16": 2}.get(encoding.value)
    total = 0
    for entry in entries:
        size = entry.end - entry.begin
        if quantize is not None and entry.dtype in floats and len(entry.shape) > 1:
            elements, bytes_ = BLOCK_FORMATS[block_encoding(quantize).value]
            size = size // _BYTES[entry.dtype] // elements * bytes_
        elif entry.dtype == "U8" and entry.name.endswith("_blocks"):
            # 16 bytes of MXFP4 hold 32 elements, which become one Q8_0 block
            size = size // 16 * BLOCK_FORMATS["Q8_0"].bytes
        elif into is not None and entry.dtype in floats:
            size = size // _BYTES[entry.dtype] * into
        elif entry.dtype in FILE_FORMATS:
            block, _, kernel, _ = FILE_FORMATS[entry.dtype]
            elements, bytes_ = BLOCK_FORMATS[kernel]
            size = size // block.bytes * block.elements // elements * bytes_
        total += size
    return total
