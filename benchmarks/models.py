"""Randomly initialised checkpoints in the Hugging Face layout, made once per folder."""

from __future__ import annotations

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(make_checkpoint(args.shape, args.dtype, args.folder))


if __name__ == "__main__":
    main()
