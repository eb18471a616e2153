"""Embeddings: rows of a table by index."""

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
from max.nn.layer import Layer, Module

__all__ = ["Embedding", "EmbeddingV1", "VocabParallelEmbedding"]


class Embedding(Module):
    """A table with a row for each index.

    Shapes: indices ``[…]`` of integers give ``[…, hidden_dim]``. An index out of range raises when
    the graph runs.

    Args:
        vocab_size: The number of rows.
        hidden_dim: The size of a row.
        dtype: The dtype of the table.
        device: Where the rows are looked up.
        quantization_encoding: How the table is encoded; there is no kernel for encoded ones yet.
        name: The name of the weight; ``weight`` by default.

    Raises:
        NotImplementedError: The table is encoded.
    """

    weight: Weight
    """``[vocab_size, hidden_dim]``."""

    device: DeviceRef
    """Where the rows are looked up."""

    def __init__(
        self,
        vocab_size: int,
        hidden_dim: int,
        dtype: DType,
        device: DeviceRef,
        quantization_encoding: QuantizationEncoding | None = None,
        name: str | None = None,
    ) -> None:
        if quantization_encoding is not None:
            raise NotImplementedError(
                f"Embedding: no kernel reads a {quantization_encoding.value} table yet; use "
                "float32, float16 or bfloat16"
            )
        self.device = device
        self.weight = Weight(name or "weight", dtype, (vocab_size, hidden_dim), device)

    def __call__(self, indices: TensorValueLike) -> TensorValue:
        """The rows.

        Args:
            indices: Integers of any shape.

        Raises:
            TypeError: The indices are not integers.
        """
        return ops.gather(self.weight, TensorValue(indices).to(self.device), axis=0)


class VocabParallelEmbedding(Module):
    """An `Embedding` whose rows are split over devices.

    Each device looks up the indices of its rows, and the results are added. An index out of range
    gives zeros.

    Args:
        vocab_size: The number of rows.
        hidden_dim: The size of a row.
        dtype: The dtype of the table.
        devices: Where the rows are looked up.
        quantization_encoding: How the table is encoded; there is no kernel for encoded ones yet.
        name: The name of the weight; ``weight`` by default.

    Raises:
        NotImplementedError: The table is encoded.
        ValueError: No device, or fewer rows than devices.
    """

    weight: Weight
    """``[vocab_size, hidden_dim]``."""

    devices: list[DeviceRef]
    """Where the rows are looked up."""

    def __init__(
        self,
        vocab_size: int,
        hidden_dim: int,
        dtype: DType,
        devices: Sequence[DeviceRef],
        quantization_encoding: QuantizationEncoding | None = None,
        name: str | None = None,
    ) -> None:
        if quantization_encoding is not None:
            raise NotImplementedError(
                f"VocabParallelEmbedding: no kernel reads a {quantization_encoding.value} table "
                "yet; use float32, float16 or bfloat16"
            )
        if not devices:
            raise ValueError("VocabParallelEmbedding: no device is given")
        self.vocab_size = vocab_size
        self.devices = list(devices)
        self.weight = Weight(
            name or "weight",
            dtype,
            (vocab_size, hidden_dim),
            devices[0],
            sharding_strategy=ShardingStrategy.rowwise(len(devices)),
        )
        self._parts = self.weight.shard(devices)

    def __call__(
        self, indices: TensorValueLike, signal_buffers: Iterable[BufferValue]
    ) -> list[TensorValue]:
        """The rows on each device.

        Args:
            indices: Integers of any shape.
            signal_buffers: A signal buffer a device; see `max.nn.comm.Signals`.

        Raises:
            TypeError: The indices are not integers.
        """
        first = 0
        found: list[TensorValue] = []
        for part, device in zip(self._parts, self.devices, strict=True):
            count = int(part.shape[0])
            wanted = TensorValue(indices).to(device)
            here = ops.logical_and(wanted >= first, wanted < first + count)
            rows = ops.gather(part, ops.where(here, wanted - first, 0), axis=0)
            found.append(ops.where(ops.unsqueeze(here, -1), rows, 0))
            first += count
        return ops.allreduce.sum(found, signal_buffers)


class EmbeddingV1(Layer):
    """A table that is a value of the graph. Deprecated: use `Embedding`.

    Args:
        weights: ``[vocab_size, hidden_dim]``.
        device: Where the rows are looked up.
    """

    weights: TensorValueLike
    """The table."""

    device: DeviceRef
    """Where the rows are looked up."""

    def __init__(self, weights: TensorValueLike, device: DeviceRef) -> None:
        self.weights, self.device = weights, device

    def __call__(self, indices: TensorValueLike) -> TensorValue:
        """The rows.

        Args:
            indices: Integers of any shape.
        """
        return ops.gather(self.weights, TensorValue(indices).to(self.device), axis=0)
