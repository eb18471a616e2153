"""Fused blocks in torch: eager, and through torch.compile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as f

from benchmarks.blocks import inputs_of
from benchmarks.runner import serve
from benchmarks.timing import median_time

state: dict[str, Any] = {}


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def top_k(logits: torch.Tensor) -> list[torch.Tensor]:
    values, indices = torch.topk(logits, 50)
    return [torch.softmax(values, -1), indices]


def sample(logits: torch.Tensor) -> torch.Tensor:
    values, indices = torch.topk(logits.float() / 0.8, 50)
    return indices.gather(-1, torch.multinomial(torch.softmax(values, -1), 1))


def conv(stride: int, padding: int) -> Callable[..., torch.Tensor]:
    def build(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        # the inputs are [N, H, W, C] and [R, S, C, F]: views in torch's channels-last format
        y = f.conv2d(x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1), b, stride, padding)
        return f.relu(y).permute(0, 2, 3, 1)

    return build


BLOCKS: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, w: f.rms_norm(x, (x.shape[-1],), w, 1e-6),
    "layer_norm": lambda x, w, b: f.layer_norm(x, (x.shape[-1],), w, b, 1e-5),
    "softmax": lambda x: torch.softmax(x, -1),
    "gelu": f.gelu,
    "gelu chain": lambda x, y: f.gelu(x * 1.5 + y, approximate="tanh") * torch.sigmoid(y) - x,
    "swiglu": lambda x, y: f.silu(x) * y,
    "rope": rope,
    "gather": lambda table, ids: f.embedding(ids, table),
    "top 50 of logits": top_k,
    "sampling of the top 50": sample,
    "sum of axis 0": lambda x: x.sum(0),
    "sum of axis 1": lambda x: x.sum(1),
    "sum of axis 2": lambda x: x.sum(2),
    "max of axis 0": lambda x: x.amax(0),
    "max of axis 1": lambda x: x.amax(1),
    "max of axis 2": lambda x: x.amax(2),
    "mean of axis 2": lambda x: x.mean(2),
    "transpose": lambda x: x.t().contiguous(),
    "transpose of the last axes": lambda x: x.transpose(1, 2).contiguous(),
    "transpose of the first axes": lambda x: x.transpose(0, 1).contiguous(),
    "cast": lambda x: x.float() * 2.0,
    "attention": f.scaled_dot_product_attention,
    "causal attention": lambda q, k, v: f.scaled_dot_product_attention(q, k, v, is_causal=True),
    "conv 3x3": conv(1, 1),
    "conv 3x3, stride 2": conv(2, 1),
    "conv 1x1": conv(1, 0),
    "conv 1x1, stride 2": conv(2, 0),
    "conv 7x7, stride 2": conv(2, 3),
}


def make(block: str, shape: Sequence[int], dtype: str) -> dict[str, float]:
    arrays, weights = inputs_of(block, shape)
    kind = getattr(torch, dtype)
    tensors = [torch.from_numpy(a) for a in (*arrays, *weights)]
    state["inputs"] = [t if not t.is_floating_point() else t.to(kind) for t in tensors]
    torch._dynamo.reset()
    state["eager"] = BLOCKS[block]
    state["compiled"] = torch.compile(BLOCKS[block], dynamic=False)
    start = time.perf_counter()
    with torch.inference_mode():
        made = state["compiled"](*state["inputs"])
    first = made[0] if isinstance(made, list) else made
    total = float(first.double().abs().sum())
    return {"compile_s": time.perf_counter() - start, "sum": total}


def run(seconds: float) -> dict[str, float]:
    found: dict[str, float] = {}
    with torch.inference_mode():
        for name in ("eager", "compiled"):
            call = state[name]
            found[name] = median_time(lambda call=call: call(*state["inputs"]), seconds / 2, 5)
    return found


if __name__ == "__main__":
    serve({"setup": lambda: {}, "make": make, "run": run})
