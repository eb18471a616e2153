"""Networks of torch that find and outline objects, and hear: YOLO v8's table of layers, DETR, DeepLab v3, wav2vec 2; random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn


def with_statistics(net: nn.Module) -> nn.Module:
    """Gives batch norms, which are the identity in fresh networks, statistics as of a trained one."""
    rng = np.random.default_rng(0)
    for module in net.modules():
        mean, var = getattr(module, "running_mean", None), getattr(module, "running_var", None)
        if isinstance(mean, torch.Tensor) and isinstance(var, torch.Tensor):
            mean.copy_(mean.new_tensor(rng.uniform(-0.1, 0.1, mean.shape)))
            var.copy_(var.new_tensor(rng.uniform(0.7, 1.4, var.shape)))
    return net


class _Conv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, size: int = 1, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False),
            nn.BatchNorm2d(outputs, eps=1e-3),
            nn.SiLU(),
        )


class _Residual(nn.Module):
    def __init__(self, size: int, add: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(_Conv(size, size, 3), _Conv(size, size, 3))
        self.add = add

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) if self.add else self.inner(x)


class _Stage(nn.Module):
    """A partial stage: one half passes, the other goes through blocks, and all that they made is joined."""

    def __init__(self, inputs: int, outputs: int, blocks: int, add: bool) -> None:
        super().__init__()
        half = outputs // 2
        self.split = _Conv(inputs, outputs)
        self.blocks = nn.ModuleList([_Residual(half, add) for _ in range(blocks)])
        self.join = _Conv((2 + blocks) * half, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = list(self.split(x).chunk(2, 1))
        for block in self.blocks:
            made.append(block(made[-1]))
        return self.join(torch.cat(made, 1))


class _Pyramid(nn.Module):
    """Maxima of 5, 9 and 13 pixels, as three pools one after the other."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.narrow, self.join = _Conv(size, size // 2), _Conv(2 * size, size)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [self.narrow(x)]
        for _ in range(3):
            made.append(self.pool(made[-1]))
        return self.join(torch.cat(made, 1))


class Yolo(nn.Module):
    """The table of YOLO v8: five halvings, a pyramid up and down, heads of boxes and classes at three scales.

    Args:
        width: The part of the channels that the size has: 0.25 is n, 0.5 s.
        image: The height and width of the images, for the centers of cells.
    """

    BINS, CLASSES, STRIDES = 16, 80, (8, 16, 32)
    centers: torch.Tensor
    strides: torch.Tensor
    bins: torch.Tensor

    def __init__(self, width: float, image: int) -> None:
        super().__init__()
        a, b, c, d, e = (int(size * width) for size in (64, 128, 256, 512, 1024))
        self.stem = nn.Sequential(_Conv(3, a, 3, 2), _Conv(a, b, 3, 2), _Stage(b, b, 1, True))
        self.third = nn.Sequential(_Conv(b, c, 3, 2), _Stage(c, c, 2, True))
        self.fourth = nn.Sequential(_Conv(c, d, 3, 2), _Stage(d, d, 2, True))
        self.fifth = nn.Sequential(_Conv(d, e, 3, 2), _Stage(e, e, 1, True), _Pyramid(e))
        self.wider = nn.Upsample(scale_factor=2)
        self.up = nn.ModuleList([_Stage(e + d, d, 1, False), _Stage(d + c, c, 1, False)])
        self.halve = nn.ModuleList([_Conv(c, c, 3, 2), _Conv(d, d, 3, 2)])
        self.down = nn.ModuleList([_Stage(c + d, d, 1, False), _Stage(d + e, e, 1, False)])
        boxes, classes = max(16, c // 4, 4 * self.BINS), max(c, min(self.CLASSES, 100))
        self.boxes = nn.ModuleList([self._head(n, boxes, 4 * self.BINS) for n in (c, d, e)])
        self.classes = nn.ModuleList([self._head(n, classes, self.CLASSES) for n in (c, d, e)])
        cells = [torch.arange(image // stride) + 0.5 for stride in self.STRIDES]
        grids = [torch.stack(torch.meshgrid(n, n, indexing="xy")).flatten(1) for n in cells]
        self.register_buffer("centers", torch.cat(grids, 1))
        sizes = [
            torch.full((1, g.shape[1]), float(n)) for n, g in zip(self.STRIDES, grids, strict=True)
        ]
        self.register_buffer("strides", torch.cat(sizes, 1))
        self.register_buffer("bins", torch.arange(self.BINS, dtype=torch.float32))

    @staticmethod
    def _head(inputs: int, inner: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            _Conv(inputs, inner, 3), _Conv(inner, inner, 3), nn.Conv2d(inner, outputs, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Boxes as centers and sizes, then a probability a class: [batch, 4 + classes, cells]."""
        third = self.third(self.stem(x))
        fourth = self.fourth(third)
        fifth = self.fifth(fourth)
        up = self.up[0](torch.cat([self.wider(fifth), fourth], 1))
        maps = [self.up[1](torch.cat([self.wider(up), third], 1))]
        for halve, stage, skip in zip(self.halve, self.down, (up, fifth), strict=True):
            maps.append(stage(torch.cat([halve(maps[-1]), skip], 1)))
        boxes = torch.cat([h(m).flatten(2) for h, m in zip(self.boxes, maps, strict=True)], 2)
        classes = torch.cat([h(m).flatten(2) for h, m in zip(self.classes, maps, strict=True)], 2)
        # a distance is the mean of a distribution over bins
        sides = boxes.unflatten(1, (4, self.BINS)).softmax(2)
        distances = (sides * self.bins[:, None]).sum(2)
        low, high = self.centers - distances[:, :2], self.centers + distances[:, 2:]
        found = torch.cat([(low + high) / 2, high - low], 1) * self.strides
        return torch.cat([found, classes.sigmoid()], 1)


class _Outputs(nn.Module):
    """Runs a model whose result has names, and returns some of them."""

    def __init__(self, inner: nn.Module, *names: str) -> None:
        super().__init__()
        self.inner, self.names = inner, names

    def forward(self, x: torch.Tensor) -> Any:
        result = self.inner(x)
        found = [result[name] for name in self.names]
        return found[0] if len(found) == 1 else tuple(found)


def yolo(width: float) -> nn.Module:
    """YOLO v8 for images of 640 × 640."""
    return with_statistics(Yolo(width, 640))


def deeplab() -> nn.Module:
    """DeepLab v3 with ResNet-50: dilated convolutions, and 21 classes a pixel."""
    from torchvision.models import segmentation

    net = segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None)
    return _Outputs(with_statistics(net), "out")


def detr() -> nn.Module:
    """DETR with ResNet-50: six layers of an encoder over the image, six of a decoder over 100 queries."""
    import transformers

    backbone = transformers.ResNetConfig(out_features=["stage4"])
    config = transformers.DetrConfig(
        backbone_config=backbone, num_labels=91, attn_implementation="eager"
    )
    net = transformers.DetrForObjectDetection(config)
    return _Outputs(with_statistics(net), "logits", "pred_boxes")


def wav2vec() -> nn.Module:
    """wav2vec 2 base: seven convolutions over samples, then twelve layers."""
    import transformers

    config = transformers.Wav2Vec2Config(attn_implementation="eager")
    return _Outputs(transformers.Wav2Vec2Model(config), "last_hidden_state")
