"""The whole weights of an adapter (``modules_to_save``), as terms at the sites of a decoder.

A weight W' instead of W is a change of full rank, ``W' - W`` times the identity. A norm with other weights is one with
a gain and a shift.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from max._dataclass import dataclass
from max.driver import Tensor
from max.graph.weights import WeightData
from max.pipelines.adapters.adapter import Adapter, AdapterError, Array
from max.pipelines.adapters.layout import AdapterLayout, Site
from max.pipelines.adapters.terms import AdapterBase, Floats, SiteTerms
from max.pipelines.core.exceptions import WeightsError
from max.pipelines.models.decoder.fused_weights import split_fused

__all__ = ["SavedTerms", "saved_terms"]


@dataclass(frozen=True)
class SavedTerms:
    """What the whole weights of an adapter change.

    Args:
        biases: The changes of the biases of linear layers, by site.
        sites: The terms of weights.
    """

    biases: dict[str, Floats]
    sites: dict[Site, SiteTerms]


def saved_terms(adapter: Adapter, base: AdapterBase, layout: AdapterLayout) -> SavedTerms:
    """The terms of the whole weights of an adapter; those that equal the base's have none.

    Args:
        adapter: The adapter.
        base: Its base model.
        layout: The sites of the model.

    Raises:
        AdapterError: A weight has no site that takes it, or does not fit.
    """
    terms = SavedTerms({}, {})
    renamed = _named_weights(adapter, base)
    norms: dict[Site, dict[str, Array]] = {}
    for name, value in renamed.items():
        new = Tensor.from_dlpack(value.data).to_numpy()
        layer, _, part = name.rpartition(".")
        site = layout.sites.get(layer)
        if site is not None and site.norm_offset is not None:
            norms.setdefault(site, {})[part] = new
            continue
        if part == "bias" and site is not None:
            old = base.vector(name)
            if old is not None and old.shape == new.shape:
                terms.biases[layer] = new.astype(np.float32) - old
                continue
        if _equals_base(base, name, new):
            continue
        if site is None or part != "weight" or not site.takes_whole:
            raise _refusal(value.name)
        terms.sites[site] = _weight_terms(base, site, new, value.name)
    for site, parts in norms.items():
        changed = _norm_terms(base, site, parts)
        if changed is not None:
            terms.sites[site] = changed
    return terms


def _named_weights(adapter: Adapter, base: AdapterBase) -> Mapping[str, WeightData]:
    """The whole weights by the decoder's names.

    Raises:
        AdapterError: One is of another model.
    """
    values = {
        name: WeightData.from_numpy(_plain(value), name)
        for name, value in adapter.saved_weights.items()
    }
    try:
        for name, value in values.items():
            # what is left out of a model's weights would be left out in silence
            if not base.rename({name: value}):
                raise AdapterError(f"the tensor {name!r} replaces no weight of the base")
        return split_fused(base.config, base.rename(values)) if values else {}
    except (WeightsError, KeyError, IndexError) as error:
        raise AdapterError(f"{adapter.path}: the adapter is for another model: {error}") from error


def _refusal(tensor: str) -> AdapterError:
    return AdapterError(
        f"the tensor {tensor!r} replaces a whole weight, which requests cannot choose",
        "With --lora-whole-weights they can choose embedding, output layer and norms of hidden states; max quantize "
        "MODEL OUTPUT --merge ADAPTER merges all.",
    )


def _weight_terms(base: AdapterBase, site: Site, new: Array, tensor: str) -> SiteTerms:
    """The terms of another table, or of another matrix of a linear layer."""
    rows, columns = (site.inputs, site.columns) if site.is_table else (site.columns, site.inputs)
    if new.shape != (rows, columns):
        raise AdapterError(
            f"the tensor {tensor!r} is {list(new.shape)}; {site.name} of the base is {[rows, columns]}"
        )
    change = np.empty((rows, columns), np.float32)
    for first, old in base.rows(site.name):
        part = slice(first, first + len(old))
        change[part] = new[part].astype(np.float32) - old
    identity = np.eye(columns, dtype=np.float32)
    return SiteTerms(change.T, identity) if site.is_table else SiteTerms(identity, change)


def _norm_terms(base: AdapterBase, site: Site, parts: Mapping[str, Array]) -> SiteTerms | None:
    """The terms of another weight and bias of a norm; None: they are those of the base."""
    offset = site.norm_offset or 0.0
    if base.is_gguf and offset:
        raise AdapterError(f"{site.name}: whole weights of this norm need a base in safetensors")
    values: dict[str, tuple[Floats, Floats]] = {}
    for part in ("weight", "bias"):
        name = f"{site.name}.{part}"
        old, new = base.vector(name), parts.get(part)
        if old is None and new is not None:
            raise AdapterError(f"the base has no {name}, which the adapter replaces")
        if old is None:
            old = np.zeros(site.columns, np.float32)
        given = old if new is None else new.astype(np.float32)
        if given.shape != old.shape:
            raise AdapterError(
                f"{name} of the adapter is {list(given.shape)}, and the base's is {list(old.shape)}"
            )
        values[part] = (old, given)
    if all(np.array_equal(old, new) for old, new in values.values()):
        return None
    (weight, new_weight), (bias, new_bias) = values["weight"], values["bias"]
    weight, new_weight = weight + np.float32(offset), new_weight + np.float32(offset)
    if ((weight == 0) & (new_weight != 0)).any():
        raise AdapterError(
            f"{site.name}: the base's weight has a 0 where the adapter's has none",
            "Merge the adapter into the model: max quantize MODEL OUTPUT --merge ADAPTER.",
        )
    # where both weights are 0 any ratio will do
    ratio = np.divide(new_weight, weight, out=np.ones_like(weight), where=weight != 0)
    a, b = np.zeros((0, site.inputs), np.float32), np.zeros((site.columns, 0), np.float32)
    # w' x + b' = ratio (w x + b) + (b' - ratio b)
    return SiteTerms(a, b, ratio - 1, new_bias - bias * ratio)


def _equals_base(base: AdapterBase, name: str, new: Array) -> bool:
    """Whether a weight is that of the base, as it is where PEFT has saved it without training."""
    value = base.weights.get(name)
    if value is None or tuple(map(int, value.element_shape)) != new.shape:
        # a tied output layer has no weight of its own
        return False
    if new.ndim == 1:
        old = base.vector(name)
        return old is not None and bool(
            np.allclose(old, new.astype(np.float32), rtol=1e-3, atol=1e-5)
        )
    site = name.removesuffix(".weight")
    return all(
        np.allclose(part, new[first : first + len(part)].astype(np.float32), rtol=1e-3, atol=1e-5)
        for first, part in base.rows(site)
    )


def _plain(values: Array) -> Array:
    """Values in a dtype that functions of NumPy take."""
    return values.astype(np.float32) if values.dtype == ml_dtypes.bfloat16 else values
