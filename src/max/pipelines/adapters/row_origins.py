"""Maps the decoder's projections to rows of weights in files.

It passes probe weights, whose elements are row numbers, through the code that renames and splits real weights, so that
the mapping needs no description of its own for each family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.driver import Tensor
from max.graph.weights import WeightData
from max.pipelines.adapters.adapter import AdapterError
from max.pipelines.adapters.experts import expert_of
from max.pipelines.adapters.terms import AdapterBase
from max.pipelines.models.decoder.fused_weights import split_fused

__all__ = ["Origin", "StoredRows", "origins"]

_SHIFT = 1 << 24
"""The stride of weight numbers in probes: ``number * _SHIFT + row`` is exact in float64."""


@dataclass(frozen=True)
class StoredRows:
    """The rows of a weight in a file.

    Args:
        module: Its name without ``.weight``.
        count: The number of outputs, or of rows of an embedding table.
        experts: The number of experts that it stacks; None: it is not a stack of experts.
        own_name: The decoder's name, for a weight that the family's renaming does not handle; None: it is renamed.
    """

    module: str
    count: int
    experts: int | None = None
    own_name: str | None = None


@dataclass(frozen=True)
class Origin:
    """The origin of each row of a projection.

    Args:
        module: The module of the first row.
        expert: The index in the module's stack of experts; None: it is not a stack of experts.
        owners: The index of each row's module, int64 ``[rows]``.
        rows: Each row's index in its module, int64 ``[rows]``.
    """

    module: str
    expert: int | None
    owners: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    @property
    def is_single(self) -> bool:
        """Whether all rows come from one module."""
        return bool((self.owners == self.owners[0]).all())


def origins(
    weights: Sequence[StoredRows], base: AdapterBase, *, is_gguf: bool
) -> Iterator[tuple[str, Origin]]:
    """Yields the names of the decoder's projections, one per expert, with the origins of their rows.

    Args:
        weights: The weights of the files.
        base: The model.
        is_gguf: Whether the names are those of GGUF files.

    Raises:
        AdapterError: A weight has too many rows, or the family has no GGUF files.
        WeightsError: Names or sizes are those of another model.
    """
    probes: dict[str, WeightData] = {}
    renamed: dict[str, WeightData] = {}
    for number, weight in enumerate(weights):
        name = f"{weight.module}.weight"
        # unique row numbers, which show where renaming and splitting move each row
        if weight.count >= _SHIFT:
            raise AdapterError(f"{name} has {weight.count} rows, too many")
        probe = (number * _SHIFT + np.arange(weight.count, dtype=np.float64))[:, None]  # [rows, 1]
        if weight.experts is not None:
            probe = np.repeat(probe[None], weight.experts, axis=0)
        if weight.own_name is not None:
            renamed[weight.own_name] = WeightData.from_numpy(probe, name)
            continue
        if not is_gguf and base.names.own_name(name).endswith(base.names.transposed_weights):
            probe = np.ascontiguousarray(np.swapaxes(probe, -1, -2))
        probes[name] = WeightData.from_numpy(probe, name)
    if is_gguf and base.rename_gguf is None:
        raise AdapterError("the family of the base has no GGUF files; give a folder of PEFT")
    rename = base.rename_gguf if is_gguf and base.rename_gguf is not None else base.rename
    config = replace(base.config, qkv_layout="rows" if is_gguf else base.qkv_layout)
    yield from _origins_of(weights, split_fused(config, {**rename(probes), **renamed}))


def _origins_of(
    weights: Sequence[StoredRows], split: Mapping[str, WeightData]
) -> Iterator[tuple[str, Origin]]:
    """Reads the row numbers of renamed and split probes back."""
    for name, value in split.items():
        array = Tensor.from_dlpack(value.data).to_numpy()
        # renaming may add constants, which are no probes
        if not name.endswith(".weight") or array.ndim not in (2, 3) or array.dtype != np.float64:
            continue
        stem, stacked = name.removesuffix(".weight"), array.ndim == 3
        for position, part in enumerate(array if stacked else array[None]):
            # a weight with another layout than a matrix
            if part.shape[1] != 1:
                continue
            numbers = part[:, 0].astype(np.int64)
            module = weights[int(numbers[0]) // _SHIFT].module
            expert = expert_of(module, position) if stacked else None
            site = stem if expert is None else f"{stem}.{expert}"
            yield site, Origin(module, expert, numbers // _SHIFT, numbers % _SHIFT)
