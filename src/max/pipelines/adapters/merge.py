"""Adds an adapter to the weights of a model's folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from max.driver import Tensor
from max.dtype import DType
from max.dtype.blocks import decode
from max.graph.weights import WeightData
from max.graph.weights._safetensors_file import write_safetensors
from max.pipelines.adapters.adapter import Adapter, AdapterError, Array, LowRank
from max.pipelines.adapters.terms import Floats

__all__ = [
    "TABLE",
    "StoredNames",
    "merge_changes",
    "merged_weights",
    "output_name",
    "unties",
    "write_merged",
]

TABLE, HEAD = "embed_tokens.weight", "lm_head.weight"
"""The decoder's names of the weights that may be tied."""


class StoredNames(Protocol):
    """The names of weights in files: `WeightNames`, or `GGUFNames`."""

    @property
    def transposed_weights(self) -> tuple[str, ...]:
        """Ends of the decoder's names of weights that are stored as ``[…, inputs, outputs]``."""
        ...

    def own_name(self, stored_name: str) -> str:
        """The decoder's name of a weight."""
        ...


def unties(adapter: Adapter, names: StoredNames) -> bool:
    """Whether an adapter changes the embedding or the output layer, which then cannot be tied any more.

    Args:
        adapter: The adapter, with names of the base's files.
        names: The names of the weights of these files.
    """
    changed = [*(f"{module}.weight" for module in adapter.modules), *adapter.saved_weights]
    return any(names.own_name(name) in (TABLE, HEAD) for name in changed)


def merged_weights(
    stored_weights: Mapping[str, WeightData], adapter: Adapter, names: StoredNames, tied: bool
) -> dict[str, WeightData]:
    """The weights of a checkpoint with an adapter: ``W + scale * B A`` in float32, in the dtypes of the checkpoint.

    An adapter that changes a tied embedding or output layer (:func:`unties`) gives an output layer of its own.

    Args:
        stored_weights: The weights by the checkpoint's names, floats.
        adapter: The adapter, with the names of the checkpoint.
        names: The names of the checkpoint's weights.
        tied: Whether the output layer is tied to the embedding.

    Raises:
        AdapterError: A tensor has no weight, or does not fit it.
    """
    merged = dict(stored_weights)
    for name, (like, values) in merge_changes(stored_weights, adapter, names, tied).items():
        merged[name] = _as_stored(values(), like)
    return merged


def merge_changes(
    stored_weights: Mapping[str, WeightData], adapter: Adapter, names: StoredNames, tied: bool
) -> dict[str, tuple[WeightData, Callable[[], Floats]]]:
    """What an adapter changes: for each weight the stored one and a function that computes the new values.

    Args:
        stored_weights: The weights by the names of the files, floats or encoded blocks.
        adapter: The adapter, with the names of the files.
        names: The names of the weights of the files.
        tied: Whether the output layer is tied to the embedding.

    Raises:
        AdapterError: A tensor has no weight. The functions raise it where one does not fit.
    """
    by_own_name = {names.own_name(name): name for name in stored_weights}
    changes: dict[str, tuple[WeightData, Callable[[], Floats]]] = {}

    def add(name: str, change: Callable[[Floats], Array], source: str = "") -> None:
        """Adds a change of a stored weight, by the name that the new one has."""
        like = stored_weights[source or name]

        def values() -> Floats:
            return np.ascontiguousarray(change(_floats(like)), np.float32)

        changes[name] = like, values

    table, head = by_own_name.get(TABLE), by_own_name.get(HEAD)
    source_of: dict[str, str] = {}
    if tied and table is not None and unties(adapter, names):
        # whatever a file has there: a tied model reads the embedding
        head = head or output_name(is_gguf=table.startswith("token_embd"))
        by_own_name[HEAD], source_of[head] = head, table
        add(head, lambda own: own, table)

    def name_of(module: str, tensor: str) -> str:
        """The name of a module's weight in the files."""
        whole = f"{module}.weight"
        name = whole if whole in stored_weights else by_own_name.get(names.own_name(whole))
        if name is None:
            raise AdapterError(
                f"the tensor {tensor!r} cannot be merged: the model has no {module}.weight"
            )
        return name

    for module, low_rank in adapter.modules.items():
        if low_rank.a.ndim == 3:
            name = module if module in stored_weights else name_of(module, low_rank.tensor)
            turned = names.own_name(name).endswith(names.transposed_weights)
            add(name, partial(_with_experts, low_rank=low_rank, turned=turned))
            continue
        name = name_of(module, low_rank.tensor)
        # tables and transposed weights are stored as [inputs, outputs]
        turned = low_rank.is_table or names.own_name(name).endswith(names.transposed_weights)
        add(
            name, partial(_with_low_rank, low_rank=low_rank, turned=turned), source_of.get(name, "")
        )
        if low_rank.bias is not None:
            bias = name.removesuffix("weight") + "bias"
            if bias not in stored_weights:
                raise AdapterError(
                    f"the tensor {low_rank.tensor!r} has a bias, and files of the model hold no {bias}"
                )
            added = low_rank.bias.astype(np.float32) * np.float32(low_rank.scale)
            add(bias, partial(np.add, added))
    for name, values in adapter.saved_weights.items():
        own = name if name in stored_weights else by_own_name.get(names.own_name(name))
        like = None if own is None else stored_weights[source_of.get(own, own)]
        if own is None or like is None or tuple(map(int, like.element_shape)) != values.shape:
            raise AdapterError(
                f"the tensor {name!r} of {list(values.shape)} replaces no weight of the model"
            )
        changes[own] = like, partial(values.astype, np.float32)
    return changes


def output_name(is_gguf: bool) -> str:
    """The name of an output layer in files that have none.

    Args:
        is_gguf: Whether they are GGUF files.
    """
    return "output.weight" if is_gguf else HEAD


def write_merged(
    folder: Path, out: Path, weights: Mapping[str, WeightData], config: Mapping[str, Any] | None
) -> int:
    """Writes a copy of a model's folder with other weights.

    Args:
        folder: The model, with weights in safetensors files.
        out: The new folder; it must not exist.
        weights: All weights.
        config: The new config.json; None: it stays.

    Returns:
        The bytes of the weights.

    Raises:
        AdapterError: The folder exists.
    """
    if out.exists():
        raise AdapterError(f"{out} exists", "Give the name of a new folder.")
    # other forms of the weights would be without the adapter
    ignored = shutil.ignore_patterns("*.safetensors", "*.bin", "*.gguf", "*.index.json", ".*")
    shutil.copytree(folder, out, ignore=ignored)
    if config is not None:
        (out / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    arrays = {
        name: np.ascontiguousarray(Tensor.from_dlpack(value.data).to_numpy())
        for name, value in weights.items()
    }
    write_safetensors(out / "model.safetensors", arrays)
    return sum(array.nbytes for array in arrays.values())


def _floats(value: WeightData) -> Floats:
    array = Tensor.from_dlpack(value.data).to_numpy()
    encoding = value.quantization_encoding
    if encoding is not None and encoding.is_gguf:
        return decode(array, encoding.value)
    if not value.dtype.is_float() or encoding is not None:
        raise AdapterError(f"the weight {value.name!r} is {value.dtype.name}; merging needs floats")
    return array.astype(np.float32)


def _with_low_rank(weight: Floats, low_rank: LowRank, turned: bool) -> npt.NDArray[Any]:
    """A weight, ``[outputs, inputs]`` or `turned`, with the change of a module."""
    a, b = low_rank.a.astype(np.float32), low_rank.b.astype(np.float32)
    own = weight.T if turned else weight
    if own.shape != (len(b), a.shape[1]):
        raise AdapterError(
            f"the tensor {low_rank.tensor!r} is for {[len(b), a.shape[1]]}; the weight is {[*own.shape]}"
        )
    new = own + np.float32(low_rank.scale) * (b @ a)
    if low_rank.magnitude is not None:
        # DoRA: each row gets the length that was learned; NaN stands for that which it has
        lengths = np.linalg.norm(new.astype(np.float64), axis=1).astype(np.float32)
        magnitude = low_rank.magnitude.astype(np.float32)
        new *= np.where(np.isnan(magnitude), 1, magnitude / lengths)[:, None]
    return new.T if turned else new


def _with_experts(weight: Floats, low_rank: LowRank, turned: bool) -> npt.NDArray[Any]:
    """A weight of all experts, ``[experts, inputs, outputs]`` if it is `turned`, with the change of a parameter."""
    a, b = low_rank.a.astype(np.float32), low_rank.b.astype(np.float32)
    change = np.float32(low_rank.scale) * (b @ a)
    own = np.swapaxes(weight, 1, 2) if turned else weight
    # versions of PEFT differ in which dimension has the inputs
    if change.shape != own.shape:
        change = np.swapaxes(change, 1, 2)
    if change.shape != own.shape:
        raise AdapterError(
            f"the tensor {low_rank.tensor!r} is for {[*change.shape]}; the weight is {[*own.shape]}"
        )
    return weight + (np.swapaxes(change, 1, 2) if turned else change)


def _as_stored(values: Floats, like: WeightData) -> WeightData:
    """Values in the dtype of a weight; float8 would lose the change."""
    dtype = DType.bfloat16 if like.dtype.is_float8() else like.dtype
    return WeightData.from_numpy(values, like.name).astype(dtype)
