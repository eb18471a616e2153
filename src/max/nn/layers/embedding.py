"""Embeddings: lookup of table rows by index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from max.dtype import DType
from max.graph import (
    BufferValue,
    DeviceRef,
    ShardingStrategy,
    TensorValue,
    TensorValueLike,
    Weight,
    ops,
)
from max.graph.quantization import QuantizationEncoding
from max.nn.kernels.products import plain_dtype
from max.nn.layer import Module

__all__ = ["Embedding", "VocabParallelEmbedding"]


def check_encoding(what: str, dtype: DType, encoding: QuantizationEncoding | None) -> DType:
    """The dtype of the rows of a table; checks the encoding.

    Args:
        what: The name of the layer, for error messages.
        dtype: The requested dtype.
        encoding: The requested encoding.

    Raises:
        ValueError: The encoding is not a block encoding.
    """
    if encoding is not None and not encoding.is_gguf:
        raise ValueError(f"{what}: a table cannot be encoded as {encoding.value}; leave it plain")
    return plain_dtype(dtype, encoding)


def rows_of(weight: Weight, indices: TensorValue, dtype: DType) -> TensorValue:
    """Looks up rows of a table, and decodes them if they are encoded.

    Args:
        weight: The table.
        indices: The indices of the rows.
        dtype: The dtype of decoded rows.
    """
    rows = ops.gather(weight, indices, axis=0)
    encoding = weight.quantization_encoding
    return rows if encoding is None else ops.cast(ops.dequantize(encoding, rows), dtype)


class Embedding(Module):
    """A table with a row for each index.

    Shapes: indices ``[…]`` of integers map to ``[…, hidden_dim]``. An index out of range raises when
    the graph runs.

    Args:
        vocab_size: The number of rows.
        hidden_dim: The size of a row.
        dtype: The dtype of the table.
        device: The device of the lookup.
        quantization_encoding: The encoding of the table. Its rows are decoded at lookup, to `dtype`, or to float32 if
            that is uint8.
        name: The name of the weight; ``weight`` by default.

    Raises:
        ValueError: The encoding is not a block encoding, or hidden_dim is not a multiple of its block.
    """

    __module__ = "max.nn.embedding"

    weight: Weight
    """``[vocab_size, hidden_dim]``, or its rows in encoded blocks."""

    device: DeviceRef
    """The device of the lookup."""

    def __init__(
        self,
        vocab_size: int,
        hidden_dim: int,
        dtype: DType,
        device: DeviceRef,
        quantization_encoding: QuantizationEncoding | None = None,
        name: str | None = None,
    ) -> None:
        self.device = device
        self._dtype = check_encoding("Embedding", dtype, quantization_encoding)
        self.weight = Weight(
            name or "weight", self._dtype, (vocab_size, hidden_dim), device, quantization_encoding
        )

    def __call__(self, indices: TensorValueLike) -> TensorValue:
        """The rows.

        Args:
            indices: Integers of any shape.

        Raises:
            TypeError: The indices are not integers.
        """
        return rows_of(self.weight, TensorValue(indices).to(self.device), self._dtype)


class VocabParallelEmbedding(Module):
    """An `Embedding` whose rows are split over devices.

    Each device looks up the indices of its rows, and the results are added. An index out of range
    gives zeros.

    Args:
        vocab_size: The number of rows.
        hidden_dim: The size of a row.
        dtype: The dtype of the table.
        devices: The devices of the lookup.
        quantization_encoding: How the table is encoded; see `Embedding`.
        name: The name of the weight; ``weight`` by default.

    Raises:
        ValueError: There is no device, there are fewer rows than devices, or the encoding does not fit.
    """

    __module__ = "max.nn.embedding"

    weight: Weight
    """``[vocab_size, hidden_dim]``, or its rows in encoded blocks."""

    devices: list[DeviceRef]
    """The devices of the lookup."""

    def __init__(
        self,
        vocab_size: int,
        hidden_dim: int,
        dtype: DType,
        devices: Sequence[DeviceRef],
        quantization_encoding: QuantizationEncoding | None = None,
        name: str | None = None,
    ) -> None:
        self._dtype = check_encoding("VocabParallelEmbedding", dtype, quantization_encoding)
        if not devices:
            raise ValueError("VocabParallelEmbedding: no device is given")
        self.vocab_size = vocab_size
        self.devices = list(devices)
        self.weight = Weight(
            name or "weight",
            self._dtype,
            (vocab_size, hidden_dim),
            devices[0],
            quantization_encoding,
            sharding_strategy=ShardingStrategy.rowwise(len(devices)),
        )
        self._parts = self.weight.shard(devices)

    def __call__(
        self, indices: TensorValueLike, signal_buffers: Iterable[BufferValue]
    ) -> list[TensorValue]:
        """The rows on each device.

        Args:
            indices: Integers of any shape.
            signal_buffers: One signal buffer per device; see `max.nn.comm.Signals`.

        Raises:
            TypeError: The indices are not integers.
        """
        first = 0
        partial_rows: list[TensorValue] = []
        for part, device in zip(self._parts, self.devices, strict=True):
            count = int(part.shape[0])
            ids = TensorValue(indices).to(device)
            is_local = ops.logical_and(ids >= first, ids < first + count)
            # tokens of other devices read row 0, and count 0 in the sum
            rows = rows_of(part, ops.where(is_local, ids - first, 0), self._dtype)
            partial_rows.append(ops.where(ops.unsqueeze(is_local, -1), rows, 0))
            first += count
        return ops.allreduce.sum(partial_rows, signal_buffers)
