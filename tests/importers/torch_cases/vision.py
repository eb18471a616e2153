"""Cases of torchvision's own ops."""

from __future__ import annotations

import torch

from tests.importers.torch_cases.case import Case, Draw, case
from tests.importers.torchvision_ops import declare

declare()


def boxes(draw: Draw, count: int, size: float = 10) -> torch.Tensor:
    """Boxes: left, top, right, bottom."""
    corner = draw.floats(count, 2, low=0, high=size)
    return torch.cat([corner, corner + draw.floats(count, 2, low=0.5, high=size / 2)], 1)


@case("torchvision.nms.default")
def nms(draw):
    count = draw.choice([0, 1, 7, 40])
    # scores that all differ: torchvision says nothing of the order of equal ones
    scores = torch.from_numpy(draw.rng.permutation(count)).to(torch.float32) - 5
    return Case([boxes(draw, count), scores, draw.choice([0.0, 0.3, 0.5, 1.0])])


@case("torchvision.roi_align.default")
def roi_align(draw):
    x = draw.floats(2, draw.int(1, 3), draw.int(4, 9), draw.int(4, 9))
    count = draw.choice([0, 1, 5])
    rois = torch.cat([draw.ints(count, 1, low=0, high=1).float(), boxes(draw, count, 14) - 2], 1)
    scale, ratio = draw.choice([1.0, 0.5]), draw.choice([-1, 0, 2])
    return Case([x, rois, scale, draw.int(1, 3), draw.int(1, 3), ratio, draw.bool()])


@case("torchvision.deform_conv2d.default")
def deform_conv2d(draw):
    groups, parts = draw.choice([(1, 1), (2, 1), (1, 2), (2, 2)])
    taps = [draw.int(1, 3), draw.int(1, 3)]
    stride, pad, dilation = ([draw.int(low, 2) for _ in range(2)] for low in (1, 0, 1))
    sizes = [draw.int(5, 7), draw.int(5, 7)]
    out = [
        (sizes[i] + 2 * pad[i] - dilation[i] * (taps[i] - 1) - 1) // stride[i] + 1 for i in range(2)
    ]
    count = draw.int(1, 2)
    x, weight = draw.floats(count, 4, *sizes), draw.floats(2, 4 // groups, *taps)
    offset = draw.floats(count, parts * taps[0] * taps[1] * 2, *out)
    use_mask = draw.bool()
    mask = draw.floats(count, parts * taps[0] * taps[1] if use_mask else 0, *out)
    numbers = [*stride, *pad, *dilation, groups, parts, use_mask]
    return Case([x, weight, offset, mask, draw.floats(2), *numbers], rtol=1e-3)


@case("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(draw, name):
    n = 3 if "3d" in name else 2
    count, channels = draw.int(1, 2), draw.int(1, 3)
    x = draw.floats(count, channels, *(draw.int(1, 6) for _ in range(n)))
    grid = draw.floats(count, *(draw.int(1, 5) for _ in range(n)), n, low=-1.5, high=1.5)
    mode = draw.int(0, 1 if n == 3 else 2)
    return Case([x, grid, mode, draw.int(0, 2), draw.bool()], rtol=1e-3)
