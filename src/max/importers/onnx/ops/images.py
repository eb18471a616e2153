"""Resizing and sampling of images, and detection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.graph.dim import StaticDim
from max.importers.errors import MissingContents, Unsupported
from max.importers.functions.sampling import Sampler
from max.importers.node import Node
from max.importers.onnx.table import op

Array = npt.NDArray[Any]


@op("Upsample")
def upsample(node: Node) -> TensorValue:
    x = node.tensor(0)
    if node.version < 9:
        scales = node.attr("scales") or [
            1.0,
            1.0,
            node.attr("height_scale"),
            node.attr("width_scale"),
        ]
    else:
        scales = node.elements(1).tolist()
    mode = str(node.attr("mode", "nearest")).removeprefix("bi")
    plan = _Plan(mode, "asymmetric", "floor")
    sizes = [
        math.floor(float(n) * scale) for n, scale in zip(node.static_shape(0), scales, strict=True)
    ]
    return plan.apply(x, list(range(x.rank)), sizes, scales)


@op("Resize")
def resize(node: Node) -> TensorValue:
    x = node.tensor(0)
    if node.version < 11:
        scales = node.elements(1).astype(np.float64).tolist()
        plan = _Plan(node.attr("mode", "nearest"), "asymmetric", "floor")
        sizes = [
            math.floor(n * scale) for n, scale in zip(node.static_shape(0), scales, strict=True)
        ]
        return plan.apply(x, list(range(x.rank)), sizes, scales)
    axes = node.axes(node.attr("axes") or list(range(x.rank)), x.rank)
    plan = _Plan(
        node.attr("mode", "nearest"),
        node.attr("coordinate_transformation_mode", "half_pixel"),
        node.attr("nearest_mode", "round_prefer_floor"),
        node.attr("cubic_coeff_a", -0.75),
        bool(node.attr("exclude_outside", 0)),
        bool(node.attr("antialias", 0)),
        node.attr("extrapolation_value", 0.0),
    )
    if node.has(1) and plan.transform == "tf_crop_and_resize":
        roi = node.elements(1).astype(np.float64).tolist()
        plan.crops = [
            (roi[i], roi[i + len(axes)]) for i in range(len(axes))
        ]  # all starts, then all ends
    if node.has(3) and any(dim != 0 for dim in node.value(3).shape):
        sizes, scales = _by_size(node, x, axes)
    else:
        scales = [float(scale) for scale in node.elements(2).reshape(-1)]
        sizes = []
        for axis, scale in zip(axes, scales, strict=True):
            dim = x.shape[axis]
            # a whole multiple of a size keeps its symbol
            if scale == int(scale) and scale >= 1:
                sizes.append(dim * int(scale))
            else:
                # 1e-9: a product that should be whole may lie just below
                sizes.append(math.floor(node.static(dim) * scale + 1e-9))
    if any(isinstance(size, Dim) and not isinstance(size, StaticDim) for size in sizes):
        whole = list(x.shape)
        for axis, size in zip(axes, sizes, strict=True):
            whole[axis] = Dim(size)
        # else the positions must be computed here, from sizes as numbers
        if (result := plan.symbolic(x, whole)) is not None:
            return result
        sizes = [node.static(Dim(size)) for size in sizes]
    return plan.apply(x, axes, sizes, scales)


def _by_size(node: Node, x: TensorValue, axes: Sequence[int]) -> tuple[list[Any], list[float]]:
    """Sizes and scales where the sizes are given. With symbols among them the sizes alone determine the result."""
    wanted = node.sizes(3)
    policy = node.attr("keep_aspect_ratio_policy", "stretch")
    is_static = all(
        isinstance(dim, StaticDim) for dim in (*wanted, *(x.shape[axis] for axis in axes))
    )
    if policy == "stretch" and not is_static:
        return list(wanted), [0.0] * len(axes)
    if not all(isinstance(new, StaticDim) for new in wanted):
        raise MissingContents(node.source.inputs[3], "the elements")
    old = [node.static(x.shape[axis]) for axis in axes]
    ratios = [int(new) / size for new, size in zip(wanted, old, strict=True)]
    if policy == "stretch":
        return [int(new) for new in wanted], ratios
    scale = (min if policy == "not_larger" else max)(ratios)
    # one scale for all axes, so the sizes that were asked for are bounds only
    return [math.floor(scale * size + 0.5) for size in old], [scale] * len(axes)


class _Plan:
    """How elements of a resized tensor are made of the old ones.

    Args:
        mode: nearest, linear or cubic.
        transform: The coordinate transformation.
        rounding: The rounding of mode nearest.
        a: The coefficient of cubic interpolation.
        exclude: Whether elements outside of the tensor have no weight.
        antialias: Whether weights extend over all elements that a new one covers.
        outside: The value of elements whose position lies outside, for `tf_crop_and_resize`.
    """

    def __init__(
        self,
        mode: str,
        transform: str,
        rounding: str,
        a: float = -0.75,
        exclude: bool = False,
        antialias: bool = False,
        outside: float = 0.0,
    ) -> None:
        if mode not in ("nearest", "linear", "cubic"):
            raise Unsupported(f"the mode is {mode!r}")
        self.mode, self.transform, self.rounding = mode, transform, rounding
        self.a, self.exclude, self.antialias, self.outside = a, exclude, antialias, outside
        self.crops: list[tuple[float, float]] = []

    def symbolic(self, x: TensorValue, sizes: Sequence[Dim]) -> TensorValue | None:
        """The tensor resized to a shape with symbols; None where the graph API has no such transform."""
        transforms = ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")
        if self.transform not in transforms or self.exclude or self.antialias:
            return None
        transform = transforms.index(self.transform)
        if self.mode == "nearest":
            roundings = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
            if self.rounding not in roundings:
                return None
            return ops.resize_nearest(x, sizes, transform, roundings.index(self.rounding))
        if self.mode == "linear" and x.dtype.is_float():
            return ops.resize_linear(x, sizes, transform)
        return None

    def apply(
        self, x: TensorValue, axes: Sequence[int], sizes: Sequence[Any], scales: Sequence[float]
    ) -> TensorValue:
        """The resized tensor."""
        dtype = x.dtype
        wide = x if self.mode == "nearest" or dtype is DType.float64 else ops.cast(x, DType.float32)
        outside: TensorValue | None = None
        # interpolation is separable: one axis after the other
        for index, (axis, size, scale) in enumerate(zip(axes, sizes, scales, strict=True)):
            if wide.shape[axis] == size and scale == 1.0 and not self.crops:
                continue
            old = int(wide.shape[axis])
            places = self._positions(
                old, int(size), scale, index
            )  # of new elements, on the old axis
            wide = self._axis(wide, axis, old, places, scale)
            if self.transform == "tf_crop_and_resize":
                far = (places < 0) | (
                    places > old - 1
                )  # in this mode the crop may lie beyond the image
                shape = [-1 if i == axis else 1 for i in range(x.rank)]
                mask = ops.constant(far.reshape(shape))
                outside = mask if outside is None else ops.logical_or(outside, mask)
        result = wide if wide.dtype is dtype else _back(wide, dtype)
        if outside is not None:
            value = ops.constant(np.array(self.outside, dtype.to_numpy()))
            result = ops.where(outside, value, result)
        return result

    def _positions(self, old: int, new: int, scale: float, index: int) -> Array:
        """The positions of the new elements on the old axis."""
        x = np.arange(new, dtype=np.float64)
        # the size before it was rounded down: scales, not sizes, place elements
        width = scale * old
        match self.transform:
            case "align_corners":
                return np.zeros(new) if width == 1 or new == 1 else x * (old - 1) / (width - 1)
            case "asymmetric":
                return x / scale
            case "tf_crop_and_resize":
                low, high = self.crops[index] if self.crops else (0.0, 1.0)
                if new == 1:
                    return np.full(1, 0.5 * (low + high) * (old - 1))
                return low * (old - 1) + x * (high - low) * (old - 1) / (width - 1)
            case "pytorch_half_pixel":
                return np.full(1, -0.5) if width == 1 or new == 1 else (x + 0.5) / scale - 0.5
            case "half_pixel":
                return (x + 0.5) / scale - 0.5
            case "half_pixel_symmetric":
                # what rounding the size cut off is cut on both sides
                return old / 2 * (1 - new / width) + (x + 0.5) / scale - 0.5
            case _:
                raise Unsupported(f"coordinate_transformation_mode is {self.transform!r}")

    def _axis(
        self, x: TensorValue, axis: int, old: int, places: Array, scale: float
    ) -> TensorValue:
        if self.mode == "nearest":
            index = np.clip(self._round_places(places), 0, old - 1).astype(np.int64)
            return ops.gather(x, ops.constant(index), axis)
        indices, weights = self._weights(places, scale, old)
        total: TensorValue | None = None
        shape = [len(places) if i == axis else 1 for i in range(x.rank)]
        # a sum over taps, each a gather of rows with their weights
        for tap in range(indices.shape[1]):
            weight = weights[:, tap].astype(x.dtype.to_numpy()).reshape(shape)
            part = ops.gather(x, ops.constant(np.ascontiguousarray(indices[:, tap])), axis)
            part = part * ops.constant(weight)
            total = part if total is None else total + part
        assert total is not None
        return total

    def _round_places(self, places: Array) -> Array:
        match self.rounding:
            case "round_prefer_floor" | "":
                return np.ceil(places - 0.5)
            case "round_prefer_ceil":
                return np.floor(places + 0.5)
            case "floor":
                return np.floor(places)
            case "ceil":
                return np.ceil(places)
            case _:
                raise Unsupported(f"nearest_mode is {self.rounding!r}")

    def _weights(self, places: Array, scale: float, old: int) -> tuple[Array, Array]:
        """For each new element the indices of old ones and their weights."""
        base = np.floor(places)
        ratio = (places - base)[:, None]
        reach = 1 if self.mode == "linear" else 2  # neighbors on each side
        # a smaller image: the kernel is as wide as a new element, so that each old one counts
        shrink = min(scale, 1.0) if self.antialias else 1.0
        start = math.floor(-reach / shrink) + 1
        taps = np.arange(start, reach - start + 1 if self.antialias else reach + 1)
        distance = np.abs(taps - ratio) * shrink
        weights = self._kernel(distance)
        indices = (base[:, None] + taps).astype(np.int64)
        if self.exclude:
            weights = np.where((indices < 0) | (indices >= old), 0.0, weights)
        if self.exclude or self.antialias:
            # without some of its taps, or stretched, a kernel no longer sums to 1
            weights = weights / weights.sum(1, keepdims=True)
        # taps outside repeat the border
        return np.clip(indices, 0, old - 1), weights

    def _kernel(self, distance: Array) -> Array:
        if self.mode == "linear":
            return np.clip(1 - distance, 0, 1)
        a, d = self.a, distance
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def _back(x: TensorValue, dtype: DType) -> TensorValue:
    """Interpolated values in the operand's type; integers are rounded down and saturate."""
    return ops.cast(x, dtype)


@op("GridSample")
def grid_sample(node: Node, x: TensorValue, grid: TensorValue) -> TensorValue:
    mode = str(node.attr("mode", "linear")).removeprefix("bi")
    sizes = [node.static(dim) for dim in x.shape[2:]]
    padding = node.attr("padding_mode", "zeros")
    return Sampler(sizes, bool(node.attr("align_corners", 0)), padding).sample(x, grid, mode)


@op("RoiAlign")
def roi_align(node: Node, x: TensorValue, rois: TensorValue, batch: TensorValue) -> TensorValue:
    default = "half_pixel" if node.version >= 16 else "output_half_pixel"
    transform = node.attr("coordinate_transformation_mode", default)
    regions = ops.concat([ops.cast(ops.unsqueeze(batch, 1), rois.dtype), rois], 1)
    y = ops.roi_align(
        ops.permute(x, [0, 2, 3, 1]), regions, node.attr("output_height", 1), node.attr("output_width", 1),
        node.attr("spatial_scale", 1.0), node.attr("sampling_ratio", 0), transform == "half_pixel",
        node.attr("mode", "avg").upper(),
    )  # fmt: skip
    return ops.permute(y, [0, 3, 1, 2])


@op("NonMaxSuppression")
def non_max_suppression(node: Node) -> TensorValue:
    boxes, scores = node.tensor(0), node.tensor(1)
    most: Any = node.tensor(2) if node.has(2) else 0
    overlap: Any = node.tensor(3) if node.has(3) else 0.0
    least: Any = node.tensor(4) if node.has(4) else -math.inf
    if node.attr("center_point_box", 0):
        # to corners, y before x
        center_x, center_y, width, height = (boxes[:, :, i : i + 1] for i in range(4))
        boxes = ops.concat(
            [center_y - height * 0.5, center_x - width * 0.5, center_y + height * 0.5, center_x + width * 0.5], 2
        )  # fmt: skip
    most, overlap, least = (
        ops.reshape(v, []) if isinstance(v, TensorValue) else v for v in (most, overlap, least)
    )
    return ops.non_maximum_suppression(
        boxes, scores, most, overlap, least, node.new_size("selected")
    )
