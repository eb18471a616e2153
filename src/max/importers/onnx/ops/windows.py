"""Attributes of ops that move a window over spatial axes: convolutions and pools."""

from __future__ import annotations

from collections.abc import Sequence

from max.graph import Dim
from max.importers.errors import Unsupported
from max.importers.functions.convolutions import Pairs
from max.importers.node import Node

__all__ = ["paddings", "steps"]


def paddings(
    node: Node,
    spatial: Sequence[Dim],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Pairs:
    """The padding before and after each spatial axis."""
    n = len(kernel)
    auto = node.attr("auto_pad", "NOTSET")
    if auto in ("NOTSET", ""):
        pads = node.attr("pads") or [0] * (2 * n)
        if len(pads) != 2 * n:
            raise Unsupported(f"has {len(pads)} pads for {n} spatial axes")
        return [(pads[i], pads[i + n]) for i in range(n)]
    if auto == "VALID":
        return [(0, 0)] * n
    if auto not in ("SAME_UPPER", "SAME_LOWER"):
        raise Unsupported(f"auto_pad is {auto!r}")
    pairs: Pairs = []
    for dim, taps, stride, dilation in zip(spatial, kernel, strides, dilations, strict=True):
        window = dilation * (taps - 1) + 1
        if stride == 1:
            total = window - 1
        else:
            size = node.static(dim)
            total = max((-(-size // stride) - 1) * stride + window - size, 0)
        low = total // 2 if auto == "SAME_UPPER" else total - total // 2
        pairs.append((low, total - low))
    return pairs


def steps(node: Node, name: str, n: int) -> list[int]:
    """Strides or dilations."""
    values = list(node.attr(name) or [1] * n)
    if len(values) != n or min(values, default=1) < 1:
        raise Unsupported(f"{name} is {values} for {n} spatial axes")
    return values
