"""Randomly initialized checkpoints in the Hugging Face layout, made once per folder."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOKENIZER_FROM = ROOT / "models" / "tiny-chat"

# name -> fields of transformers' config
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
    # 6 layers of SmolLM2-135M's shape, for long contexts
    "llama-long": {
        "hidden_size": 576,
        "num_hidden_layers": 6,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
    # the form of OLMoE: 1.1B in all, 0.2B of it used by a token
    "olmoe-1.1b": {
        "hidden_size": 1024,
        "num_hidden_layers": 10,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 512,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "vocab_size": 32768,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
    },
    "gemma3-1b": {
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "intermediate_size": 6912,
        "vocab_size": 262144,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    },
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 151936,
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
        "max_position_embeddings": 2048,
    },
}

# the first part of a shape's name -> transformers' config and model, llama.cpp's architecture
CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", "llama"),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", "olmoe"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", "gemma3"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", "qwen3"),
}


def make_checkpoint(shape: str, dtype: str, folder: Path) -> Path:
    """Write the model of ``shape`` (a key of ``SHAPES``) in ``dtype`` under ``folder``; returns its folder.

    The tokenizer is the bundled model's: its 4096 tokens are a prefix of the larger vocabularies.
    """
    target = folder / f"{shape}-{dtype}"
    if (target / "model.safetensors").exists():
        return target
    import torch
    import transformers

    config_class, model_class, _ = CLASSES[shape.partition("-")[0]]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(
        **SHAPES[shape], bos_token_id=None, eos_token_id=None, pad_token_id=0
    )
    model = getattr(transformers, model_class)(config).to(getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER_FROM / name, target / name)
    return target


# our names of encodings -> those of GGUF
FLOATS = {"float32": "F32", "bfloat16": "BF16"}
# our names of encodings -> llama.cpp's number of a file type
FILE_TYPES = {
    "q4_0": 2, "q8_0": 7, "q2_k": 10, "q3_k": 11, "q4_k": 15, "q4_k_m": 15, "q5_k": 17, "q5_k_m": 17, "q6_k": 18,
    "iq4_nl": 25, "iq4_xs": 30,
}  # fmt: skip
_FILE_TYPES = {**FILE_TYPES, "bfloat16": 32}


def fits(shape: str, encoding: str) -> bool:
    """Whether all matrices of a shape have whole blocks of an encoding: K-quants take 256 neighbors."""
    sizes = [SHAPES[shape][name] for name in ("hidden_size", "intermediate_size")]
    block = 256 if "_k" in encoding or encoding == "iq4_xs" else 32 if encoding in FILE_TYPES else 1
    return all(isinstance(size, int) and size % block == 0 for size in sizes)


def make_gguf(shape: str, encoding: str, folder: Path) -> Path:
    """Write the model of ``shape`` as a GGUF file in ``encoding``: a key of ``FLOATS`` or of ``FILE_TYPES``.

    Quantized files are made by llama.cpp (`benchmarks.peers`): all weights alike, or with the suffix ``_m`` some in more
    bits, as in the files that people run. The file has no tokenizer.
    """
    target = folder / f"{shape}-{encoding}.gguf"
    if target.exists():
        return target
    aside = target.with_suffix(".part")
    if encoding != "float32" and (encoding in FILE_TYPES or not shape.startswith("llama")):
        from benchmarks.peers import llama_python
        from benchmarks.runner import Worker

        source = make_gguf(shape, "float32", folder)
        worker = Worker("benchmarks.workers.llama_cpp_llm", python=llama_python())
        worker.call(
            "quantize",
            source=str(source),
            target=str(aside),
            file_type=_FILE_TYPES[encoding],
            pure=not encoding.endswith("_m"),
        )
        worker.close()
    elif not shape.startswith("llama"):
        _write_family(shape, make_checkpoint(shape, encoding, folder), aside)
    else:
        from benchmarks.gguf_files import write_gguf

        checkpoint = make_checkpoint(shape, encoding, folder)
        write_gguf(checkpoint, aside, FLOATS[encoding], vocabulary=False)
    aside.rename(target)
    return target


def _write_family(shape: str, checkpoint: Path, target: Path) -> None:
    """Writes a float32 checkpoint of another family than Llama as a GGUF file without a tokenizer."""
    import transformers

    from tests.architectures import gguf_files

    _, model_class, architecture = CLASSES[shape.partition("-")[0]]
    model = getattr(transformers, model_class).from_pretrained(checkpoint, dtype="float32")

    def without_tokenizer(writer: Any) -> None:
        if head_dim := SHAPES[shape].get("head_dim"):
            writer.add_value_length(head_dim)
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(SHAPES[shape]["vocab_size"])

    gguf_files.write(target, model, architecture, without_tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(make_checkpoint(args.shape, args.dtype, args.folder))


if __name__ == "__main__":
    main()
