"""What adapters need of their base model, and their terms at a product of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.driver import Tensor
from max.dtype.blocks import decode
from max.graph.weights import WeightData
from max.pipelines.adapters.adapter import AdapterError
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["AdapterBase", "Floats", "SiteTerms"]

Floats = npt.NDArray[np.float32]

_CHUNK = 1024
"""The rows of a base weight that are decoded at once."""


@dataclass(frozen=True)
class AdapterBase:
    """What the terms of an adapter depend on in its base model.

    Args:
        config: The shape of the model.
        names: The names of the weights in checkpoints.
        rename: Renames the weights of a checkpoint, as when the model is loaded.
        rename_gguf: Renames the tensors of a GGUF file; None: the family has no such files.
        qkv_layout: The layout of fused projections in checkpoints.
        permuted: Whether GGUF files of the family store rows of queries and keys in another order.
        is_gguf: Whether the model is a GGUF file.
        weights: The weights by the decoder's names.
    """

    config: DecoderConfig
    names: WeightNames
    rename: Callable[[Mapping[str, WeightData]], dict[str, WeightData]]
    rename_gguf: Callable[[Mapping[str, WeightData]], dict[str, WeightData]] | None
    qkv_layout: str
    permuted: bool
    is_gguf: bool
    weights: Mapping[str, WeightData]

    def rows(self, site: str, expert: int | None = None) -> Iterator[tuple[int, Floats]]:
        """The rows of a weight in float32, in chunks, each with the index of its first row.

        Args:
            site: The decoder's name of the layer.
            expert: The index of the expert whose rows they are; None: the weight is no weight of all experts.

        Raises:
            AdapterError: The model has no plain weight of this name.
        """
        value = self.weights.get(f"{site}.weight")
        # a tied output layer is the embedding
        if value is None and site == "lm_head":
            value = self.weights.get("embed_tokens.weight")
        if value is None:
            raise AdapterError(
                f"{site}: the base has no plain weight, which DoRA and whole weights need"
            )
        encoding = value.quantization_encoding
        array = Tensor.from_dlpack(value.data).to_numpy()
        if expert is not None:
            array = array[expert]
        for first in range(0, array.shape[0], _CHUNK):
            part = array[first : first + _CHUNK]
            yield (
                first,
                part.astype(np.float32) if encoding is None else decode(part, encoding.value),
            )

    def vector(self, name: str) -> Floats | None:
        """A vector of the model in float32; None if it has none of this name."""
        value = self.weights.get(name)
        if value is None:
            return None
        return Tensor.from_dlpack(value.data).to_numpy().astype(np.float32).reshape(-1)


@dataclass(frozen=True)
class SiteTerms:
    """The terms of an adapter at a site: ``y + B A x + gain * y + shift``.

    Args:
        a: ``[rank, inputs]``.
        b: ``[columns, rank]``, with the scale.
        gain: ``[columns]``; None: 0.
        shift: ``[columns]``; None: 0.
    """

    a: Floats
    b: Floats
    gain: Floats | None = None
    shift: Floats | None = None

    @property
    def rank(self) -> int:
        """The rank."""
        return int(self.a.shape[0])

    @property
    def has_vectors(self) -> bool:
        """Whether there is a gain or a shift."""
        return self.gain is not None or self.shift is not None
