"""Programs on eager tensors, in the forms of 25.7 and of 26.x, and custom ops of PyTorch with parameters."""

from __future__ import annotations

import functools
import operator
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from max import driver
from max.driver import CPU
from max.dtype import DType
from max.experimental import functional as F
from max.experimental.nn import Embedding, LayerNorm, Linear, Module, ModuleList
from max.experimental.random import gaussian
from max.experimental.tensor import Tensor, default_dtype
from max.experimental.torch import CustomOpLibrary, max_dtype_to_torch
from max.experimental.torch.torch import max_device_ref, torch_dtype_to_max
from max.graph import DeviceRef, Dim, StaticDim, TensorType, ops
from max.graph import type as graph_type
from max.nn.attention import MHAMaskVariant
from max.nn.kernels import flash_attention_gpu

rng = np.random.default_rng(11)


class Attention(Module[[Tensor], Tensor]):
    def __init__(self, width: int, heads: int) -> None:
        self.heads, self.size = heads, width // heads
        self.c_attn = Linear(width, 3 * width)
        self.c_proj = Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = F.split(self.c_attn(x), [width, width, width], axis=-1)
        q, k, v = (
            F.permute(F.reshape(part, [batch, length, self.heads, self.size]), [0, 2, 1, 3])
            for part in parts
        )
        scores = (q @ F.transpose(k, -1, -2)) / float(self.size) ** 0.5
        everything = F.broadcast_to(
            F.constant(True, dtype=DType.bool, device=x.device), [length, length]
        )
        past = F.band_part(everything, num_lower=None, num_upper=0)
        lowest = F.constant(float("-inf"), dtype=scores.dtype, device=scores.device)
        heads = F.softmax(F.where(past, scores, lowest)) @ v
        return self.c_proj(F.reshape(F.permute(heads, [0, 2, 1, 3]), [batch, length, width]))


class Block(Module[[Tensor], Tensor]):
    def __init__(self, width: int, heads: int) -> None:
        self.ln_1 = LayerNorm(width, eps=1e-5)
        self.attn = Attention(width, heads)
        self.ln_2 = LayerNorm(width, eps=1e-5)
        self.c_fc = Linear(width, 4 * width)
        self.c_proj = Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(Module[[Tensor], Tensor]):
    def __init__(
        self, vocabulary: int, positions: int, width: int, heads: int, layers: int
    ) -> None:
        self.wte = Embedding(vocabulary, dim=width)
        self.wpe = Embedding(positions, dim=width)
        self.h = ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = LayerNorm(width, eps=1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        places = F.arange(0, tokens.shape[1], 1, dtype=DType.int64, device=tokens.device)
        x = self.wte(tokens) + self.wpe(places)
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T


def language_model() -> None:
    """GPT-2 in generic modules with `forward`, made lazily, loaded from arrays, and run eagerly and compiled."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=61,
        n_positions=32,
        n_embd=24,
        n_head=4,
        n_layer=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    reference = GPT2LMHeadModel(config).eval()
    weights = {}
    for name, value in reference.state_dict().items():
        if name != "lm_head.weight":
            array = value.numpy()
            if array.ndim == 2 and name.split(".")[-2] in ("c_attn", "c_proj", "c_fc"):
                array = np.ascontiguousarray(array.T)
            weights[name.removeprefix("transformer.").replace(".mlp.", ".")] = array
    with F.lazy(), default_dtype(DType.float32):
        model = GPT2(61, 32, 24, 4, 2)
    model.load_state_dict(weights)
    model.to(CPU())
    compiled = model.compile(TensorType(DType.int64, [1, "length"], device=model.device))
    for length in (1, 6):
        tokens = rng.integers(0, 61, (1, length))
        with torch.no_grad():
            want = reference(torch.from_numpy(tokens)).logits.numpy()
        for run in (model, compiled):
            logits = run(Tensor.from_dlpack(tokens).to(model.device))
            np.testing.assert_allclose(np.from_dlpack(logits.to(CPU())), want, rtol=1e-3, atol=1e-4)


# a backend of torch: each ATen op as a function of eager tensors


def to_max(x: torch.Tensor) -> Tensor:
    return Tensor(storage=driver.Tensor.from_dlpack(x.detach()))


def to_torch(x: Tensor) -> torch.Tensor:
    return torch.from_dlpack(x.to(CPU()))


reductions: dict[str, Any] = {
    "mean": F.functional(ops.mean),
    "sum": F.functional(ops.sum),
    "amax": F.functional(ops.reduction.max),
    "amin": F.functional(ops.reduction.min),
    "argmax": F.functional(ops.argmax),
    "argmin": F.functional(ops.argmin),
}
attention = F.functional(flash_attention_gpu)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    settings: dict[str, Any] = {
        "stride": (2, 1),
        "padding": (1, 1, 0, 0),
        "dilation": (1, 1),
        "input_layout": graph_type.ConvInputLayout.NHWC,
        "filter_layout": graph_type.FilterLayout.RSCF,
    }
    image, kernel = x.permute([0, 2, 3, 1]), weight.permute([2, 3, 1, 0])
    if transposed:
        y = F.conv2d_transpose(image, kernel, bias=None, output_paddings=(1, 0), **settings)
    else:
        y = F.conv2d(image, kernel, bias=bias, groups=2, **settings)
    return y.permute([0, 3, 1, 2])


def select(x: Tensor, axis: int, index: int) -> Tensor:
    indices: list[Any] = [slice(None)] * len(x.shape)
    indices[axis] = index
    return x[indices]


def select_scatter(x: Tensor, source: Tensor, axis: int, index: int) -> Tensor:
    size = x.shape[axis]
    assert isinstance(size, StaticDim)
    places = F.arange(0, size, 1, dtype=DType.int64, device=x.device)
    mask = F.equal(places, F.constant(index + size.dim, dtype=DType.int64, device=x.device))
    shape: list[Dim] = [StaticDim(1)] * len(x.shape)
    shape[axis] = size
    mask = F.broadcast_to(F.reshape(mask, shape), x.shape)
    return F.where(mask, F.broadcast_to(F.unsqueeze(source, axis), x.shape), x)


def searchsorted(boundaries: Tensor, values: Tensor) -> Tensor:
    smaller = F.logical_not(
        F.greater_equal(F.unsqueeze(boundaries, 0), F.unsqueeze(values, axis=-1))
    )
    counts = reductions["sum"](F.cast(smaller, dtype=DType.int32), axis=-1)
    return F.squeeze(F.cast(counts, dtype=DType.int64), axis=-1)


def torch_backend() -> None:
    """What a compiler backend of PyTorch makes of ATen ops."""
    x = torch.from_numpy(rng.standard_normal((2, 6, 5, 7)).astype(np.float32))
    assert max_dtype_to_torch(DType.bfloat16) is torch.bfloat16
    assert torch_dtype_to_max(torch.promote_types(torch.int32, torch.int64)) == DType.int64
    assert DType.from_torch(to_max(x).dtype.to_torch()) == DType.float32
    assert max_device_ref(x.device) == DeviceRef.CPU()

    def check(got: Tensor, want: torch.Tensor) -> None:
        torch.testing.assert_close(to_torch(got), want, rtol=1e-4, atol=1e-5)

    for name, reduce in reductions.items():
        check(reduce(to_max(x), axis=2), getattr(torch, name)(x, dim=2, keepdim=True))
    other = torch.from_numpy(rng.random((5, 7)).astype(np.float32)) + 0.5
    for name in (
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "gt",
        "ge",
        "lt",
        "le",
        "eq",
        "ne",
        "isub",
        "imul",
    ):
        function = getattr(operator, name)
        check(function(to_max(x), to_max(other)), function(x.clone(), other))
        check(function(to_max(x), 2), function(x.clone(), 2))
    for name in ("and_", "or_", "xor"):
        function = getattr(operator, name)
        check(function(to_max(x > 0), to_max(other > 1)), function(x > 0, other > 1))
    weight, bias = torch.randn(4, 3, 3, 2), torch.randn(4)
    check(
        convolution(to_max(x), to_max(weight), to_max(bias), transposed=False),
        torch.nn.functional.conv2d(x, weight, bias, (2, 1), (1, 0), groups=2),
    )
    weight = torch.randn(6, 4, 3, 2)
    check(
        convolution(to_max(x), to_max(weight), None, transposed=True),
        torch.nn.functional.conv_transpose2d(x, weight, None, (2, 1), (1, 0), (1, 0)),
    )
    check(select(to_max(x), 1, -1), x.select(1, -1))
    source = torch.randn(2, 5, 7)
    check(select_scatter(to_max(x), to_max(source), 1, -2), x.select_scatter(source, 1, -2))
    check(to_max(x)[:, 1:5:2, ..., -1], x[:, 1:5:2, :, -1])
    boundaries, values = torch.tensor([1.0, 2.0, 2.0, 5.0]), torch.tensor([0.0, 2.0, 9.0])
    check(searchsorted(to_max(boundaries), to_max(values)), torch.searchsorted(boundaries, values))
    index = torch.argsort(torch.rand(2, 6, 5, 7), 1)[:, :3]
    updates = torch.randn(2, 3, 5, 7)
    check(
        F.scatter(to_max(x), to_max(updates), to_max(index), axis=1), x.scatter(1, index, updates)
    )
    check(F.tile(to_max(other), [2, 3]), other.repeat(2, 3))
    pool = F.avg_pool2d(
        to_max(x).permute([0, 2, 3, 1]), kernel_size=(2, 3), stride=(2, 3), padding=(0, 0), ceil_mode=False,
        count_boundary=True
    )  # fmt: skip
    check(pool.permute([0, 3, 1, 2]), torch.nn.functional.avg_pool2d(x, (2, 3)))
    q = torch.randn(1, 5, 2, 8)
    heads = q.permute(0, 2, 1, 3)
    want = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    causal = MHAMaskVariant.CAUSAL_MASK
    got = attention(to_max(q), to_max(q), to_max(q), mask_variant=causal, scale=8**-0.5)
    check(got, want.permute(0, 2, 1, 3))
    noise = gaussian(x.shape, mean=1.0, std=2.0, dtype=DType.float32, device=CPU())
    assert tuple(noise.shape) == tuple(x.shape)
    assert Tensor.full((1,), 3, dtype=DType.int64).item() == 3


CONVOLUTION = """
from max import kernel as k


@k.register("short_convolution")
def short_convolution(
    y: k.Output[k.f32, 3], states: k.Output[k.f32, 3], x: k.Input[k.f32, 3], weight: k.Input[k.f32, 2],
    bias: k.Input[k.f32, 1], ctx: k.Context, *, width: int, has_bias: bool, activation: str,
):
    for row in ctx.parallel(x.shape[0] * x.shape[1]):
        batch, channel = row // x.shape[1], row % x.shape[1]
        for t in range(x.shape[2]):
            total = k.f32(0)
            if has_bias:
                total += bias[channel]
            for tap in k.static_range(width):
                if t + tap >= width - 1:
                    total += x[batch, channel, t + tap - (width - 1)] * weight[channel, tap]
            if activation == "silu":
                total = total / (1.0 + k.exp(-total))
            y[batch, channel, t] = total
        for tap in k.static_range(width - 1):
            place = x.shape[2] + tap - (width - 1)
            states[batch, channel, tap] = x[batch, channel, place] if place >= 0 else k.f32(0)
"""


def parameterized_operation() -> None:
    """A library of kernels for torch: a variant for each width, bias and activation; two results."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "__init__.py").write_text(CONVOLUTION)
        library = CustomOpLibrary(Path(folder))

        @functools.cache
        def operation(width: int, has_bias: bool, activation: str) -> Any:
            return library.short_convolution[
                {"width": width, "has_bias": has_bias, "activation": activation}
            ]

        def convolve(x, weight, bias=None, activation=None):
            y = torch.empty_like(x)
            states = torch.empty(*x.shape[:2], weight.shape[1] - 1)
            given = torch.zeros(1) if bias is None else bias
            variant = operation(weight.shape[1], bias is not None, activation or "none")
            variant(y, states, x, weight, given)
            return y, states

        for bias, activation in ((torch.randn(3), "silu"), (None, None)):
            x, weight = torch.randn(2, 3, 6), torch.randn(3, 4)
            y, states = convolve(x, weight, bias, activation)
            want = torch.nn.functional.conv1d(
                torch.nn.functional.pad(x, (3, 0)), weight[:, None], bias, groups=3
            )
            want = torch.nn.functional.silu(want) if activation else want
            torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(states, x[:, :, -3:])


PROGRAMS = [language_model, torch_backend, parameterized_operation]
