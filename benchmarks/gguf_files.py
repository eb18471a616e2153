"""GGUF files of Llama checkpoints in the Hugging Face layout, as llama.cpp's converter and quantizer write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from max.driver import Tensor
from max.dtype import DType
from max.graph.quantization import QuantizationEncoding, quantize
from max.graph.weights import load_weights

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
SMALLER = {"Q4_K": "Q4_0", "Q5_K": "Q8_0", "Q6_K": "Q8_0"}
"""What a matrix is encoded in whose rows are no multiples of 256."""


def gguf_name(name: str) -> str:
    """The name in a GGUF file of a weight of a Hugging Face checkpoint."""
    parts = name.removeprefix("model.").split(".")
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{LAYER_NAMES['.'.join(parts[2:-1])]}.{parts[-1]}"
    return f"{TOP_NAMES[parts[0]]}.{parts[-1]}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys with the two of each rotated pair side by side."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def encoded(weight: np.ndarray, encoding: str) -> tuple[np.ndarray, str]:
    """A matrix in an encoding, or in the next one that its rows fit; the type's name."""
    for name in (encoding, SMALLER.get(encoding, encoding)):
        if name in QuantizationEncoding.__members__:
            if weight.shape[-1] % QuantizationEncoding(name).elements_per_block == 0:
                return quantize(weight, QuantizationEncoding(name)), name
    if encoding == "F32":
        return np.ascontiguousarray(weight, np.float32), "F32"
    if encoding == "BF16":
        return np.ascontiguousarray(weight.astype(ml_dtypes.bfloat16)).view(np.uint8), "BF16"
    return np.ascontiguousarray(weight, np.float16), "F16"


def write_gguf(
    folder: Path, path: Path, encoding: str, embedding: str | None = None, vocabulary: bool = True
) -> Path:
    """Writes a checkpoint as a GGUF file.

    Args:
        folder: The checkpoint, in the Hugging Face layout.
        path: The file to write.
        encoding: Of matrices: the name of a `QuantizationEncoding`, F16, BF16 or F32. Vectors are F32.
        embedding: Of the embedding (and output layer); that of the others by default.
        vocabulary: Whether the tokenizer is written too; else the file says that there is none.
    """
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, "llama")
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    writer.add_name(folder.name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    if vocabulary:
        _add_vocabulary(writer, folder, config)
    else:
        writer.add_tokenizer_model("no_vocab")
    for name, weight in load_weights(sorted(folder.glob("*.safetensors"))).items():
        array = Tensor.from_dlpack(weight.data().astype(DType.float32).data).to_numpy()
        renamed = gguf_name(name)
        if ".attn_q." in renamed or ".attn_k." in renamed:
            array = interleaved(array, heads if ".attn_q." in renamed else kv_heads)
        if array.ndim == 1:
            data, kind = array, "F32"
        else:
            of_tokens = renamed.startswith(("token_embd", "output."))
            data, kind = encoded(array, embedding if of_tokens and embedding else encoding)
        writer.add_tensor(renamed, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"] for token in values["added_tokens"]}
    vocabulary = {
        **values["model"]["vocab"],
        **{token["content"]: token["id"] for token in values["added_tokens"]},
    }
    texts = {number: text for text, number in vocabulary.items()}
    size = config["vocab_size"]
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(size)]
    kinds = [
        gguf.TokenType.CONTROL if text in special
        else gguf.TokenType.NORMAL if number in texts
        else gguf.TokenType.UNUSED
        for number, text in enumerate(tokens)
    ]  # fmt: skip
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = values["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    eos = config.get("eos_token_id")
    if eos is not None:
        writer.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)
    if config.get("bos_token_id") is not None:
        writer.add_bos_token_id(config["bos_token_id"])
    writer.add_add_bos_token(False)
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())
