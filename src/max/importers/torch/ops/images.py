"""Resizing of images."""

from __future__ import annotations

from typing import Any

from max.graph import Dim, TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.functions.sampling import Sampler
from max.importers.torch.table import Call, op

_ASYMMETRIC, _HALF_PIXEL, _ALIGNED = 2, 0, 1
_FLOOR = 2


def _shape(call: Call, x: TensorValue, size: Any, scales: Any) -> list[Any]:
    """The shape of the result. Torch takes coordinates from the factors: they must be the quotients of the sizes."""
    rest = x.shape[2:]
    if size is None:
        size = [int(call.static(old) * scale) for old, scale in zip(rest, scales, strict=True)]
    for old, new, scale in zip(rest, size, scales or [None] * len(rest), strict=True):
        if scale is not None and call.static(old) * scale != call.static(new):
            raise Unsupported(f"scales {old} elements by {scale}, to {new}")
    return [*x.shape[:2], *(Dim(new) for new in size)]


@op("aten.upsample_bilinear2d.vec", "aten.upsample_linear1d.vec", "aten.upsample_trilinear3d.vec")
def upsample_linear(
    call: Call, x: TensorValue, size: Any, align_corners: bool, scales: Any = None
) -> TensorValue:
    mode = _ALIGNED if align_corners else _HALF_PIXEL
    return ops.resize_linear(x, _shape(call, x, size, scales), mode)


@op("aten.upsample_nearest1d.vec", "aten.upsample_nearest2d.vec", "aten.upsample_nearest3d.vec")
def upsample_nearest(call: Call, x: TensorValue, size: Any, scales: Any = None) -> TensorValue:
    return ops.resize_nearest(x, _shape(call, x, size, scales), _ASYMMETRIC, _FLOOR)


@op("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(
    call: Call,
    x: TensorValue,
    grid: TensorValue,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> TensorValue:
    sizes = [call.static(dim) for dim in x.shape[2:]]
    sampler = Sampler(sizes, align_corners, ("zeros", "border", "reflection")[padding_mode])
    return sampler.sample(x, grid, ("linear", "nearest", "cubic")[interpolation_mode])
