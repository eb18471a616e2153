"""Random adapters that PEFT makes, runs and saves: the references of ours."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.pytorch_utils import Conv1D

peft: Any = pytest.importorskip("peft", reason="PEFT is the reference of adapters")
"""The package, in the extra `test`."""
SIZE = 0.3
"""The standard deviation of what A writes, for inputs of 1."""


def peft_model(
    model: torch.nn.Module,
    modules: Sequence[str],
    rng: np.random.Generator,
    max_rank: int,
    **options: Any,
) -> Any:
    """A copy of a model in which PEFT adds a random adapter.

    Args:
        model: The model of transformers.
        modules: The names of the modules with an adapter.
        rng: Draws the ranks, the alphas, the matrices, and magnitudes of DoRA.
        max_rank: The greatest rank.
        options: Of ``LoraConfig``.
    """
    ranks = {name: int(rng.integers(1, max_rank + 1)) for name in modules}
    config = peft.LoraConfig(
        target_modules="|".join(map(re.escape, modules)),
        lora_alpha=5,
        rank_pattern=ranks,
        alpha_pattern={name: rng.uniform(0.5, 3) * ranks[name] for name in modules[::2]},
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        **options,
    )
    with warnings.catch_warnings():
        # one of two tied layers is changed, which is meant; the output layer of GPT-2 is no Conv1D; PEFT cannot merge
        # biases that the base lacks
        for text in (
            "Model has `tie_word_embeddings=True`", "fan_in_fan_out is set to True", "`lora_bias=True` was passed",
        ):  # fmt: skip
            warnings.filterwarnings("ignore", text, UserWarning)
        adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
    with torch.no_grad():
        for name, values in adapted.named_parameters():
            if "lora_magnitude_vector" in name:
                values.copy_(torch.from_numpy(rng.uniform(0.5, 1.5, values.shape)))
            elif "lora_" in name:
                drawn = rng.standard_normal(values.shape)
                if "lora_A" in name:
                    drawn *= SIZE / np.sqrt(values.shape[1])
                elif "lora_embedding_A" in name:
                    drawn *= SIZE
                values.copy_(torch.from_numpy(drawn))
    return adapted


def save_peft(adapted: Any, folder: Path) -> Path:
    """Writes the adapter, without the weights of the base, which PEFT adds if an embedding is adapted."""
    with warnings.catch_warnings():
        # biases of adapters are taken for parts of matrices
        warnings.filterwarnings("ignore", r".*LoRA tensor\(s\) have invalid shape", UserWarning)
        adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder
