"""A checkpoint in the Hugging Face layout as a GGUF file: its config, tokenizer and weights, quantised.

The keys of the metadata and the names of weights are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from max.driver import Tensor
from max.dtype.blocks import BLOCK_FORMATS
from max.engine import InferenceSession
from max.graph.weights import WeightData, load_weights
from max.pipelines.checkpoints.gguf_vocabulary import tokenizer_metadata
from max.pipelines.checkpoints.gguf_writer import GGUFEntry, write_gguf
from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.checkpoints.quantise import Quantiser, encoding_for
from max.pipelines.core.exceptions import ModelFilesError

__all__ = ["EXPORT_TYPES", "export_gguf"]

EXPORT_TYPES = ("q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "f16", "bf16", "f32")
"""The types of matrices in written files; vectors are float32."""

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# llama.cpp's numbers of kinds of files
_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "q4_k": 15, "q5_k": 17, "q6_k": 18, "bf16": 32}  # fmt: skip
_PLAIN: dict[str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
    "F32": lambda values: values.astype(np.float32),
    "F16": lambda values: values.astype(np.float16),
    "BF16": lambda values: values.astype(ml_dtypes.bfloat16),
}
_REMEDY = "`max quantize` writes models of " + ", ".join(_ARCHITECTURES) + "."


def export_gguf(folder: Path, path: Path, kind: str, session: InferenceSession) -> int:
    """Writes a GGUF file of a model's folder.

    Args:
        folder: The folder, in the Hugging Face layout, with float weights.
        path: The file to write.
        kind: One of `EXPORT_TYPES`. Embedding and output layer have at least 6 bits; rows that blocks of 256 do not fill are
            of a type with blocks of 32, others float16.
        session: Compiles and runs the kernels that encode.

    Returns:
        The bytes of the tensors.

    Raises:
        ModelFilesError: The model's files are missing or broken, or of a family that is not written.
    """
    repo = HuggingFaceRepo(str(folder))
    config = HuggingFaceConfig.load(repo)
    name = next((a for a in config.architectures if a in _ARCHITECTURES), None)
    if name is None:
        raise ModelFilesError(f"{folder} is a {', '.join(config.architectures)}", _REMEDY)
    metadata = _model_metadata(config, _ARCHITECTURES[name], folder.name)
    metadata["general.file_type"] = _FILE_TYPES[kind]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFilesError(f"{folder} has no *.safetensors", "Give a folder with float weights.")
    weights = {name: weight.data() for name, weight in load_weights(list(files)).items()}
    rows = next((int(w.shape[0]) for n, w in weights.items() if n.endswith("embed_tokens.weight")), 0)  # fmt: skip
    metadata |= tokenizer_metadata(repo, rows)
    quantiser = Quantiser(session)
    entries = _rope_factors(config)
    interleaves = metadata["general.architecture"] == "llama"
    for stored, weight in weights.items():
        if stored.endswith("rotary_emb.inv_freq"):
            continue
        if stored == "lm_head.weight" and config.get("tie_word_embeddings", False):
            continue
        heads = _heads(config, stored) if interleaves else None
        entries.append(_entry(stored, weight, kind, heads, quantiser))
    write_gguf(path, metadata, entries)
    return sum(entry.nbytes for entry in entries)


def _model_metadata(config: HuggingFaceConfig, name: str, title: str) -> dict[str, Any]:
    heads = int(config.num_attention_heads)
    head_dim = int(config.get("head_dim") or config.hidden_size // heads)
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    values: dict[str, Any] = {
        "general.architecture": name,
        "general.name": title,
        "general.quantization_version": 2,
        f"{name}.block_count": int(config.num_hidden_layers),
        f"{name}.context_length": int(config.max_position_embeddings),
        f"{name}.embedding_length": int(config.hidden_size),
        f"{name}.feed_forward_length": int(config.intermediate_size),
        f"{name}.attention.head_count": heads,
        f"{name}.attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
        f"{name}.attention.key_length": head_dim,
        f"{name}.attention.value_length": head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{name}.rope.freq_base": float(base),
        f"{name}.rope.dimension_count": head_dim,
        f"{name}.vocab_size": int(config.vocab_size),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("linear", "yarn"):
        values[f"{name}.rope.scaling.type"] = kind
        values[f"{name}.rope.scaling.factor"] = float(rope["factor"])
        if original := rope.get("original_max_position_embeddings"):
            values[f"{name}.rope.scaling.original_context_length"] = int(original)
    elif kind not in ("default", "llama3"):
        raise ModelFilesError(
            f"{config.source} scales its rotation by {kind!r}",
            "`max quantize` writes default, linear, yarn and llama3.",
        )
    return values


def _rope_factors(config: HuggingFaceConfig) -> list[GGUFEntry]:
    """The table of Llama 3's scaled frequencies: what each is divided by."""
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return []
    heads = int(config.num_attention_heads)
    dim = int(config.get("head_dim") or config.hidden_size // heads)
    base = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    factor, low, high = (float(rope[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(rope["original_max_position_embeddings"])
    lengths = 2 * math.pi * base ** (np.arange(0, dim, 2) / dim)
    smooth = np.clip((original / lengths - low) / (high - low), 0, 1)
    factors = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return [GGUFEntry("rope_freqs.weight", "F32", factors.shape, factors.nbytes, lambda: factors)]


def _heads(config: HuggingFaceConfig, name: str) -> int | None:
    """How many heads the rows of a projection have, where rotated pairs become neighbours."""
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    if ".k_proj." in name:
        return int(config.get("num_key_value_heads") or config.num_attention_heads)
    return None


def _name(stored: str) -> str:
    parts = stored.removeprefix("model.").split(".")
    if parts[0] == "layers" and (inner := _LAYER.get(".".join(parts[2:-1]))) is not None:
        return f"blk.{parts[1]}.{inner}.{parts[-1]}"
    if parts[0] in _TOP and len(parts) == 2:
        return f"{_TOP[parts[0]]}.{parts[-1]}"
    raise ModelFilesError(f"the weight {stored!r} has no name in GGUF files", _REMEDY)


def _entry(
    stored: str, weight: WeightData, kind: str, heads: int | None, quantiser: Quantiser
) -> GGUFEntry:
    shape = tuple(int(size) for size in weight.shape)
    if not weight.dtype.is_float():
        raise ModelFilesError(
            f"the weight {stored!r} is {weight.dtype.name}", "Give a folder with float weights."
        )

    def values() -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = Tensor.from_dlpack(weight.data).to_numpy()
        if heads is None:
            return array
        pairs = array.reshape(heads, 2, -1, *shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(shape)

    def encoded() -> npt.NDArray[Any]:
        assert chosen is not None
        data = quantiser.encode(WeightData.from_numpy(values(), stored), chosen).data
        return Tensor.from_dlpack(data).to_numpy()

    chosen = encoding_for(stored, shape, kind) if kind.upper() in BLOCK_FORMATS else None
    if chosen is not None:
        form = BLOCK_FORMATS[chosen.upper()]
        nbytes = math.prod(shape) // form.elements * form.bytes
        return GGUFEntry(_name(stored), chosen.upper(), shape, nbytes, encoded)
    plain = "F32" if len(shape) < 2 else kind.upper() if kind.upper() in _PLAIN else "F16"
    convert = _PLAIN[plain]
    size = 4 if plain == "F32" else 2
    return GGUFEntry(
        _name(stored), plain, shape, math.prod(shape) * size, lambda: convert(values())
    )
