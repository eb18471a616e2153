"""Reads adapters in GGUF files: ``general.type`` is adapter, tensors are named ``blk.0.attn_q.weight.lora_a``.

A ``lora_a`` is ``[rank, inputs]``, a ``lora_b`` ``[outputs, rank]``. Those of all experts of a layer, such as
``blk.0.ffn_up_exps.weight``, have the experts as a first dimension.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from max.driver import Tensor
from max.dtype.blocks import decode
from max.graph.weights import WeightsFileError, load_weights, open_gguf
from max.pipelines.adapters.adapter import (
    MAX_TENSORS,
    Adapter,
    AdapterError,
    Array,
    LowRank,
    check_finite,
    digest_of,
    regular_file,
)

__all__ = ["read_gguf_adapter"]

_TABLE = "token_embd"


def read_gguf_adapter(path: Path, max_rank: int) -> Adapter:
    """Reads an adapter.

    Args:
        path: The file.
        max_rank: The bound of the rank.

    Raises:
        AdapterError: The file is damaged, or is no LoRA adapter.
    """
    regular_file(path)
    try:
        values: dict[str, Any] = open_gguf(path).metadata
        tensors = dict(load_weights([path]).items())
    except (WeightsFileError, ValueError, OSError) as error:
        raise AdapterError(f"the adapter's file cannot be read: {error}") from error
    if values.get("general.type") != "adapter" or values.get("adapter.type", "lora") != "lora":
        raise AdapterError(
            f"{path}: general.type is {str(values.get('general.type'))[:40]!r} and adapter.type "
            f"{str(values.get('adapter.type'))[:40]!r}; expected adapter and lora"
        )
    # aLoRA: the change holds only from these tokens on
    if values.get("adapter.alora.invocation_tokens") is not None:
        raise AdapterError(
            f"{path}: adapter.alora.invocation_tokens is set; such adapters do not run"
        )
    alpha = values.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterError(f"{path}: adapter.lora.alpha is {str(alpha)[:40]}, expected a number")
    if not 0 < len(tensors) <= MAX_TENSORS:
        raise AdapterError(f"{path} has {len(tensors)} tensors, expected 1 to {MAX_TENSORS}")
    parts: dict[str, dict[str, tuple[str, Array]]] = {}
    for name, weight in tensors.items():
        module, _, end = name.rpartition(".")
        if end not in ("lora_a", "lora_b") or not module.endswith(".weight"):
            raise AdapterError(
                f"the tensor {name!r} is no part of an adapter: expected .lora_a or .lora_b"
            )
        try:
            data = weight.data()
        except (WeightsFileError, ValueError) as error:
            raise AdapterError(f"the adapter's file cannot be read: {error}") from error
        array: Array = Tensor.from_dlpack(data.data).to_numpy()
        if data.quantization_encoding is not None:
            array = decode(array, data.quantization_encoding.value)
        elif not data.dtype.is_float():
            raise AdapterError(f"the tensor {name!r} is {data.dtype.name}, expected floats")
        parts.setdefault(module.removesuffix(".weight"), {})[end] = (name, array)
    modules: dict[str, LowRank] = {}
    for module, own in parts.items():
        if len(own) != 2:
            (name, _) = next(iter(own.values()))
            raise AdapterError(f"the tensor {name!r} is alone: the file lacks its other part")
        (name, a), (name_b, b) = own["lora_a"], own["lora_b"]
        if module == _TABLE and a.ndim == 2:
            # files have the rows of tokens
            a = np.ascontiguousarray(a.T)
        of_layer, of_experts = a.ndim == b.ndim == 2, a.ndim == b.ndim == 3 and len(a) == len(b)
        if not (of_layer or of_experts) or a.shape[-2] != b.shape[-1] or not a.size or not b.size:
            raise AdapterError(
                f"the tensors {name!r} and {name_b!r} are {list(a.shape)} and {list(b.shape)}, which are no factors "
                "of a product"
            )
        rank = a.shape[-2]
        if rank > max_rank:
            raise AdapterError(
                f"the tensor {name!r} has rank {rank}, above {max_rank}",
                "Give a greater --max-lora-rank.",
            )
        check_finite(name, a)
        check_finite(name_b, b)
        # an alpha of 0 stands for a scale of 1
        scale = float(alpha) / rank if alpha else 1.0
        modules[module] = LowRank(name, a, b, scale, module == _TABLE)
    return Adapter(
        path,
        digest_of([path]),
        modules,
        {},
        True,
        str(values.get("general.base_model.0.name", ""))[:256],
    )
