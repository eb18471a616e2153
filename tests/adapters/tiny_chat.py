"""Adapters of the bundled model, and the folder of that model with an adapter merged."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from max.pipelines.adapters.reader import read_adapter
from tests.adapters.harness import linear_modules, merged, random_adapter, save_adapter

MODEL = Path("models/tiny-chat")
RANK = 16


@functools.cache
def reference() -> torch.nn.Module:
    """The model of transformers in float32."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def make_adapter(
    folder: Path, seed: int, rank: int = 8, size: float = 0.15, **options: object
) -> Path:
    """A random adapter of all linear layers of the blocks.

    Args:
        folder: Where it is written.
        seed: Of its numbers.
        rank: Its rank.
        size: The size of its matrices.
        options: Of `random_adapter`.
    """
    modules = {
        name: module for name, module in linear_modules(reference()).items() if "layers." in name
    }
    rng = np.random.default_rng(seed)
    dora = bool(options.get("dora"))
    tensors = random_adapter(modules, rng, lambda: rank, size=size, dora=dora)
    return save_adapter(folder, tensors, r=rank, lora_alpha=rank, rank_pattern={}, use_dora=dora)


def merged_folder(folder: Path, adapter: Path) -> Path:
    """A copy of the model with an adapter in its weights, in float32."""
    shutil.copytree(MODEL, folder)
    model = merged(reference(), read_adapter(adapter, 64))
    for path in folder.glob("*.safetensors"):
        path.unlink()
    state = {name: value.float().numpy().copy() for name, value in model.state_dict().items()}
    if json.loads((MODEL / "config.json").read_text()).get("tie_word_embeddings"):
        state.pop("lm_head.weight", None)
    save_file(state, folder / "model.safetensors")
    return folder
