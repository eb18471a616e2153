"""Weights in PyTorch checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

from max.driver import DLPackArray, Tensor
from max.dtype import DType
from max.graph.quantization import QuantizationEncoding
from max.graph.shape import Shape
from max.graph.weights._hierarchical import HierarchicalWeights
from max.graph.weights._safetensors_file import WeightsFileError
from max.graph.weights._torch_file import TorchFile
from max.graph.weights._weight_data import WeightData


def read_tensors(path: os.PathLike[str] | str) -> dict[str, Any]:
    """The open file of each tensor of a checkpoint, by name; an index stands for its shards.

    Raises:
        FileNotFoundError: A file is missing.
        WeightsFileError: A file is damaged, contains other objects than tensors and containers, or has no tensors.
    """
    if not os.fspath(path).endswith(".index.json"):
        file = TorchFile(path)
        return dict.fromkeys(file.tensors, file)
    shards = [TorchFile(shard) for shard in _shards(Path(path))]
    return {name: shard for shard in shards for name in shard.tensors}


def _shards(index: Path) -> list[Path]:
    """The files that a ``.bin.index.json`` names."""
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsFileError(f"{index}: not JSON: {error}") from error
    weight_map: Any = (
        cast("dict[str, Any]", content).get("weight_map") if isinstance(content, dict) else None
    )
    named = cast("dict[str, Any]", weight_map) if isinstance(weight_map, dict) else {}
    files: set[str] = set()
    for name in named.values():
        # an index, often from elsewhere, must not lead out of its folder
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or "\0" in name
            or not name.endswith(".bin")
        ):
            raise WeightsFileError(f"{index}: {str(name)[:60]!r} is no file of weights beside it")
        files.add(name)
    if not files:
        raise WeightsFileError(f"{index}: there is no weight_map from names to files")
    return [index.parent / name for name in sorted(files)]


class PytorchWeights(HierarchicalWeights):
    """Weights in a checkpoint written by ``torch.save``.

    The file is mapped, read-only, and torch is not needed. Code in the file is never executed.

    Args:
        filepath: The file, or the ``.bin.index.json`` of its shards.
        tensor_infos: Tensors of torch by name; by default those of the file.
        prefix: A prefix of all names.
        allocated: The dictionary returned by ``allocated_weights``.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file is damaged, or contains other objects than tensors.
    """

    __module__ = "max.graph.weights"

    def __init__(
        self,
        filepath: os.PathLike[str],
        tensor_infos: dict[str, Any] | None = None,
        prefix: str = "",
        allocated: dict[str, DLPackArray] | None = None,
    ) -> None:
        tensors = read_tensors(filepath) if tensor_infos is None else tensor_infos
        super().__init__(tensors, prefix, allocated)
        self._tensors = tensors

    def _read_weight(self, name: str) -> WeightData:
        held = self._tensors[name]
        if isinstance(held, TorchFile):
            return WeightData._from_tensor(held.read(name), name)  # pyright: ignore[reportPrivateUsage]
        tensor = held.detach().contiguous()
        return WeightData._from_tensor(Tensor.from_dlpack(tensor), name)  # pyright: ignore[reportPrivateUsage]

    @property
    def dtype(self) -> DType:
        """The dtype of the weight of this name.

        Raises:
            KeyError: There is no weight of this name.
        """
        self._require()
        held = self._tensors[self._prefix]
        if isinstance(held, TorchFile):
            return held.dtype(self._prefix)
        return DType.from_torch(held.dtype)

    @property
    def shape(self) -> Shape:
        """The shape of the weight of this name.

        Raises:
            KeyError: There is no weight of this name.
        """
        self._require()
        held = self._tensors[self._prefix]
        return Shape(
            held.tensors[self._prefix].shape if isinstance(held, TorchFile) else held.shape
        )

    @property
    def quantization_encoding(self) -> QuantizationEncoding | None:
        """None: torch checkpoints hold plain tensors.

        Raises:
            KeyError: There is no weight of this name.
        """
        self._require()
        return None
