"""Models written in `max.nn.module_v3`, with the parameter names of transformers, torchvision and torch."""

from __future__ import annotations

import math

from max.experimental import Tensor, random
from max.experimental import functional as F
from max.graph.type import FilterLayout
from max.nn.module_v3 import Embedding, LayerNorm, Linear, Module, Sequential, module_dataclass


@module_dataclass
class Conv1D(Module):
    """The linear layer of GPT-2 in transformers, with a weight ``[inputs, outputs]``."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def conv1d(inputs: int, outputs: int) -> Conv1D:
    return Conv1D(random.normal([inputs, outputs]), random.normal([outputs]))


class Attention(Module):
    def __init__(self, dim: int, heads: int) -> None:
        self.heads = heads
        self.c_attn, self.c_proj = conv1d(dim, 3 * dim), conv1d(dim, dim)

    def __call__(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        tokens, dim = x.shape
        q, k, v = [
            part.reshape((tokens, self.heads, int(dim) // self.heads)).permute([1, 0, 2])
            for part in F.split(self.c_attn(x), [int(dim)] * 3, 1)
        ]
        if past is not None:
            k, v = F.concat([past[0], k], axis=1), F.concat([past[1], v], axis=1)
        scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(int(dim) // self.heads))
        if past is None:
            causal = F.band_part(
                F.broadcast_to(Tensor.full((), -1e9), [tokens, tokens]), None, 0, exclude=True
            )
            scores = scores + causal
        mixed = (F.softmax(scores) @ v).permute([1, 0, 2]).reshape((tokens, dim))
        return self.c_proj(mixed), (k, v)


class MLP(Module):
    def __init__(self, dim: int) -> None:
        self.c_fc, self.c_proj = conv1d(dim, 4 * dim), conv1d(4 * dim, dim)

    def __call__(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), "tanh"))


class Block(Module):
    def __init__(self, dim: int, heads: int) -> None:
        self.ln_1, self.ln_2 = LayerNorm(dim), LayerNorm(dim)
        self.attn, self.mlp = Attention(dim, heads), MLP(dim)

    def __call__(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mixed, present = self.attn(self.ln_1(x), past)
        x = x + mixed
        return x + self.mlp(self.ln_2(x)), present


class Blocks(Sequential):
    """Blocks with a cache."""


class GPT2(Module):
    """GPT-2 of one sequence: tokens to logits, and keys and values of each layer."""

    def __init__(self, vocab: int, positions: int, dim: int, heads: int, layers: int) -> None:
        self.wte, self.wpe = Embedding(vocab, dim=dim), Embedding(positions, dim=dim)
        self.h = Blocks(*[Block(dim, heads) for _ in range(layers)])
        self.ln_f = LayerNorm(dim)

    def __call__(
        self, tokens: Tensor, positions: Tensor, past: list[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x = self.wte(tokens) + self.wpe(positions)
        present = []
        for index, block in enumerate(self.h.modules):
            x, cache = block(x, None if past is None else past[index])
            present.append(cache)
        return self.ln_f(x) @ self.wte.weight.T, present


@module_dataclass
class Conv2d(Module):
    weight: Tensor
    stride: int = 1
    padding: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        pads = (self.padding,) * 4
        return F.conv2d(
            x, self.weight, (self.stride,) * 2, padding=pads, filter_layout=FilterLayout.FCRS
        )


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> Conv2d:
    return Conv2d(random.normal([outputs, inputs, size, size]), stride, size // 2)


@module_dataclass
class BatchNorm(Module):
    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        scale = self.weight * F.rsqrt(self.running_var + 1e-5)
        return x * scale + (self.bias - self.running_mean * scale)


def norm(channels: int) -> BatchNorm:
    return BatchNorm(*[Tensor.ones([channels]) for _ in range(4)])


class BasicBlock(Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        self.conv1, self.bn1 = conv(inputs, outputs, 3, stride), norm(outputs)
        self.conv2, self.bn2 = conv(outputs, outputs, 3), norm(outputs)
        if stride != 1 or inputs != outputs:
            self.downsample = Sequential(conv(inputs, outputs, 1, stride), norm(outputs))

    def __call__(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (self.downsample(x) if hasattr(self, "downsample") else x))


class ResNet18(Module):
    """ResNet-18 with torchvision's names, on images of layout NHWC."""

    def __init__(self, classes: int) -> None:
        self.conv1, self.bn1 = conv(3, 64, 7, 2), norm(64)
        sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        for index, (inputs, outputs, stride) in enumerate(sizes, 1):
            setattr(
                self,
                f"layer{index}",
                Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1)),
            )
        self.fc = Linear(512, classes)

    def __call__(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(x, (3, 3), 2, 1, 1)
        for index in range(1, 5):
            x = getattr(self, f"layer{index}")(x)
        return self.fc(F.squeeze(F.squeeze(F.mean(F.mean(x, 1), 2), 2), 1))


class LSTM(Module):
    """torch.nn.LSTM of one layer and no batch: (time, input) to (time, hidden)."""

    def __init__(self, inputs: int, hidden: int) -> None:
        self.hidden = hidden
        self.weight_ih_l0, self.weight_hh_l0 = (
            random.normal([4 * hidden, inputs]),
            random.normal([4 * hidden, hidden]),
        )
        self.bias_ih_l0, self.bias_hh_l0 = random.normal([4 * hidden]), random.normal([4 * hidden])

    def __call__(self, x: Tensor) -> Tensor:
        h, c = Tensor.zeros([1, self.hidden]), Tensor.zeros([1, self.hidden])
        states = []
        for step in range(int(x.shape[0])):
            gates = (
                x[step : step + 1] @ self.weight_ih_l0.T
                + self.bias_ih_l0
                + h @ self.weight_hh_l0.T
                + self.bias_hh_l0
            )
            i, f, g, o = F.chunk(gates, 4, axis=1)
            c = F.sigmoid(f) * c + F.sigmoid(i) * F.tanh(g)
            h = F.sigmoid(o) * F.tanh(c)
            states.append(h)
        return F.concat(states, axis=0)


class UNet(Module):
    """A small U-Net of a diffusion model: noisy image and time to noise."""

    def __init__(self, channels: int) -> None:
        self.time = Sequential(Linear(channels, channels), Linear(channels, channels))
        self.enter, self.down = conv(1, channels, 3), conv(channels, channels, 3, 2)
        self.middle, self.leave = conv(channels, channels, 3), conv(2 * channels, 1, 3)

    def __call__(self, x: Tensor, time: Tensor) -> Tensor:
        high = F.silu(self.enter(x)) + self.time(time)
        low = F.silu(self.middle(F.silu(self.down(high))))
        batch, height, width, channels = low.shape
        grown = F.broadcast_to(
            low.reshape((batch, height, 1, width, 1, channels)),
            [batch, height, 2, width, 2, channels],
        )
        return self.leave(
            F.concat([high, grown.reshape((batch, height * 2, width * 2, channels))], axis=3)
        )
