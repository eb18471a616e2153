"""Randomly initialised checkpoints in the Hugging Face layout, made once per folder."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOKENIZER_FROM = ROOT / "models" / "tiny-chat"

# name -> LlamaConfig fields
SHAPES: dict[str, dict[str, object]] = {
    # SmolLM2-135M's shape
    "llama-135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    },
    # SmolLM2-360M's shape
    "llama-360m": {
        "hidden_size": 960,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "intermediate_size": 2560,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    },
    # Llama-3.2-1B's shape
    "llama-1.2b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    },
    "llama-tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
    },
}


def make_checkpoint(shape: str, dtype: str, folder: Path) -> Path:
    """Write the model of ``shape`` (a key of ``SHAPES``) in ``dtype`` under ``folder``; returns its folder.

    The tokenizer is the bundled model's: its 4096 tokens are a prefix of the larger vocabularies.
    """
    target = folder / f"{shape}-{dtype}"
    if (target / "model.safetensors").exists():
        return target
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], bos_token_id=None, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER_FROM / name, target / name)
    return target


# our names of encodings -> llama.cpp's number of a file type
FILE_TYPES = {"q4_0": 2, "q8_0": 7, "q4_k": 15, "q5_k": 17, "q6_k": 18}


def make_gguf(shape: str, encoding: str, folder: Path) -> Path:
    """Write the model of ``shape`` as a GGUF file in ``encoding``: float32, bfloat16, or a key of ``FILE_TYPES``.

    Quantised files are made by llama.cpp (`benchmarks.peers`), all weights alike. The file has no tokenizer.
    """
    target = folder / f"{shape}-{encoding}.gguf"
    if target.exists():
        return target
    aside = target.with_suffix(".part")
    if encoding in FILE_TYPES:
        from benchmarks.peers import python
        from benchmarks.runner import Worker

        source = make_gguf(shape, "float32", folder)
        worker = Worker("benchmarks.workers.llama_cpp_llm", python=python("llama"))
        worker.call(
            "quantize", source=str(source), target=str(aside), file_type=FILE_TYPES[encoding]
        )
        worker.close()
    else:
        _write_gguf(make_checkpoint(shape, encoding, folder), encoding, aside)
    aside.rename(target)
    return target


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _write_gguf(checkpoint: Path, dtype: str, target: Path) -> None:
    import gguf
    import numpy as np
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaConfig

    config = LlamaConfig.from_pretrained(checkpoint)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        layer = re.match(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        stem = layer[2] if layer else name.removesuffix(".weight")
        short = stem.rsplit(".", 1)[-1]
        if short in heads:
            # llama.cpp rotates neighbours, the checkpoint halves
            tensor = tensor.unflatten(0, (heads[short], 2, -1)).transpose(1, 2).flatten(0, 2)
        full = (f"blk.{layer[1]}." if layer else "") + _GGUF_NAMES[stem] + ".weight"
        if tensor.ndim == 1 or dtype == "float32":
            writer.add_tensor(full, tensor.float().contiguous().numpy())
        else:
            raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
            writer.add_tensor(full, raw.astype(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(make_checkpoint(args.shape, args.dtype, args.folder))


if __name__ == "__main__":
    main()
