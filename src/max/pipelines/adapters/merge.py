"""Adds an adapter to the weights of a model's folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from max.driver import Tensor
from max.dtype import DType
from max.graph.weights import WeightData, load_weights
from max.graph.weights._safetensors_file import write_safetensors
from max.pipelines.adapters.adapter import Adapter, AdapterError, Array, LowRank
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["merged_weights", "unties", "write_merged"]

_TABLE, _HEAD = "embed_tokens.weight", "lm_head.weight"
"""The decoder's names of the weights that may be tied."""


def unties(adapter: Adapter, names: WeightNames) -> bool:
    """Whether an adapter changes the embedding or the output layer, which then cannot be tied any more.

    Args:
        adapter: The adapter, of PEFT.
        names: The names of the family's weights.
    """
    changed = [*(f"{module}.weight" for module in adapter.modules), *adapter.saved_weights]
    return any(names.own_name(name) in (_TABLE, _HEAD) for name in changed)


def merged_weights(
    stored_weights: Mapping[str, WeightData], adapter: Adapter, names: WeightNames, tied: bool
) -> dict[str, WeightData]:
    """The weights of a checkpoint with an adapter: ``W + scale * B A`` in float32.

    An adapter that changes a tied embedding or output layer (:func:`unties`) gives an output layer of its own.

    Args:
        stored_weights: The weights by the checkpoint's names, floats.
        adapter: The adapter, of PEFT.
        names: The names of the family's weights.
        tied: Whether the output layer is tied to the embedding.

    Raises:
        AdapterError: A tensor has no weight, or does not fit it.
    """
    if adapter.is_gguf:
        raise AdapterError(
            f"{adapter.path} is a GGUF adapter", "Give a folder that PEFT has saved."
        )
    stored_weights = dict(stored_weights)
    by_own_name = {names.own_name(name): name for name in stored_weights}
    if tied and _TABLE in by_own_name and unties(adapter, names):
        head = by_own_name.setdefault(_HEAD, _HEAD)
        # whatever a file has there: a tied model reads the embedding
        stored_weights[head] = stored_weights[by_own_name[_TABLE]]
    merged = dict(stored_weights)

    def name_of(module: str, tensor: str) -> str:
        """The checkpoint's name of a module's weight."""
        own = names.own_name(f"{module}.weight")
        name = f"{module}.weight" if f"{module}.weight" in stored_weights else by_own_name.get(own)
        if name is None:
            raise AdapterError(
                f"the tensor {tensor!r} cannot be merged: the model has no {module}.weight"
            )
        return name

    for module, low_rank in adapter.modules.items():
        if low_rank.a.ndim == 3:
            own = names.own_name(module)
            stored = module if module in stored_weights else by_own_name.get(own)
            if stored is None:
                raise AdapterError(
                    f"the tensor {low_rank.tensor!r} cannot be merged: the model has no {module}; its experts have "
                    "weights of their own"
                )
            turned = names.own_name(stored).endswith(names.transposed_weights)
            merged[stored] = _with_experts(stored_weights[stored], low_rank, turned)
            continue
        name = name_of(module, low_rank.tensor)
        value = stored_weights[name]
        # tables and transposed weights are stored as [inputs, outputs]
        turned = low_rank.is_table or names.own_name(name).endswith(names.transposed_weights)
        own = _floats(value)
        new = _with_low_rank(own.T if turned else own, low_rank)
        merged[name] = _as_stored(new.T if turned else new, value)
        if low_rank.bias is not None:
            bias = name.removesuffix("weight") + "bias"
            if bias not in stored_weights:
                raise AdapterError(
                    f"the tensor {low_rank.tensor!r} has a bias, and the model has no {bias}"
                )
            added = low_rank.bias.astype(np.float32) * np.float32(low_rank.scale)
            merged[bias] = _as_stored(_floats(stored_weights[bias]) + added, stored_weights[bias])
    for name, values in adapter.saved_weights.items():
        own = name if name in stored_weights else by_own_name.get(names.own_name(name))
        if own is None or tuple(map(int, stored_weights[own].shape)) != values.shape:
            raise AdapterError(
                f"the tensor {name!r} of {list(values.shape)} replaces no weight of the model"
            )
        merged[own] = _as_stored(values.astype(np.float32), stored_weights[own])
    return merged


def write_merged(folder: Path, out: Path, adapter: Adapter, names: WeightNames, tied: bool) -> int:
    """Writes a copy of a model's folder with an adapter in its weights.

    Args:
        folder: The model, with weights in safetensors files.
        out: The new folder; it must not exist.
        adapter: The adapter.
        names: The names of the family's weights.
        tied: Whether the output layer is tied to the embedding.

    Returns:
        The bytes of the weights.

    Raises:
        AdapterError: The adapter does not fit, or the folder exists.
    """
    if out.exists():
        raise AdapterError(f"{out} exists", "Give the name of a new folder.")
    files = sorted(folder.glob("*.safetensors"))
    stored = {name: weight.data() for name, weight in load_weights(list(files)).items()}
    merged = merged_weights(stored, adapter, names, tied)
    # other forms of the weights would be without the adapter
    ignored = shutil.ignore_patterns("*.safetensors", "*.bin", "*.gguf", "*.index.json", ".*")
    shutil.copytree(folder, out, ignore=ignored)
    if tied and unties(adapter, names):
        path = out / "config.json"
        path.write_text(
            json.dumps(_with_output_layer(json.loads(path.read_text("utf-8"))), indent=2)
        )
    arrays = {
        name: np.ascontiguousarray(Tensor.from_dlpack(value.data).to_numpy())
        for name, value in merged.items()
    }
    write_safetensors(out / "model.safetensors", arrays)
    return sum(array.nbytes for array in arrays.values())


def _with_output_layer(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json of a model whose output layer has weights of its own."""
    text = config.get("text_config")
    inner = {"text_config": _with_output_layer(text)} if isinstance(text, dict) else {}
    return {**config, **inner, "tie_word_embeddings": False}


def _floats(value: WeightData) -> npt.NDArray[np.float32]:
    if not value.dtype.is_float() or value.quantization_encoding is not None:
        raise AdapterError(f"the weight {value.name!r} is {value.dtype.name}; merging needs floats")
    return Tensor.from_dlpack(value.data).to_numpy().astype(np.float32)


def _with_low_rank(
    weight: npt.NDArray[np.float32], low_rank: LowRank
) -> npt.NDArray[np.floating[Any]]:
    """A weight ``[outputs, inputs]`` with the change of a module."""
    a, b = low_rank.a.astype(np.float32), low_rank.b.astype(np.float32)
    if weight.shape != (len(b), a.shape[1]):
        raise AdapterError(
            f"the tensor {low_rank.tensor!r} is for {[len(b), a.shape[1]]}; the weight is {[*weight.shape]}"
        )
    new = weight + np.float32(low_rank.scale) * (b @ a)
    if low_rank.magnitude is not None:
        # DoRA: each row gets the length that was learned
        lengths = np.linalg.norm(new.astype(np.float64), axis=1).astype(np.float32)
        new *= (low_rank.magnitude.astype(np.float32) / lengths)[:, None]
    return new


def _with_experts(value: WeightData, low_rank: LowRank, turned: bool) -> WeightData:
    """A weight of all experts, ``[experts, inputs, outputs]`` if it is `turned`, with the change of a parameter."""
    a, b = low_rank.a.astype(np.float32), low_rank.b.astype(np.float32)
    weight = _floats(value)
    change = np.float32(low_rank.scale) * (b @ a)
    own = np.swapaxes(weight, 1, 2) if turned else weight
    # versions of PEFT differ in which dimension has the inputs
    if change.shape != own.shape:
        change = np.swapaxes(change, 1, 2)
    if change.shape != own.shape:
        raise AdapterError(
            f"the tensor {low_rank.tensor!r} is for {[*change.shape]}; the weight is {[*own.shape]}"
        )
    return _as_stored(weight + (np.swapaxes(change, 1, 2) if turned else change), value)


def _as_stored(values: npt.NDArray[np.floating[Any]], like: WeightData) -> WeightData:
    """Values in the dtype of a weight; float8 would lose the change."""
    dtype = DType.bfloat16 if like.dtype.is_float8() else like.dtype
    data: Array = np.ascontiguousarray(values)
    return WeightData.from_numpy(data, like.name).astype(dtype)
