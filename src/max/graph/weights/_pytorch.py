"""Weights in PyTorch checkpoints, read by torch."""

from __future__ import annotations

import os
from typing import Any, cast

from max.driver import DLPackArray, Tensor
from max.dtype import DType
from max.graph.quantization import QuantizationEncoding
from max.graph.shape import Shape
from max.graph.weight_data import WeightData
from max.graph.weights._safetensors_file import WeightsFileError
from max.graph.weights_by_name import HierarchicalWeights


def read_tensors(path: os.PathLike[str] | str) -> dict[str, Any]:
    """Reads the tensors of a checkpoint, by name.

    Only tensors and plain containers are unpickled; a checkpoint with other objects is rejected without executing
    any of its code.

    Raises:
        ImportError: torch is not installed.
        WeightsFileError: The file is damaged, contains other objects, or has no tensors.
    """
    import torch  # an optional package

    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # the unpickler raises any class for a damaged file
        # torch puts the cause after advice to load the file without its checks
        text = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
        reason = text.strip().splitlines()[0] if text.strip() else type(error).__name__
        raise WeightsFileError(f"{os.fspath(path)}: cannot be read safely: {reason}") from error
    if isinstance(loaded, dict):
        inner: Any = cast("dict[Any, Any]", loaded).get("state_dict")
        loaded = cast("Any", inner if isinstance(inner, dict) else loaded)
    if not isinstance(loaded, dict):
        raise WeightsFileError(
            f"{os.fspath(path)}: expected a dictionary of tensors, got {type(loaded).__name__}"
        )
    tensors = {
        str(name): value
        for name, value in cast("dict[Any, Any]", loaded).items()
        if torch.is_tensor(value)
    }
    if not tensors:
        raise WeightsFileError(f"{os.fspath(path)}: there are no tensors in it")
    return tensors


class PytorchWeights(HierarchicalWeights):
    """Weights in a checkpoint written by ``torch.save``.

    Requires torch. Code in the file is never executed.

    Args:
        filepath: The file.
        tensor_infos: The tensors by name; by default those of the file.
        prefix: A prefix of all names.
        allocated: The dictionary returned by ``allocated_weights``.

    Raises:
        ImportError: torch is not installed.
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

    def _read(self, name: str) -> WeightData:
        tensor = self._tensors[name].detach().contiguous()
        return WeightData._from_tensor(Tensor.from_dlpack(tensor), name)  # pyright: ignore[reportPrivateUsage]

    @property
    def dtype(self) -> DType:
        """The dtype of the weight of this name.

        Raises:
            KeyError: There is no weight of this name.
        """
        self._require()
        return DType.from_torch(self._tensors[self._prefix].dtype)

    @property
    def shape(self) -> Shape:
        """The shape of the weight of this name.

        Raises:
            KeyError: There is no weight of this name.
        """
        self._require()
        return Shape(self._tensors[self._prefix].shape)

    @property
    def quantization_encoding(self) -> QuantizationEncoding | None:
        """None: torch checkpoints hold plain tensors.

        Raises:
            KeyError: There is no weight of this name.
        """
        self._require()
        return None
