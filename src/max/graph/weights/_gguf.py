"""Weights in GGUF files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.driver import DLPackArray, Tensor
from max.dtype import DType
from max.dtype.file_blocks import FILE_FORMATS, decode_file_blocks, to_kernel_blocks
from max.graph.quantization import QuantizationEncoding
from max.graph.weights._gguf_file import BLOCK_TYPES, PLAIN_TYPES, GGUFFile, GGUFTensor, open_gguf
from max.graph.weights._hierarchical import HierarchicalWeights
from max.graph.weights._safetensors_file import WeightsFileError
from max.graph.weights._weight_data import WeightData

if TYPE_CHECKING:
    import gguf

__all__ = ["GGUFWeights", "read_tensors"]


@dataclass(frozen=True)
class Stored:
    """A tensor and the file that holds it."""

    file: GGUFFile
    tensor: GGUFTensor


def read_tensors(path: os.PathLike[str] | str) -> dict[str, Stored]:
    """Opens a GGUF file and lists its tensors by name.

    Args:
        path: The file.

    Raises:
        WeightsFileError: The file is damaged, or not a GGUF file.
    """
    # weights are read last, after configuration and tokenizer: the file need not be kept open
    file = open_gguf(path, keep=False)
    return {name: Stored(file, tensor) for name, tensor in file.tensors.items()}


class GGUFWeights(HierarchicalWeights):
    """Weights in a GGUF file.

    The data of a quantized weight is uint8: a row of encoded blocks per row of elements. Data is mapped, read-only. A
    weight of a type without kernels (`max.dtype.file_blocks`) is converted when it is read: to Q8_0, Q6_K or Q4_0, or
    to bfloat16 if these would lose more than 1/128 of it.

    Args:
        source: The file, or an open ``gguf.GGUFReader``.
        tensors: The tensors by name; by default those of the source.
        prefix: A prefix of all names.
        allocated: The dictionary returned by ``allocated_weights``.

    Raises:
        ValueError: The file is damaged.
    """

    __module__ = "max.graph.weights"

    def __init__(
        self,
        source: os.PathLike[str] | gguf.GGUFReader,
        tensors: Mapping[str, Stored | gguf.ReaderTensor] | None = None,
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

    def _read_weight(self, name: str) -> WeightData:
        entry = self._tensors[name]
        if isinstance(entry, Stored):
            stored, data = entry.tensor.type_name, entry.file.read(entry.tensor)
        else:
            stored, data = entry.tensor_type.name, _reader_data(entry)
        if stored in FILE_FORMATS:
            return _converted_weight(name, data, stored)
        members: dict[str, QuantizationEncoding] = dict(QuantizationEncoding.__members__)
        return WeightData._from_tensor(  # pyright: ignore[reportPrivateUsage]
            Tensor.from_numpy(data), name, members.get(stored)
        )


def _converted_weight(name: str, data: npt.NDArray[Any], stored_type: str) -> WeightData:
    """Converts a weight of a type without kernels to blocks of a type with kernels, or to bfloat16."""
    blocks = to_kernel_blocks(data, stored_type)
    if blocks is None:
        values = decode_file_blocks(data, stored_type)
        return WeightData.from_numpy(values, name).astype(DType.bfloat16)
    return WeightData._from_tensor(  # pyright: ignore[reportPrivateUsage]
        Tensor.from_numpy(blocks[0]), name, QuantizationEncoding(blocks[1])
    )


def _reader_data(tensor: gguf.ReaderTensor) -> npt.NDArray[Any]:
    """The data of a tensor of a ``gguf.GGUFReader``."""
    stored = tensor.tensor_type.name
    data: npt.NDArray[Any] = np.asarray(tensor.data)
    if stored in PLAIN_TYPES:
        # the reader gives bfloat16 as bytes
        return data.view(PLAIN_TYPES[stored].to_numpy())
    if stored not in BLOCK_TYPES:
        raise WeightsFileError(f"weight {tensor.name!r}: GGUF type {stored} is not known")
    return data
