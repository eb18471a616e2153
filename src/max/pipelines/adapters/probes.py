"""Where the rows of files' weights are in a decoder: numbered rows are renamed and split as the weights are."""

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
"""The factor of a weight's number in a probe: a float64 holds it beside the number of a row."""


@dataclass(frozen=True)
class StoredRows:
    """The rows of a weight of a file.

    Args:
        module: Its name without ``.weight``.
        count: The number of outputs; of a table, of its rows.
        experts: The number of experts whose weights it holds; None: it is no weight of experts.
        own_name: The decoder's name, for a weight that renaming would not know; None: it is renamed.
    """

    module: str
    count: int
    experts: int | None = None
    own_name: str | None = None


@dataclass(frozen=True)
class Origin:
    """Where the rows of a product of the decoder come from.

    Args:
        module: The name of the module that has the first row.
        expert: The expert of the module's weight; None: it is no weight of all experts.
        owners: The index of the module of each row, int64 ``[rows]``.
        rows: The row in its module, int64 ``[rows]``.
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
    """Yields the names of the decoder's products with the origins of their rows; experts have names of their own.

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
        # each row has its own number: renaming and splitting show where it goes
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
    """The origins of the rows of probes by the decoder's names."""
    for name, value in split.items():
        array = Tensor.from_dlpack(value.data).to_numpy()
        # what renaming adds, such as constants, is no probe
        if not name.endswith(".weight") or array.ndim not in (2, 3) or array.dtype != np.float64:
            continue
        stem, stacked = name.removesuffix(".weight"), array.ndim == 3
        for position, part in enumerate(array if stacked else array[None]):
            # a weight in another form than that of a matrix
            if part.shape[1] != 1:
                continue
            numbers = part[:, 0].astype(np.int64)
            module = weights[int(numbers[0]) // _SHIFT].module
            expert = expert_of(module, position) if stacked else None
            site = stem if expert is None else f"{stem}.{expert}"
            yield site, Origin(module, expert, numbers // _SHIFT, numbers % _SHIFT)
