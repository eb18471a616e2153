"""Converts adapters between the tensor names and layouts of safetensors and GGUF files, to merge them into either.

The two formats name the decoder's projections differently, fuse different ones, and may permute the rows of heads.
`origins` maps each projection to its rows in both; low-rank updates are moved accordingly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.graph.weights import WeightData
from max.pipelines.adapters.adapter import Adapter, AdapterError, Array, LowRank
from max.pipelines.adapters.experts import turned_experts
from max.pipelines.adapters.merge import StoredNames
from max.pipelines.adapters.placement import adapter_rows, row_order
from max.pipelines.adapters.row_origins import Origin, StoredRows, origins
from max.pipelines.adapters.terms import AdapterBase, Floats
from max.pipelines.core.exceptions import WeightsError
from max.pipelines.gguf.tensor_writer import norm_offset
from max.pipelines.models.blocks.latent_attention import LatentForm
from max.pipelines.models.decoder.config import DecoderConfig

__all__ = ["convert_names"]


@dataclass(frozen=True)
class _Part:
    """The low-rank update of one projection of the decoder.

    Args:
        low_rank: The update of the adapter's module.
        source: The projection's rows in the adapter.
        target: Its rows in the base's files.
        order: The permutation from the adapter's rows to those of the base; None: the identity.
    """

    low_rank: LowRank
    source: Origin
    target: Origin
    order: npt.NDArray[np.int64] | None

    def rows_of(self, values: Array) -> Floats:
        """The rows of B, or elements of a per-output vector, in the order of the base."""
        rows = values.astype(np.float32)[self.source.rows]
        return rows if self.order is None else rows[self.order]

    @property
    def matrices(self) -> tuple[Floats, Floats]:
        """A ``[rank, inputs]``, and B ``[rows, rank]`` multiplied by the scale."""
        a, b = self.low_rank.a, self.low_rank.b
        if a.ndim == 3:
            a, b = a[self.source.expert], b[self.source.expert]
        return a.astype(np.float32), self.rows_of(b) * np.float32(self.low_rank.scale)


def convert_names(
    adapter: Adapter,
    base: AdapterBase,
    rows: Sequence[StoredRows],
    names: StoredNames,
    shape: DecoderConfig,
) -> Adapter:
    """Converts an adapter to the tensor names and layouts of the base's files.

    Args:
        adapter: The adapter.
        base: The base.
        rows: The rows of the matrices in its files.
        names: The names of its weights in them.
        shape: The configuration of the safetensors folder, for the offsets that GGUF files add to norm weights.

    Raises:
        AdapterError: A tensor has no corresponding weight in the files, or one whose layout cannot be converted.
    """
    stored = {row.module for row in rows}
    if adapter.is_gguf == base.is_gguf and all(
        low_rank.a.ndim == 2 or module in stored for module, low_rank in adapter.modules.items()
    ):
        return adapter
    adapter = turned_experts(adapter, base)
    try:
        targets = dict(origins(rows, base, is_gguf=base.is_gguf))
        products = [site for site in targets if ".experts." in site]
        sources = dict(
            origins(adapter_rows(adapter, base, products), base, is_gguf=adapter.is_gguf)
        )
        saved = _saved_weights(adapter, base, targets, names, shape)
    except AdapterError:
        raise
    except (WeightsError, KeyError, IndexError, ValueError) as error:
        raise AdapterError(f"{adapter.path}: the adapter is for another model: {error}") from error
    parts: dict[str, list[_Part]] = {}
    placed: set[str] = set()
    whole: dict[str, LowRank] = {}
    for site, source in sources.items():
        low_rank = adapter.modules[source.module]
        target = targets.get(site)
        latents = _latent_parts(site, low_rank, base) if target is None else {}
        if latents:
            whole |= latents
            placed.add(source.module)
        if target is None:
            continue
        if not source.is_single or not target.is_single:
            raise AdapterError(f"the tensor {low_rank.tensor!r} does not fit {site} of the base")
        placed.add(source.module)
        if low_rank.is_table:
            whole[target.module] = low_rank
            continue
        part = _Part(low_rank, source, target, _order(adapter, base, site, len(source.rows)))
        parts.setdefault(target.module, []).append(part)
    for module, low_rank in adapter.modules.items():
        if module not in placed:
            raise AdapterError(
                f"the tensor {low_rank.tensor!r} cannot be merged: files of the base have no weight of its own for it"
            )
    by_module = {row.module: row for row in rows}
    joined = {module: _join(by_module[module], own) for module, own in parts.items()}
    return replace(adapter, modules={**whole, **joined}, saved_weights=saved, is_gguf=base.is_gguf)


def _latent_parts(site: str, low_rank: LowRank, base: AdapterBase) -> dict[str, LowRank]:
    """Splits an update of ``kv_b_proj`` into updates of the two weights that GGUF files have in its place.

    These are ``k_b`` of shape ``[heads, latent, key]`` and ``v_b`` of shape ``[heads, value, latent]``.
    """
    layer = site.rpartition(".")[0]
    names = [f"{layer}.{part}_b_proj.weight" for part in ("k", "v")]
    if not site.endswith(".kv_b_proj") or any(name not in base.weights for name in names):
        return {}
    form = base.config.blocks[int(site.split(".")[1])].mixer
    assert isinstance(form, LatentForm)
    if low_rank.magnitude is not None or low_rank.bias is not None:
        raise AdapterError(f"{site}: DoRA and biases need a base in safetensors files")
    heads, plain = form.num_attention_heads, form.plain_dim
    a, b = low_rank.a.astype(np.float32), low_rank.b.astype(np.float32)
    parts = b.reshape(heads, plain + form.value_dim, low_rank.rank)
    of_heads = np.broadcast_to(a, (heads, *a.shape))
    # [heads, latent, key] is the transposed product, so the factors swap
    transposed = np.swapaxes(parts[:, :plain], 1, 2), np.swapaxes(of_heads, 1, 2)
    changes = (transposed, (of_heads, parts[:, plain:]))
    return {
        base.weights[name].name.removesuffix(".weight"): LowRank(
            low_rank.tensor, *change, low_rank.scale
        )
        for name, change in zip(names, changes, strict=True)
    }


def _order(
    adapter: Adapter, base: AdapterBase, site: str, count: int
) -> npt.NDArray[np.int64] | None:
    """The permutation from a projection's rows in the adapter to those in the base; None: the identity."""
    if adapter.is_gguf == base.is_gguf:
        return None
    return row_order(base, site, count, is_gguf=adapter.is_gguf)


def _join(rows: StoredRows, parts: Sequence[_Part]) -> LowRank:
    """Combines the updates of projections that share one weight of the files into one update of that weight.

    Its rank is the sum of theirs: A is stacked, and B is zero outside of each projection's rows.
    """
    experts = rows.experts or 1
    by_expert: list[list[_Part]] = [[] for _ in range(experts)]
    for part in parts:
        by_expert[(part.target.expert or 0) if rows.experts else 0].append(part)
    rank = max(sum(part.low_rank.rank for part in own) for own in by_expert)
    a = np.zeros((experts, rank, parts[0].low_rank.a.shape[-1]), np.float32)
    b = np.zeros((experts, rows.count, rank), np.float32)
    bias = np.zeros(rows.count, np.float32)
    # NaN: the row has no DoRA magnitude
    magnitude = np.full(rows.count, np.nan, np.float32)
    for number, own in enumerate(by_expert):
        at = 0
        for part in own:
            own_a, own_b = part.matrices
            to = slice(at, at + len(own_a))
            a[number, to], b[number, part.target.rows, to] = own_a, own_b
            at = to.stop
            if part.low_rank.bias is not None:
                bias[part.target.rows] = part.rows_of(part.low_rank.bias) * part.low_rank.scale
            if part.low_rank.magnitude is not None:
                magnitude[part.target.rows] = part.rows_of(part.low_rank.magnitude)
    has_bias = any(part.low_rank.bias is not None for part in parts)
    has_lengths = any(part.low_rank.magnitude is not None for part in parts)
    if rows.experts is None:
        a, b = a[0], b[0]
    return LowRank(
        parts[0].low_rank.tensor,
        a,
        b,
        1.0,
        magnitude=magnitude if has_lengths else None,
        bias=bias if has_bias else None,
    )


def _saved_weights(
    adapter: Adapter,
    base: AdapterBase,
    targets: Mapping[str, Origin],
    names: StoredNames,
    shape: DecoderConfig,
) -> dict[str, Array]:
    """Converts the weights that an adapter replaces completely (`modules_to_save`).

    Raises:
        AdapterError: One has no weight of its own in the base's files.
    """
    if not adapter.saved_weights or adapter.is_gguf == base.is_gguf:
        return dict(adapter.saved_weights)
    matrices = {
        name.removesuffix(".weight"): values
        for name, values in adapter.saved_weights.items()
        if values.ndim == 2
    }
    result: dict[str, Array] = {}
    rows = [StoredRows(module, len(values)) for module, values in matrices.items()]
    for site, source in origins(rows, base, is_gguf=adapter.is_gguf):
        target, values = targets.get(site), matrices[source.module].astype(np.float32)
        if target is None or len(target.rows) != len(values):
            raise AdapterError(
                f"the tensor '{source.module}.weight' replaces no whole weight of the base's files"
            )
        order, new, moved = (
            _order(adapter, base, site, len(values)),
            np.empty_like(values),
            values[source.rows],
        )
        new[target.rows] = moved if order is None else moved[order]
        result[f"{target.module}.weight"] = new
    vectors = {
        name: WeightData.from_numpy(values.astype(np.float32), name)
        for name, values in adapter.saved_weights.items()
        if values.ndim == 1
    }
    for own, value in base.rename(vectors).items() if vectors else ():
        stem, _, part = own.rpartition(".")
        values = adapter.saved_weights[value.name].astype(np.float32)
        if own not in base.weights:
            raise AdapterError(f"the tensor {value.name!r} replaces no weight of the base")
        order = _order(adapter, base, stem, len(values)) if part == "bias" else None
        values = values if order is None else values[order]
        offset = norm_offset(shape, stem) if part == "weight" else 0.0
        result[base.weights[own].name] = values + np.float32(offset)
    return result
