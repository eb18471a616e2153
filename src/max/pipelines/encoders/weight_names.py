"""Maps the names of weights in checkpoints to an encoder's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from max.driver import Tensor
from max.graph import Shape
from max.graph.weights import WeightData
from max.pipelines.core.exceptions import WeightsError

__all__ = ["EncoderNames"]

_TENSORS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
"""The last part of a name; ``gamma`` and ``beta`` are of checkpoints converted from TensorFlow."""


@dataclass(frozen=True)
class EncoderNames:
    """The names of an architecture's weights in its checkpoints.

    `from_safetensors` is a weight adapter of a `SupportedArchitecture`. Weights that are not in the tables,
    such as those of a head for training, are dropped.

    Args:
        layers: The name of the list of blocks.
        layer: Parts of a block by the checkpoint's names, and the encoder's names; a tuple for a weight that
            stacks the rows of several.
        top: Other parts.
        prefixes: Beginnings of all names that some checkpoints have.
    """

    layers: str
    layer: Mapping[str, str | tuple[str, ...]]
    top: Mapping[str, str] = field(default_factory=dict[str, str])
    prefixes: tuple[str, ...] = ()

    def from_safetensors(
        self, state_dict: Mapping[str, Any], **kwargs: object
    ) -> dict[str, WeightData]:
        """The weights of a safetensors or PyTorch checkpoint by the encoder's names.

        Args:
            state_dict: The checkpoint's weights by name (`WeightData`, or objects with ``data()``).
            kwargs: Arguments that pipelines pass to every adapter; unused.

        Raises:
            WeightsError: The rows of a stacked weight cannot be divided.
        """
        weights: dict[str, WeightData] = {}
        for name, value in state_dict.items():
            path, _, last = self._without_prefix(name).rpartition(".")
            own = self._own_names(path)
            # what the encoder lacks: buffers, heads of other tasks
            if last not in _TENSORS or not own:
                continue
            data = value if isinstance(value, WeightData) else value.data()
            for own_path, part in zip(own, _row_parts(data, len(own)), strict=True):
                weights[f"{own_path}.{_TENSORS[last]}"] = part
        return weights

    def _without_prefix(self, name: str) -> str:
        for prefix in self.prefixes:
            if name.startswith(prefix):
                return name.removeprefix(prefix)
        return name

    def _own_names(self, path: str) -> tuple[str, ...]:
        """The encoder's names of a part; none for a part that it does not have."""
        if path in self.top:
            return (self.top[path],)
        if not path.startswith(f"{self.layers}."):
            return ()
        number, _, part = path.removeprefix(f"{self.layers}.").partition(".")
        own = self.layer.get(part, ())
        return tuple(
            f"layers.{number}.{name}" for name in ((own,) if isinstance(own, str) else own)
        )


def _row_parts(data: WeightData, count: int) -> list[WeightData]:
    """A weight's rows in equal parts, without a copy."""
    if count == 1:
        return [data]
    rows = int(data.shape[0])
    if rows % count:
        raise WeightsError(f"{data.name} has {rows} rows, expected a multiple of {count}")
    tensor, size = Tensor.from_dlpack(data.data), rows // count
    shape = Shape([size, *data.shape[1:]])
    return [
        WeightData(tensor[i * size : (i + 1) * size], data.name, data.dtype, shape)
        for i in range(count)
    ]
