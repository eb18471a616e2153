"""Vectors of texts by transformers in torch; makes the checkpoint, and the file that ONNX Runtime reads."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertModel
from transformers.utils.logging import disable_progress_bar

from benchmarks.embeddings import (
    SHAPES,
    VOCAB,
    means,
    padded_batches,
    serve_vectors,
)

state: dict[str, Any] = {}


class Encoder(nn.Module):
    """Token ids and mask to the last hidden state."""

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.bert(ids, attention_mask=mask).last_hidden_state


def export(folder: Path, target: Path) -> None:
    """Write the model as ONNX; attention as products and a softmax, which ONNX Runtime runs faster."""
    bert = BertModel.from_pretrained(
        folder, add_pooling_layer=False, attn_implementation="eager"
    ).eval()
    ids = torch.ones((2, 16), dtype=torch.int64)
    aside = target.with_suffix(".part.onnx")
    axes = {0: "batch", 1: "tokens"}
    torch.onnx.export(
        Encoder(bert),
        (ids, ids.clone()),
        aside,
        input_names=["ids", "mask"],
        dynamic_shapes={"ids": axes, "mask": axes},
        external_data=False,
        verbose=False,
    )
    aside.rename(target)


def setup(model: str, folder: str, packages: str) -> dict[str, float]:
    """Make the files; ``packages`` are where onnx and onnxscript are, empty for no ONNX file."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    disable_progress_bar()
    target = Path(folder) / f"embeddings-{model}"
    target.mkdir(parents=True, exist_ok=True)
    if not (target / "model.safetensors").exists():
        torch.manual_seed(0)
        config = BertConfig(vocab_size=VOCAB, **SHAPES[model])
        BertModel(config, add_pooling_layer=False).save_pretrained(target)
    if packages and not (target / "model.onnx").exists():
        sys.path.append(packages)
        export(target, target / "model.onnx")
    bert = BertModel.from_pretrained(target, add_pooling_layer=False)
    state["net"] = Encoder(bert).eval()
    return {}


def vectors(tokens: Sequence[Any], size: int, part: slice) -> dict[int, Any]:
    """The vectors of the texts of some batches."""
    out: dict[int, Any] = {}
    with torch.inference_mode():
        for numbers, ids, mask in padded_batches(tokens, size, part):
            h = state["net"](torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
            for i, vector in zip(numbers, means(h, mask), strict=True):
                out[i] = vector
    return out


if __name__ == "__main__":
    serve_vectors("torch", setup, vectors)
