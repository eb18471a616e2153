"""Convolutions of codes that the passes of the CPU replace: the forms, and the same integers by the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from xdsl.ir import SSAValue
from xdsl.utils.exceptions import VerifyException

from max import _interpreter
from max._backends import BackendOptions, backends_for
from max._backends.cpu.backend import CPUBackend
from max._backends.cpu.packing import CPU_PACKING
from max._backends.cpu.passes.int8_filters import Int8ConvOp, PackInt8FilterOp, convolve_codes
from max._compiler.mok import RegionOp
from max._compiler.passes.redundant_ops import drop_dead_ops
from max._compiler.pipeline import optimize
from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, TensorType, TensorValue, ops
from max.mlir import DimExpr, MoOp, clone_module, entry, verify_module
from max.mlir import TensorType as Type
from max.mlir.ops.spatial import ConvOp
from tests.cpu_kernels.test_int8_conv import expected

CPU = DeviceRef.CPU()
I8, I32 = DType.int8, DType.int32
Array = np.ndarray[Any, Any]
FORMS = {"mo.conv", "mo.matmul", "mok.int8_conv"}
"""The ops that a convolution becomes."""


def pack(frame: Any, op: MoOp, operands: Sequence[Array]) -> Array:
    """The bytes of a filter, somewhere in strips of 32 columns with a line before their rows."""
    (w,) = operands
    *taps, channels, columns = w.shape
    strips = np.zeros((-(-columns // 32), (prod(taps) * channels + 4) * 32), np.int8)
    strips.reshape(-1)[: w.size] = w.reshape(-1)
    return strips


def convolve(frame: Any, op: MoOp, operands: Sequence[Array]) -> Array:
    x, strips = operands
    *shape, columns = *op.attr("taps"), x.shape[-1], op.attr("columns")
    w = strips.reshape(-1)[: prod(shape) * columns].reshape(*shape, columns)
    stride, dilation, padding = (
        tuple(map(int, op.attr(name))) for name in ("stride", "dilation", "padding")
    )
    return expected(x, w, stride, dilation, padding, op.attr("fill"))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter knows the ops that the pass makes."""
    monkeypatch.setitem(_interpreter.IMPLEMENTATIONS, "mok.pack_int8_filter", pack)
    monkeypatch.setitem(_interpreter.IMPLEMENTATIONS, "mok.int8_conv", convolve)


def flops_of(op: MoOp) -> DimExpr | None:
    """The floating-point operations that an op states."""
    if op.spec.flops is None:
        return None
    return op.spec.flops([v.type for v in op.operands], [v.type for v in op.results])


def operands_of_casts(op: MoOp) -> tuple[SSAValue, SSAValue]:
    """The image and the filter before their casts."""
    x, w = (cast("MoOp", operand.owner).operands[0] for operand in op.operands)
    return x, w


class Case:
    """A graph with a convolution of codes, and what becomes of it.

    Args:
        image: The image; the number of images is a symbol.
        taps: The taps and output channels of the filter.
        pads: Constants around the image, low and high of each axis, and their value.
        by_bytes: Whether the convolution of bytes is the fastest form.
        options: Further arguments of `conv2d`.
    """

    def __init__(
        self, image: tuple[int, ...], taps: tuple[int, int, int], pads: tuple[Any, ...] = (0,) * 8,
        value: int = 0, by_bytes: bool = True, symbols: tuple[Any, ...] = (), **options: Any,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(sum(image) + sum(taps))
        sides = [Dim(side) for side in pads]
        channels = image[-1] + (0 if "rest" in pads else sum(map(int, sides[6:])))
        groups = options.get("groups", 1)
        self.w = rng.integers(-128, 128, (*taps[:2], channels // groups, taps[2])).astype(np.int8)
        self.x = rng.integers(-128, 128, (2, *image)).astype(np.int8)
        more = [TensorType(I8, [name], CPU) for name in symbols]
        with Graph("g", input_types=[TensorType(I8, ["n", *image], CPU), *more]) as graph:
            x: TensorValue = graph.inputs[0].tensor
            if any(pads):
                x = ops.pad(x, sides, value=value)  # type: ignore[arg-type]
            w = ops.constant(self.w, I8, CPU)
            graph.output(ops.conv2d(x.cast(I32), w.cast(I32), **options))
        self.graph = graph
        module = clone_module(graph.to_mlir())
        block = entry(module).block
        (op,) = [op for op in block.ops if type(op) is ConvOp]
        assert isinstance(op, MoOp)
        before = flops_of(op)
        self.found = convolve_codes(op, *operands_of_casts(op), by_bytes, {})
        # a value that a removed op still uses would never be dropped
        users = {use.operation for op in block.ops for value in op.results for use in value.uses}
        assert users <= {*block.ops}
        drop_dead_ops(block)
        verify_module(module)
        self.module, self.ops = module, [op for op in block.ops if isinstance(op, MoOp)]
        for made in self.ops:
            if made.name in FORMS:
                assert flops_of(made) == before

    @property
    def form(self) -> str:
        """The op that has become of the convolution."""
        (name,) = FORMS & {op.name for op in self.ops}
        if name == "mo.conv":
            (op,) = [op for op in self.ops if op.name == name]
            dtype = cast("Type", op.results[0].type).dtype
            assert (self.found is op) is (dtype is DType.float32)
            return f"mo.conv of {dtype.name}"
        (op,) = [op for op in self.ops if op.name == name]
        assert self.found is (op if name == "mo.matmul" else None)
        return name

    def attribute(self, name: str) -> Any:
        (op,) = [op for op in self.ops if op.name == "mok.int8_conv"]
        return op.attr(name)

    def check(self, *inputs: Array) -> None:
        """The results are the same integers."""
        arrays = [self.x, *inputs]
        (want,) = _interpreter.run(self.graph, arrays)
        (got,) = _interpreter.run(self.module, arrays)
        assert got.dtype == want.dtype == np.int32
        np.testing.assert_array_equal(got, want)


def form_of(channels: int, taps: int, padding: bool, by_bytes: bool) -> str:
    """As the module says."""
    if by_bytes and channels % 4 == 0 and taps <= 62:
        return "mok.int8_conv"
    if channels >= 16 and not padding:
        return "mo.matmul"
    return "mo.conv of float32" if taps * channels <= 1024 else "mo.conv of int32"


@pytest.mark.parametrize("examples", [25, pytest.param(400, marks=pytest.mark.long)])
def test_random_convolutions(examples: int, interpreted: None) -> None:
    settings(max_examples=examples, deadline=None)(given(st.data())(check_random))()


def check_random(data: st.DataObject) -> None:
    def numbers(count: int, low: int, high: int) -> tuple[int, ...]:
        return tuple(data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count)))

    taps, dilation, stride = numbers(2, 1, 3), numbers(2, 1, 2), numbers(2, 1, 3)
    # a product from the start
    assume(prod(taps) > 1 or prod(stride) > 1)
    padding = numbers(4, 0, 1) if data.draw(st.booleans()) else (0,) * 4
    pads = (0, 0, *numbers(4, 0, 3), 0, 0) if data.draw(st.booleans()) else (0,) * 8
    if data.draw(st.integers(0, 4)) == 0:
        pads = (*numbers(2, 0, 1), *pads[2:6], *numbers(2, 0, 1))
    channels = data.draw(st.sampled_from((1, 4, 12, 15, 16, 17, 20)))
    spans = [(n - 1) * d + 1 for n, d in zip(taps, dilation, strict=True)]
    image = tuple(span + size for span, size in zip(spans, numbers(2, 0, 3), strict=True))
    case = Case(
        (*image, channels), (taps[0], taps[1], data.draw(st.sampled_from((1, 33)))), pads,
        data.draw(st.integers(-128, 127)), data.draw(st.booleans()),
        stride=stride, dilation=dilation, padding=padding,
    )  # fmt: skip
    all_channels = channels + sum(pads[6:])
    by_bytes = case.form == "mok.int8_conv"
    assert case.form == form_of(all_channels, prod(taps), any(padding), by_bytes)
    assert by_bytes or case.form == form_of(all_channels, prod(taps), any(padding), False)
    if case.form == "mo.matmul":
        assert ("mo.concat" in [op.name for op in case.ops]) is (prod(taps) > 1)
    if by_bytes:
        amounts = [max(pads[2 + 2 * i : 4 + 2 * i]) for i in range(2)]
        inside = not any(padding) and not any(pads[:2]) and not any(pads[6:])
        merged = inside and all(a < span for a, span in zip(amounts, spans, strict=True))
        assert tuple(map(int, case.attribute("padding"))) == (pads[2:6] if merged else padding)
    case.check()


@pytest.mark.parametrize(
    ("image", "taps", "by_bytes"),
    [
        # 62 taps have bits, 63 have not
        ((2, 31, 4), (2, 31, 3), True),
        ((7, 9, 4), (7, 9, 3), True),
        # products of 16 channels and more; float32 holds sums of 1,024 products
        ((2, 2, 16), (1, 2, 3), False),
        ((2, 2, 15), (1, 2, 3), False),
        ((16, 16, 4), (16, 16, 1), False),
        ((5, 41, 5), (5, 41, 1), False),
        # other numbers of channels than whole lanes of four
        ((3, 3, 6), (2, 2, 3), True),
    ],
)
def test_the_forms(
    image: tuple[int, ...], taps: tuple[int, int, int], by_bytes: bool, interpreted: None
) -> None:
    case = Case(image, taps, by_bytes=by_bytes)
    assert case.form == form_of(image[-1], prod(taps[:2]), False, by_bytes)
    case.x[:] = -128
    case.check()


def test_a_product_of_single_pixels(interpreted: None) -> None:
    case = Case((4, 3, 16), (1, 1, 3), by_bytes=False, stride=(2, 1))
    assert case.form == "mo.matmul" and "mo.concat" not in [op.name for op in case.ops]
    case.check()


def test_a_product_needs_no_padding(interpreted: None) -> None:
    case = Case((3, 3, 16), (2, 2, 3), by_bytes=False, padding=(0, 0, 0, 1))
    assert case.form == "mo.conv of float32"
    case.check()
    case = Case((3, 3, 260), (2, 2, 3), by_bytes=False, padding=(0, 0, 0, 1))
    assert case.form == "mo.conv of int32"


def test_a_margin_of_unknown_size_stays(interpreted: None) -> None:
    case = Case((3, 3, 4), (2, 2, 3), (0, 0, "m", 0, 0, 0, 0, 0), -3, symbols=("m",))
    assert tuple(map(int, case.attribute("padding"))) == (0,) * 4
    case.check(np.zeros(2, np.int8))


@pytest.mark.parametrize(
    ("amounts", "dilation", "merged"),
    [
        # of windows of 3 and 2, or of 5 and 3
        ((0, 2, 1, 0), (1, 1), True),
        ((2, 2, 0, 1), (1, 1), True),
        ((3, 0, 0, 1), (1, 1), False),
        ((0, 3, 0, 0), (1, 1), False),
        ((2, 0, 2, 0), (1, 1), False),
        ((4, 4, 2, 2), (2, 2), True),
        ((5, 0, 2, 2), (2, 2), False),
        ((4, 0, 0, 3), (2, 2), False),
    ],
)
def test_constant_margins(
    amounts: tuple[int, ...], dilation: tuple[int, int], merged: bool, interpreted: None
) -> None:
    """They are the padding of the convolution, unless a window would see nothing else."""
    case = Case((6, 5, 4), (3, 2, 3), (0, 0, *amounts, 0, 0), -7, dilation=dilation)
    assert tuple(map(int, case.attribute("padding"))) == (amounts if merged else (0,) * 4)
    assert case.attribute("fill") == (-7 if merged else 0)
    case.check()


@pytest.mark.parametrize(
    ("pads", "padding"),
    [
        ((0, 0, 1, 1, 1, 1, 0, 0), (0, 0, 0, 1)),
        ((0, 0, 1, 0, 0, 0, 0, 0), (1, 1, 1, 1)),
        ((1, 0, 1, 0, 0, 0, 0, 0), (0,) * 4),
        ((0, 1, 1, 0, 0, 0, 0, 0), (0,) * 4),
        ((0, 0, 1, 0, 0, 0, 4, 0), (0,) * 4),
        ((0, 0, 1, 0, 0, 0, 0, 4), (0,) * 4),
        ((0, 0, 0, 0, 0, 0, 2, 2), (0,) * 4),
    ],
)
def test_other_margins_stay(
    pads: tuple[int, ...], padding: tuple[int, ...], interpreted: None
) -> None:
    """Beside zeros of the convolution, and of images and channels."""
    case = Case((6, 5, 4), (3, 2, 3), pads, -7, padding=padding)
    assert tuple(map(int, case.attribute("padding"))) == padding
    assert case.attribute("fill") == 0
    case.check()


def test_groups_and_other_ranks_stay() -> None:
    assert Case((3, 3, 8), (2, 2, 6), groups=2).form == "mo.conv of int32"
    with Graph("g", input_types=[TensorType(I8, [1, 3, 3, 3, 4], CPU)]) as graph:
        w = ops.constant(np.ones((2, 2, 2, 4, 3), np.int8), I8, CPU)
        graph.output(ops.conv3d(graph.inputs[0].tensor.cast(I32), w.cast(I32)))
    block = entry(clone_module(graph.to_mlir())).block
    (op,) = [op for op in block.ops if type(op) is ConvOp]
    assert isinstance(op, MoOp)
    count = len([*block.ops])
    for by_bytes in (True, False):
        assert convolve_codes(op, *operands_of_casts(op), by_bytes, {}) is None
    assert len([*block.ops]) == count


def test_no_columns(interpreted: None) -> None:
    for by_bytes in (True, False):
        case = Case((3, 3, 16), (2, 2, 0), by_bytes=by_bytes)
        assert case.form == "mo.conv of int32"


@pytest.mark.parametrize(("op", "count"), [(PackInt8FilterOp, 1), (Int8ConvOp, 2)])
def test_the_number_of_operands(op: type[MoOp], count: int) -> None:
    case = Case((3, 3, 4), (2, 2, 3))
    (made,) = [found for found in case.ops if isinstance(found, op)]
    made.verify_()
    own = tuple(made.operands)
    assert len(own) == count
    for operands in (own[1:], (*own, own[0])):
        made.operands = operands
        with pytest.raises(VerifyException):
            made.verify_()


def test_each_convolution_is_a_kernel_with_its_epilogue() -> None:
    backends = backends_for((), BackendOptions())
    assert isinstance(backends.host, CPUBackend)
    backends.host.packing = replace(CPU_PACKING, int8_filters=True)
    with Graph("g", input_types=[TensorType(I8, [1, 6, 6, 4], CPU)]) as graph:
        x = graph.inputs[0].tensor
        for shape in ((3, 3, 4, 8), (2, 2, 8, 4)):
            w = ops.constant(np.ones(shape, np.int8), I8, CPU)
            x = ops.abs(ops.conv2d(x.cast(I32), w.cast(I32))).cast(I8)
        graph.output(x)
    module = clone_module(graph.to_mlir())
    optimize(module, backends)
    regions = [op for op in entry(module).block.ops if isinstance(op, RegionOp)]
    bodies = [[op.name for op in region.block.ops] for region in regions]
    assert [body[0] for body in bodies] == ["mok.int8_conv"] * 2
    assert all("mo.abs" in body and body[-2:] == ["mo.cast", "mok.yield"] for body in bodies)
