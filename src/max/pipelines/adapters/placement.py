"""The terms of an adapter at the sites of a decoder: modules are renamed and split as weights of a checkpoint are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from max._lazy import lazy_module
from max.driver import Tensor
from max.graph.weights import WeightData
from max.pipelines.adapters.adapter import Adapter, AdapterError, Array
from max.pipelines.adapters.experts import expert_of, experts_name, matrices_of, turned_experts
from max.pipelines.adapters.layout import AdapterLayout, Site
from max.pipelines.adapters.terms import AdapterBase, Floats, SiteTerms
from max.pipelines.adapters.whole_weights import saved_terms
from max.pipelines.core.exceptions import WeightsError
from max.pipelines.gguf.tensor_writer import model_factor, neighbors
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.delta_net import DeltaNetForm
from max.pipelines.models.decoder.fused_weights import split_fused

# loaded when an adapter is placed
if TYPE_CHECKING:
    from max.mlir.ops.models import adapters as adapter_ops
else:
    adapter_ops = lazy_module("max.mlir.ops.models.adapters")

__all__ = ["packed_terms", "site_terms"]

_SHIFT = 1 << 24
"""The factor of a module's number in a probe: a float64 holds it beside the number of a row."""


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
        yield site, SiteTerms(*_in_order_of(base, adapter, site, a, b, gain, shift))
    for name in extra_biases:
        site = layout.sites[name]
        empty = np.zeros((0, site.inputs), np.float32), np.zeros((site.columns, 0), np.float32)
        yield site, SiteTerms(*empty, None, extra_biases[name])


def _places(
    adapter: Adapter, base: AdapterBase, layout: AdapterLayout
) -> dict[Site, tuple[str, npt.NDArray[np.int64]]]:
    """For each site that an adapter changes the module and the rows of its B."""
    modules = list(adapter.modules)
    probes: dict[str, WeightData] = {}
    experts: dict[str, WeightData] = {}
    for number, module in enumerate(modules):
        low_rank = adapter.modules[module]
        name = f"{module}.weight"
        # each row has its own number: renaming and splitting show where it goes
        count = low_rank.a.shape[1] if low_rank.is_table else low_rank.b.shape[-2]
        if count >= _SHIFT:
            raise AdapterError(f"the tensor {low_rank.tensor!r} has {count} rows, too many")
        probe = (number * _SHIFT + np.arange(count, dtype=np.float64))[:, None]  # [rows, 1]
        if low_rank.a.ndim == 3:
            stacked = np.repeat(probe[None], len(low_rank.a), axis=0)
            if adapter.is_gguf:
                probes[name] = WeightData.from_numpy(stacked, name)
                continue
            # in the decoder's form: checkpoints may have other names for them
            name = experts_name(base.names.own_name(module), layout)
            experts[name] = WeightData.from_numpy(stacked, name)
            continue
        if not adapter.is_gguf and base.names.own_name(name).endswith(
            base.names.transposed_weights
        ):
            probe = np.ascontiguousarray(probe.T)
        probes[name] = WeightData.from_numpy(probe, name)
    try:
        if adapter.is_gguf:
            if base.rename_gguf is None:
                raise AdapterError(
                    "the family of the base has no GGUF files; give a folder of PEFT"
                )
            renamed = base.rename_gguf(probes)
        else:
            renamed = base.rename(probes)
        config = replace(base.config, qkv_layout="rows" if adapter.is_gguf else base.qkv_layout)
        split = split_fused(config, {**renamed, **experts})
    except (WeightsError, KeyError, IndexError) as error:
        raise AdapterError(f"{adapter.path}: the adapter is for another model: {error}") from error
    places: dict[Site, tuple[str, npt.NDArray[np.int64]]] = {}
    placed: set[str] = set()
    for name, value in split.items():
        stem = name.removesuffix(".weight")
        array = Tensor.from_dlpack(value.data).to_numpy()
        # what renaming adds, such as constants, is no probe
        if not name.endswith(".weight") or array.ndim not in (2, 3) or array.dtype != np.float64:
            continue
        stacked = array.ndim == 3
        for position, part in enumerate(array if stacked else array[None]):
            numbers = part[:, 0].astype(np.int64)
            module = modules[int(numbers[0]) // _SHIFT]
            low_rank = adapter.modules[module]
            expert = expert_of(module, position) if stacked else None
            site = layout.sites.get(stem if expert is None else f"{stem}.{expert}")
            if site is None:
                continue
            rows = np.arange(low_rank.b.shape[0]) if low_rank.is_table else numbers % _SHIFT
            if part.shape[1] != 1 or (numbers // _SHIFT != numbers[0] // _SHIFT).any():
                raise AdapterError(f"the tensor {low_rank.tensor!r} does not fit {site.name}")
            places[site] = module, rows
            placed.add(module)
    for module in modules:
        if module not in placed:
            raise AdapterError(
                f"the tensor {adapter.modules[module].tensor!r} cannot be applied: the model has no linear layer of "
                "its own for it (routers and other parts take no adapters)"
            )
    return places


def _dora_gain(base: AdapterBase, site: Site, a: Floats, b: Floats, magnitude: Floats) -> Floats:
    """The factor of each output minus 1: the magnitude over the length of the changed weight's row."""
    squares = np.zeros(site.columns, np.float64)
    for first, rows in base.rows(site.name):
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


def _in_order_of(
    base: AdapterBase,
    adapter: Adapter,
    site: Site,
    a: Floats,
    b: Floats,
    gain: Floats | None,
    shift: Floats | None,
) -> tuple[Floats, Floats, Floats | None, Floats | None]:
    """The terms with rows in the order of the base, where adapter and base are of different kinds of files."""
    if adapter.is_gguf == base.is_gguf:
        return a, b, gain, shift
    if gain is not None:
        raise AdapterError(f"{site.name}: DoRA needs a base in safetensors files")
    parts = site.name.split(".")
    form = base.config.blocks[int(parts[1])].mixer if parts[0] == "layers" else None
    if model_factor(base.config, f"{site.name}.weight") is not None or (
        isinstance(form, DeltaNetForm) and "mixer" in parts
    ):
        raise AdapterError(
            f"{site.name}: files of GGUF and of safetensors differ in this weight: give an adapter of the base's kind"
        )
    if (
        not base.permuted
        or not isinstance(form, AttentionForm)
        or parts[-1] not in ("q_proj", "k_proj")
    ):
        return a, b, gain, shift
    heads = form.num_attention_heads if parts[-1] == "q_proj" else form.num_key_value_heads
    order = neighbors(np.arange(len(b)), heads)
    if adapter.is_gguf:
        order = np.argsort(order)  # the inverse
    return a, b[order], gain, None if shift is None else shift[order]


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
