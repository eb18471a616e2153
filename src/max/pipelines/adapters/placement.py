"""The terms of an adapter at the sites of a decoder: modules are renamed and split as weights of a checkpoint are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from max._lazy import lazy_module
from max.pipelines.adapters.adapter import Adapter, AdapterError, Array
from max.pipelines.adapters.experts import experts_name, matrices_of, turned_experts
from max.pipelines.adapters.layout import EXPERTS, HEADS, AdapterLayout, Site
from max.pipelines.adapters.row_origins import StoredRows, origins
from max.pipelines.adapters.terms import AdapterBase, Floats, SiteTerms
from max.pipelines.adapters.whole_weights import saved_terms
from max.pipelines.core.exceptions import WeightsError
from max.pipelines.gguf.tensor_writer import model_factor, neighbors
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.delta_net import DeltaNetForm
from max.pipelines.models.blocks.latent_attention import LatentForm

# loaded when an adapter is placed
if TYPE_CHECKING:
    from max.mlir.ops.models import adapters as adapter_ops
else:
    adapter_ops = lazy_module("max.mlir.ops.models.adapters")

__all__ = ["adapter_rows", "packed_terms", "row_order", "site_terms"]


def site_terms(
    adapter: Adapter, base: AdapterBase, layout: AdapterLayout
) -> Iterator[tuple[Site, SiteTerms]]:
    """Yields the terms at each site that an adapter changes.

    Args:
        adapter: The adapter.
        base: Its base model.
        layout: The sites of the model.

    Raises:
        AdapterError: A tensor has no site, or does not fit it.
    """
    adapter = turned_experts(adapter, base)
    places = _places(adapter, base, layout)
    saved = saved_terms(adapter, base, layout)
    extra_biases = saved.biases
    for site, terms in saved.sites.items():
        if site in places:
            raise AdapterError(f"{site.name} has both a whole weight and a low-rank change")
        yield site, replace(terms, shift=extra_biases.pop(site.name, terms.shift))
    for site, (module, rows) in places.items():
        low_rank = adapter.modules[module]
        a, b = matrices_of(low_rank, site.expert, rows)
        if low_rank.is_table != site.is_table:
            kind = "a table" if site.is_table else "a linear layer"
            raise AdapterError(
                f"the tensor {low_rank.tensor!r} does not fit {site.name}, which is {kind}"
            )
        if a.shape[1] != site.inputs or len(b) != site.columns:
            raise AdapterError(
                f"the tensor {low_rank.tensor!r} has {a.shape[1]} inputs and {len(b)} outputs; {site.name} of the base "
                f"has {site.inputs} and {site.columns}"
            )
        b *= np.float32(low_rank.scale)
        shift = None
        if low_rank.bias is not None:
            shift = low_rank.bias.astype(np.float32)[rows] * np.float32(low_rank.scale)
        gain: Floats | None = None
        if low_rank.magnitude is not None:
            gain = _dora_gain(base, site, a, b, low_rank.magnitude.astype(np.float32)[rows])
            b *= (gain + 1)[:, None]
        bias = extra_biases.pop(site.name, None)
        if bias is not None:
            shift = bias if shift is None else shift + bias
        terms = _in_order_of(base, adapter, site, SiteTerms(a, b, gain, shift))
        yield site, terms
        yield from _head_terms(base, site, terms, layout)
    for name in extra_biases:
        site = layout.sites[name]
        empty = np.zeros((0, site.inputs), np.float32), np.zeros((site.columns, 0), np.float32)
        yield site, SiteTerms(*empty, None, extra_biases[name])


def _places(
    adapter: Adapter, base: AdapterBase, layout: AdapterLayout
) -> dict[Site, tuple[str, npt.NDArray[np.int64]]]:
    """For each site that an adapter changes the module and the rows of its B."""
    places: dict[Site, tuple[str, npt.NDArray[np.int64]]] = {}
    placed: set[str] = set()
    experts = [name for name in layout.sites if f".{EXPERTS}." in name]
    try:
        for name, origin in origins(
            adapter_rows(adapter, base, experts), base, is_gguf=adapter.is_gguf
        ):
            site = layout.sites.get(name)
            if site is None:
                continue
            low_rank = adapter.modules[origin.module]
            if not origin.is_single:
                raise AdapterError(f"the tensor {low_rank.tensor!r} does not fit {site.name}")
            rows = np.arange(low_rank.b.shape[0]) if low_rank.is_table else origin.rows
            places[site] = origin.module, rows
            placed.add(origin.module)
    except AdapterError:
        raise
    except (WeightsError, KeyError, IndexError, ValueError) as error:
        raise AdapterError(f"{adapter.path}: the adapter is for another model: {error}") from error
    for module in adapter.modules:
        if module not in placed:
            raise AdapterError(
                f"the tensor {adapter.modules[module].tensor!r} cannot be applied: the model has no linear layer of "
                "its own for it"
            )
    return places


def _head_terms(
    base: AdapterBase, site: Site, terms: SiteTerms, layout: AdapterLayout
) -> Iterator[tuple[Site, SiteTerms]]:
    """The terms of each head where latents are not expanded, for those of their expansion.

    With ``W + B A`` instead of W a query of a head becomes ``q W + (q B) A``, and a sum v of latents ``W v + B (A v)``.
    A gain of rows of W is one of the elements of q before its product with W, and of the results of v.
    """
    layer = site.name.rpartition(".")[0]
    if f"{layer}.{HEADS}.keys.0" not in layout.sites or not site.name.endswith(".kv_b_proj"):
        return
    form = base.config.blocks[int(site.name.split(".")[1])].mixer
    assert isinstance(form, LatentForm)
    plain, size = form.plain_dim, form.plain_dim + form.value_dim
    # a bias of keys adds the same to all scores of a query
    for head in range(form.num_attention_heads):
        first = head * size
        keys, values = slice(first, first + plain), slice(first + plain, first + size)
        shift = None if terms.shift is None else terms.shift[values]
        gain: Floats | None = None
        if terms.gain is not None:
            gain = terms.gain[values]
            none = np.zeros((0, plain), np.float32), np.zeros((plain, 0), np.float32)
            yield (
                layout.sites[f"{layer}.{HEADS}.queries.{head}"],
                SiteTerms(*none, terms.gain[keys]),
            )
        yield (
            layout.sites[f"{layer}.{HEADS}.keys.{head}"],
            SiteTerms(np.ascontiguousarray(terms.b[keys].T), np.ascontiguousarray(terms.a.T)),
        )
        yield (
            layout.sites[f"{layer}.{HEADS}.values.{head}"],
            SiteTerms(terms.a, terms.b[values], gain, shift),
        )


def adapter_rows(adapter: Adapter, base: AdapterBase, experts: Sequence[str]) -> list[StoredRows]:
    """The rows of an adapter's modules.

    Args:
        adapter: The adapter.
        base: Its base model.
        experts: The decoder's names of the products of experts.
    """
    rows: list[StoredRows] = []
    for module, low_rank in adapter.modules.items():
        if low_rank.a.ndim == 2:
            count = low_rank.a.shape[1] if low_rank.is_table else low_rank.b.shape[0]
            rows.append(StoredRows(module, count))
            continue
        # in the decoder's form: checkpoints may have other names for them
        own = None if adapter.is_gguf else experts_name(base.names.own_name(module), experts)
        rows.append(StoredRows(module, low_rank.b.shape[1], len(low_rank.a), own))
    return rows


def _dora_gain(base: AdapterBase, site: Site, a: Floats, b: Floats, magnitude: Floats) -> Floats:
    """The factor of each output minus 1: the magnitude over the length of the changed weight's row."""
    squares = np.zeros(site.columns, np.float64)
    name = site.name if site.expert is None else site.name.rpartition(".")[0]
    for first, rows in base.rows(name, site.expert):
        if site.is_table:
            # rows of tokens: an output is a column
            changed = rows + (b @ a[:, first : first + len(rows)]).T
            squares += np.square(changed, dtype=np.float64).sum(0)
        else:
            changed = rows + b[first : first + len(rows)] @ a
            squares[first : first + len(rows)] = np.square(changed, dtype=np.float64).sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = (magnitude / np.sqrt(squares)).astype(np.float32) - 1
    if not np.isfinite(gain).all():
        raise AdapterError(
            f"{site.name}: a row of the changed weight is 0, which has no magnitude (DoRA)"
        )
    return gain


def row_order(
    base: AdapterBase, site: str, count: int, *, is_gguf: bool
) -> npt.NDArray[np.int64] | None:
    """The rows of an adapter of the other kind of files in the order of the base; None: the order is the same.

    Args:
        base: The base model.
        site: The decoder's name of the product.
        count: The number of rows.
        is_gguf: Whether the adapter has the names of GGUF files, and the base those of safetensors files.

    Raises:
        AdapterError: Files of both kinds differ in more than the order of rows.
    """
    parts = site.split(".")
    form = base.config.blocks[int(parts[1])].mixer if parts[0] == "layers" else None
    if model_factor(base.config, f"{site}.weight") is not None or (
        isinstance(form, DeltaNetForm) and "mixer" in parts
    ):
        raise AdapterError(
            f"{site}: files of GGUF and of safetensors differ in this weight: give an adapter of the base's kind"
        )
    if (
        not base.permuted
        or not isinstance(form, AttentionForm)
        or parts[-1] not in ("q_proj", "k_proj")
    ):
        return None
    heads = form.num_attention_heads if parts[-1] == "q_proj" else form.num_key_value_heads
    order = neighbors(np.arange(count), heads)
    return np.argsort(order) if is_gguf else order  # the inverse


def _in_order_of(base: AdapterBase, adapter: Adapter, site: Site, terms: SiteTerms) -> SiteTerms:
    """The terms with rows in the order of the base, where adapter and base are of different kinds of files."""
    if adapter.is_gguf == base.is_gguf:
        return terms
    if terms.gain is not None:
        raise AdapterError(f"{site.name}: DoRA needs a base in safetensors files")
    order = row_order(base, site.name, len(terms.b), is_gguf=adapter.is_gguf)
    if order is None:
        return terms
    shift = None if terms.shift is None else terms.shift[order]
    return SiteTerms(terms.a, terms.b[order], None, shift)


def packed_terms(site: Site, terms: SiteTerms, dtype: npt.DTypeLike) -> list[tuple[int, Array]]:
    """The terms of a site as they lie in memory: offsets in the adapter's memory, and elements.

    `max.mlir.ops.models.adapters` has the layout.

    Args:
        site: The site.
        terms: The terms.
        dtype: The dtype of the memory.

    Raises:
        AdapterError: The rank is above that of the memory.
    """
    if terms.rank > site.max_rank:
        raise AdapterError(f"{site.name}: the rank is {terms.rank}, above {site.max_rank}")
    at_b, at_gain, at_shift, _ = adapter_ops.lora_place_starts(
        site.max_rank, site.inputs, site.columns
    )
    panels = -(-site.columns // adapter_ops.LORA_PANEL)
    padded = np.zeros((panels * adapter_ops.LORA_PANEL, terms.rank), dtype)
    padded[: site.columns] = terms.b
    # [panels, rank, LORA_PANEL]
    b = padded.reshape(panels, adapter_ops.LORA_PANEL, terms.rank).swapaxes(1, 2)
    a = terms.a.T if site.is_table else terms.a
    parts: list[tuple[int, Any]] = [(0, a), (at_b, b)]
    if terms.has_vectors:
        for at, vector in ((at_gain, terms.gain), (at_shift, terms.shift)):
            parts.append((at, np.zeros(site.columns, np.float32) if vector is None else vector))
    return [
        (site.offset + at, np.ascontiguousarray(values, dtype).reshape(-1)) for at, values in parts
    ]
