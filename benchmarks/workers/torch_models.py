"""BERT-base of transformers and ResNet-50 in torch, eager and compiled; makes the files that other engines read."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._inductor import config
from torch.nn import functional as f
from transformers import BertConfig, BertModel
from transformers.utils.logging import disable_progress_bar

from benchmarks.encoders import (
    BERT,
    STEM,
    Bottleneck,
    Convolution,
    bottlenecks,
    inputs_of,
    resnet_weights,
)
from benchmarks.runner import serve
from benchmarks.timing import median_time

state: dict[str, Any] = {}


class Encoder(nn.Module):
    """Token ids to the last hidden state."""

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bert(x).last_hidden_state


class ResNet(nn.Module):
    """Images ``[N, C, H, W]`` to the scores of the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {
                name.replace(".", "_"): nn.Parameter(torch.from_numpy(w), False)
                for name, w in resnet_weights().items()
            }
        )

    def convolve(self, x: torch.Tensor, c: Convolution) -> torch.Tensor:
        weight, bias = self.named(c.name)
        return f.conv2d(x, weight, bias, c.stride, c.size // 2)

    def named(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        stem = name.replace(".", "_")
        return self.weights[f"{stem}_weight"], self.weights[f"{stem}_bias"]

    def block(self, x: torch.Tensor, b: Bottleneck) -> torch.Tensor:
        first, second, third = b.convolutions
        y = f.relu(self.convolve(x, first))
        y = self.convolve(f.relu(self.convolve(y, second)), third)
        return f.relu(y + (x if b.shortcut is None else self.convolve(x, b.shortcut)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = f.max_pool2d(f.relu(self.convolve(x, STEM)), 3, 2, 1)
        for b in bottlenecks():
            x = self.block(x, b)
        return f.linear(x.mean((2, 3)), *self.named("classifier"))


def network(model: str, folder: Path, attention: str = "sdpa") -> nn.Module:
    """The model in float32; BERT's checkpoint is written where it is not there."""
    if model == "resnet-50":
        return ResNet().eval()
    target = folder / model
    if not (target / "model.safetensors").exists():
        torch.manual_seed(0)
        BertModel(BertConfig(**BERT), add_pooling_layer=False).save_pretrained(target)
    options = {"add_pooling_layer": False, "attn_implementation": attention}
    return Encoder(BertModel.from_pretrained(target, **options)).eval()


def export(model: str, folder: Path) -> None:
    """Write the model as ONNX with a batch size that is open; the exporter's packages are the peer's.

    Attention is exported as products and a softmax: as one op of torch it would become a few per cent slower ones.
    """
    target = folder / f"{model}.onnx"
    if not target.exists():
        aside = target.with_suffix(".part.onnx")
        torch.onnx.export(
            network(model, folder, "eager"),
            (torch.from_numpy(inputs_of(model, 2)),),
            aside,
            input_names=["x"],
            dynamic_shapes={"x": {0: "batch"}},
            external_data=False,
            verbose=False,
        )
        aside.rename(target)


def setup(model: str, dtype: str, folder: str, packages: str) -> dict[str, float]:
    """Load the model; ``packages`` are where onnx and onnxscript are, empty for no ONNX file."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    disable_progress_bar()
    where = Path(folder)
    where.mkdir(exist_ok=True)
    if packages:
        sys.path.append(packages)
        export(model, where)
    config.freezing = True
    state["model"], state["folder"], state["kind"] = model, where, getattr(torch, dtype)
    net = network(model, where).to(state["kind"])
    if model == "resnet-50":
        net = net.to(memory_format=torch.channels_last)
    state["net"] = net
    return {}


def _input(batch: int, kind: torch.dtype) -> torch.Tensor:
    x = torch.from_numpy(inputs_of(state["model"], batch))
    return x.to(kind, memory_format=torch.channels_last) if x.is_floating_point() else x


def reference(batch: int, path: str) -> dict[str, float]:
    """Write what the model in float32 gives."""
    with torch.inference_mode():
        y = network(state["model"], state["folder"])(_input(batch, torch.float32))
    np.save(path, y.numpy())
    return {}


def make(batch: int, path: str) -> dict[str, float]:
    """Compile for the batch size; writes both results."""
    torch._dynamo.reset()
    state["input"] = _input(batch, state["kind"])
    state["calls"] = {
        "eager": state["net"],
        "compiled": torch.compile(state["net"], dynamic=False),
    }
    with torch.no_grad():
        results = [call(state["input"]) for call in state["calls"].values()]
    np.save(path, torch.stack(results).float().numpy())
    return {}


def run(seconds: float) -> dict[str, float]:
    """Seconds for a batch, eager and compiled."""
    with torch.no_grad():
        return {
            name: median_time(lambda call=call: call(state["input"]), seconds)
            for name, call in state["calls"].items()
        }


if __name__ == "__main__":
    serve({"setup": setup, "reference": reference, "make": make, "run": run})
