"""Bad arguments of the ops on regions and boxes, and what only a run can find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops

DEVICE = DeviceRef.CPU()
SESSION = InferenceSession(devices=[CPU()])


def run(build: Callable[..., Any], *arrays: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    types = [TensorType(DType.from_numpy(a.dtype), a.shape, DEVICE) for a in arrays]
    graph = Graph("detection", lambda *x: build(*x), types)
    return SESSION.load(graph).execute(*arrays)[0].to_numpy()


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("build", "shapes", "message"),
    [
        (lambda x, r: ops.roi_align(x, r, 2, 2), [(4, 5, 3), (7, 5)], "images .* expected rank 4"),
        (lambda x, r: ops.roi_align(x, r, 2, 2), [(1, 4, 5, 3), (7, 4)], "expected 5 columns"),
        (lambda x, r: ops.roi_align(x, r, 0, 2), [(1, 4, 5, 3), (7, 5)], "1 or more"),
        (lambda x, r: ops.roi_align(x, r, 2, 2, mode="avg"), [(1, 4, 5, 3), (7, 5)], "AVG, MAX"),
        (
            lambda x, r: ops.roi_align(x, r, 2, 2, sampling_ratio=1.5),
            [(1, 4, 5, 3), (7, 5)],
            "whole number",
        ),
        (
            lambda x, r: ops.roi_align(x, r, 2, 2, sampling_ratio=-1),
            [(1, 4, 5, 3), (7, 5)],
            "sampling_ratio is -1",
        ),
        (lambda x, r: ops.roi_align(x, r, 2, 2), [(1, 0, 5, 3), (7, 5)], "axis 1 .* is empty"),
        (
            lambda b, s: ops.non_maximum_suppression(b, s, 1, 0.5, 0.0),
            [(1, 9, 5), (1, 2, 9)],
            "expected .batch, boxes, 4.",
        ),
        (
            lambda b, s: ops.non_maximum_suppression(b, s, 1, 0.5, 0.0),
            [(1, 9, 4), (1, 2, 8)],
            "differ in the batch or in the number of boxes",
        ),
        (lambda x, _: ops.resize_linear(x, [2, 3]), [(1, 4, 5), (1,)], "expected 3 dimensions"),
        (lambda x, _: ops.resize_linear(x, [2], 4), [(4,), (1,)], "is 4, expected 0 to 3"),
        (lambda x, _: ops.resize_nearest(x, [2], 0, -1), [(4,), (1,)], "round_mode is -1"),
        (lambda x, _: ops.resize_nearest(x, [2]), [(0,), (1,)], "axis 0 .* is empty"),
        (lambda x, _: ops.resize_bicubic(x, [1, 3, 2, 2]), [(1, 2, 4, 4), (1,)], "resize"),
    ],
)
def test_shapes_and_modes_that_do_not_fit(
    build: Any, shapes: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(build, *[floats(*shape) for shape in shapes])


def test_dtypes_that_do_not_fit() -> None:
    whole = np.ones((1, 4, 5, 3), np.int32)
    with pytest.raises(TypeError, match="expected floats"):
        run(lambda x, r: ops.roi_align(x, r, 2, 2), whole, floats(7, 5))
    with pytest.raises(TypeError, match="expected a floating-point type"):
        run(lambda x: ops.resize_linear(x, [1, 4, 5, 7]), whole)
    with pytest.raises(TypeError, match="one float dtype"):
        run(
            lambda b, s: ops.non_maximum_suppression(b, s, 1, 0.5, 0.0),
            floats(1, 9, 4),
            np.ones((1, 2, 9)),
        )
    with pytest.raises(TypeError):
        run(
            lambda b, s: ops.non_maximum_suppression(b, s, 1.5, 0.5, 0.0),
            floats(1, 9, 4),
            floats(1, 2, 9),
        )


@pytest.mark.parametrize("number", [2.0, -1.0, np.nan, np.inf, 1e30])
def test_a_region_of_no_image(number: float) -> None:
    rois = np.array([[0, 0, 0, 3, 3], [number, 0, 0, 3, 3]], np.float32)
    with pytest.raises(Exception, match="region 1 is of image"):
        run(lambda x, r: ops.roi_align(x, r, 2, 2), floats(2, 4, 5, 3), rois)


@pytest.mark.parametrize("end", [np.nan, np.inf, 1e20])
def test_a_region_without_a_size(end: float) -> None:
    rois = np.array([[0, 0, 0, end, 3]], np.float32)
    with pytest.raises(Exception, match="region 0 is .* pixels long"):
        run(lambda x, r: ops.roi_align(x, r, 2, 2, aligned=True), floats(1, 4, 5, 3), rois)
    # samples that are given lie outside of the image, which is 0
    got = run(
        lambda x, r: ops.roi_align(x, r, 2, 2, sampling_ratio=2, aligned=True),
        floats(1, 4, 5, 3),
        rois,
    )
    np.testing.assert_array_equal(got, 0)


def test_scores_that_are_no_number_and_boxes_without_area() -> None:
    boxes = np.zeros((1, 4, 4), np.float32)
    scores = np.array([[[np.nan, 0.5, np.inf, -np.inf]]], np.float32)
    got = run(lambda b, s: ops.non_maximum_suppression(b, s, 9, 0.5, -1.0), boxes, scores)
    np.testing.assert_array_equal(got, [[0, 0, 2], [0, 0, 1]])


def test_a_number_of_boxes_that_is_declared() -> None:
    boxes, scores = floats(1, 5, 4), floats(1, 2, 5)
    with pytest.raises(Exception, match="the result has 7 rows"):
        run(lambda b, s: ops.non_maximum_suppression(b, s, 1, 0.5, -9.0, out_dim=7), boxes, scores)
    got = run(
        lambda b, s: ops.non_maximum_suppression(b, s, 1, 0.5, -9.0, out_dim=2), boxes, scores
    )
    np.testing.assert_array_equal(got[:, 2], scores[0].argmax(-1))


@pytest.mark.parametrize("size", [(7, 18), (3, 4)])
def test_bicubic(size: tuple[int, int]) -> None:
    x = floats(2, 3, 5, 9)
    want = torch.nn.functional.interpolate(torch.from_numpy(x), size, mode="bicubic").numpy()
    got = run(lambda a: ops.resize_bicubic(a, [2, 3, *size]), x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
