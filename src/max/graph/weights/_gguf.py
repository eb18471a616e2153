"""Weights in GGUF files, through the ``gguf`` package."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from max.driver import DLPackArray, Tensor
from max.dtype import DType
from max.graph.quantization import QuantizationEncoding
from max.graph.weights._safetensors_file import WeightsFileError
from max.graph.weights._weight_data import WeightData
from max.graph.weights._weights import HierarchicalWeights

if TYPE_CHECKING:
    import gguf

# the types whose elements are stored one by one
_PLAIN = {
    "F16": DType.float16,
    "BF16": DType.bfloat16,
    "F32": DType.float32,
    "F64": DType.float64,
    "I8": DType.int8,
    "I16": DType.int16,
    "I32": DType.int32,
    "I64": DType.int64,
}


def _encoding(type_name: str) -> QuantizationEncoding | None:
    members: dict[str, QuantizationEncoding] = dict(QuantizationEncoding.__members__)
    found = members.get(type_name)
    return found if found is not None and found.is_gguf else None


def read_tensors(path: os.PathLike[str] | str) -> dict[str, gguf.ReaderTensor]:
    """The tensors of a GGUF file, by name; the file is mapped.

    Raises:
        ImportError: The ``gguf`` package is not installed.
        WeightsFileError: The file is damaged, or no GGUF file.
    """
    import gguf

    if os.stat(path).st_size < 24:
        raise WeightsFileError(f"{os.fspath(path)}: not a GGUF file: it is too short")
    try:
        reader = gguf.GGUFReader(path, "r")
    except (ValueError, KeyError, IndexError, OverflowError, TypeError, struct.error) as error:
        raise WeightsFileError(f"{os.fspath(path)}: not a whole GGUF file: {error}") from error
    return {tensor.name: tensor for tensor in reader.tensors}


class GGUFWeights(HierarchicalWeights):
    """Weights in a GGUF file, of llama.cpp.

    A quantized weight comes as the uint8 bytes of its blocks, one row of bytes for each row of
    elements, with its encoding. Data is the file's own bytes, read-only.

    Args:
        source: The file, or a ``gguf.GGUFReader`` that has it open.
        tensors: The tensors by name; those of the source if not given.
        prefix: The start of all names.
        allocated: The dictionary behind ``allocated_weights``.

    Raises:
        ImportError: The ``gguf`` package is not installed.
        ValueError: The file is damaged.
    """

    __module__ = "max.graph.weights"

    def __init__(
        self,
        source: os.PathLike[str] | gguf.GGUFReader,
        tensors: dict[str, gguf.ReaderTensor] | None = None,
        prefix: str = "",
        allocated: dict[str, DLPackArray] | None = None,
    ) -> None:
        if tensors is None:
            if isinstance(source, (str, os.PathLike)):
                tensors = read_tensors(source)
            else:
                tensors = {tensor.name: tensor for tensor in source.tensors}
        super().__init__(tensors, prefix, allocated)
        self._tensors = tensors

    def _read(self, name: str) -> WeightData:
        tensor = self._tensors[name]
        data: np.ndarray[Any, Any] = tensor.data
        kind = tensor.tensor_type.name
        encoding = None
        if kind in _PLAIN:
            data = data.view(_PLAIN[kind].to_numpy())
        elif (encoding := _encoding(kind)) is None:
            known = ", ".join(e for e in QuantizationEncoding.__members__ if _encoding(e))
            raise WeightsFileError(
                f"weight {name!r}: GGUF type {kind} is not known; expected one of {known}, "
                f"{', '.join(_PLAIN)}"
            )
        found = Tensor.from_numpy(np.asarray(data))
        return WeightData._from_tensor(found, name, encoding)  # pyright: ignore[reportPrivateUsage]
