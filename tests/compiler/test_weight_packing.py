"""Which weights are packed; no other pass runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from xdsl.ir import Block
from xdsl.utils.exceptions import VerifyException

from max import kernel as k
from max import mlir
from max._backends.cpu.packing import (
    CPU_PACKING,
    NO_PACKING,
    Packing,
    has_narrow_groups,
    packing_of,
)
from max._backends.cpu.passes.int8_filters import Int8ConvOp, PackInt8FilterOp
from max._backends.cpu.passes.pack import pack_weights
from max._config import flags
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.graph.quantization import QuantizationEncoding
from max.mlir import MoOp, clone_module, entry, to_attr, verify_module
from max.mlir.types import TensorType as MoTensor

Value = TensorValue
CPU = DeviceRef.CPU()
F32, BF16, I8, I32 = DType.float32, DType.bfloat16, DType.int8, DType.int32


def packed(
    build: Callable[[Value], Any],
    dtype: DType = F32,
    packing: Packing = CPU_PACKING,
    runs_here: Callable[[MoOp], bool] = lambda op: True,
    shape: tuple[int | str, ...] = ("n", 8),
) -> list[str]:
    """The ops of packing in a graph after the pass, with their encodings and columns."""
    with Graph("g", input_types=[TensorType(dtype, shape, CPU)]) as graph:
        results = build(graph.inputs[0].tensor)
        graph.output(*(results if isinstance(results, tuple) else (results,)))
    module = clone_module(graph.to_mlir())
    pack_weights(entry(module).block, runs_here, packing)
    verify_module(module)
    block = entry(module).block
    # a value that a removed op still uses would never be dropped
    users = {use.operation for op in block.ops for value in op.results for use in value.uses}
    assert users <= {*block.ops}
    # an op that products no longer need would be carried out at load
    assert all(any(r.first_use for r in op.results) for op in block.ops if op.results)
    assert block.last_op is not None
    assert tuple([value.type for value in block.last_op.operands]) == entry(module).output_types
    found = list[str]()
    for op in block.ops:
        if isinstance(op, MoOp) and op.name.startswith("mok."):
            values = [op.name.removeprefix("mok.")]
            values += [
                str(op.attr(name)) for name in ("encoding", "columns") if name in op.attributes
            ]
            found.append(" ".join(values))
    return found


def weight(*shape: int, dtype: DType = F32) -> Value:
    return ops.constant(np.ones(shape, dtype.to_numpy()), dtype, CPU)


COLUMNS = ["pack columns", "packed_matmul columns 9"]


def test_products_of_weights() -> None:
    assert packed(lambda x: x @ weight(8, 9)) == COLUMNS
    assert packed(lambda x: x.cast(BF16) @ weight(8, 9, dtype=BF16)) == COLUMNS
    # packed once, for two products
    shared = packed(lambda x: (x @ (w := weight(8, 9)), ops.tanh(x) @ w))
    assert shared == [COLUMNS[0], COLUMNS[1], COLUMNS[1]]


ROWS = ["pack rows", "packed_matmul rows 9"]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        # as a convolution of one tap has it: [F, C, 1, 1] to [1, 1, C, F] to [C, F]
        (lambda: ops.reshape(ops.permute(weight(9, 8, 1, 1), [2, 3, 1, 0]), (8, 9)), ROWS),
        (lambda: ops.reshape(ops.permute(weight(9, 2, 4), [1, 2, 0]), (8, 9)), ROWS),
        (lambda: ops.reshape(ops.permute(weight(3, 3, 8), [2, 0, 1]), (8, 9)), ROWS),
        (lambda: ops.transpose(weight(9, 8), 0, 1), ROWS),
        # parts, other orders, and copies of rows
        (lambda: ops.transpose(weight(10, 8)[:9], 0, 1), COLUMNS),
        (lambda: ops.transpose(weight(9, 16)[:, ::2], 0, 1), COLUMNS),
        (lambda: ops.reshape(ops.permute(weight(9, 2, 4), [2, 1, 0]), (8, 9)), COLUMNS),
        (lambda: ops.reshape(weight(9, 8), (8, 9)), COLUMNS),
        (lambda: ops.transpose(ops.broadcast_to(weight(1, 8), (9, 8)), 0, 1), COLUMNS),
    ],
)
def test_weights_that_a_transpose_views(build: Callable[[], Value], expected: list[str]) -> None:
    assert packed(lambda x: x @ build()) == expected
    both = packed(lambda x: (x @ (w := build()), ops.tanh(x) @ w))
    assert both == [expected[0], *[expected[1]] * 2]


@pytest.mark.parametrize(
    ("shape", "many"),
    [
        (("n", 8), False), ((31, 8), False), ((32, 8), True), (("n", 16, 8), False), (("n", 2, 16, 8), True),
        (("n", "m", 32, 8), True),
    ],
)  # fmt: skip
def test_products_that_always_have_many_rows(shape: tuple[int | str, ...], many: bool) -> None:
    with Graph("g", input_types=[TensorType(F32, shape, CPU)]) as graph:
        graph.output(graph.inputs[0].tensor @ weight(8, 9))
    module = clone_module(graph.to_mlir())
    pack_weights(entry(module).block, lambda op: True, CPU_PACKING)
    verify_module(module)
    (product,) = [
        op for op in module.walk() if isinstance(op, MoOp) and op.name == "mok.packed_matmul"
    ]
    assert product.attr_or("many_rows", False) is many


@pytest.mark.parametrize(
    "build",
    [
        lambda x: ops.tanh(x),
        lambda x: weight(9, 8) @ weight(8, 9),  # runs once, at load
        lambda x: x @ ops.transpose(x[:9], 0, 1),
        lambda x: x @ weight(8, 7),  # fewer columns than a panel may have
        lambda x: x[:, :7] @ weight(7, 9),
        lambda x: x @ weight(8, 0),
        lambda x: ops.broadcast_to(x, [2, "n", 8]) @ weight(2, 8, 9),
        lambda x: ops.broadcast_to(x, [8, "n", 8]) @ weight(8, 8, 9),
        lambda x: x.cast(DType.float64) @ weight(8, 9, dtype=DType.float64),
    ],
)
def test_products_that_stay(build: Callable[[Value], Any]) -> None:
    assert packed(build) == []


def test_who_packs() -> None:
    def product(x: Value) -> Value:
        return x @ weight(8, 9)

    assert packed(product, packing=NO_PACKING) == []
    assert packed(product, packing=replace(CPU_PACKING, dense=frozenset({BF16}))) == []
    assert packed(product, packing=replace(CPU_PACKING, min_size=9)) == []
    assert packed(product, runs_here=lambda op: op.name != "mo.matmul") == []
    assert (
        packed(lambda x: (product(x), ops.tanh(x)), runs_here=lambda op: op.name == "mo.matmul")
        == COLUMNS
    )


def test_weights_that_caches_do_not_hold() -> None:
    """Those of the limit's bytes."""
    with Graph("g", input_types=[TensorType(F32, ["n", 8], CPU)]) as graph:
        x = graph.inputs[0].tensor
        graph.output(x @ weight(8, 9), x.cast(BF16) @ weight(8, 9, dtype=BF16))

    def products(limit: int) -> tuple[int, list[bool]]:
        """The bytes of the packed weights, and what the products say of them."""
        module = clone_module(graph.to_mlir())
        packing = replace(CPU_PACKING, streamed_bytes=limit)
        pack_weights(entry(module).block, lambda op: True, packing)
        found = [op for op in entry(module).block.ops if isinstance(op, MoOp)]
        types = [op.results[0].type for op in found if op.name == "mok.pack"]
        sizes = [
            prod(one.static_shape or ()) * one.dtype.size_in_bytes
            for one in types
            if isinstance(one, mlir.TensorType)
        ]
        return sum(sizes), [op.attr("streamed") for op in found if op.name == "mok.packed_matmul"]

    size, streamed = products(1)
    # a strip of 32 columns: 8 rows of float32, and of bfloat16
    assert size >= 32 * 8 * (4 + 2) and streamed == [True, True]
    assert products(size) == (size, [True, True]) and products(size + 1) == (size, [False, False])


@pytest.mark.parametrize("encoding", ["Q4_0", "Q8_0"])
def test_quantized_weights(encoding: str) -> None:
    """Packed where the device has a layout for their encoding."""

    def build(x: Value, columns: int = 9) -> Value:
        row = 18 if encoding == "Q4_0" else 34
        w = ops.constant(np.zeros((columns, row), np.uint8), DType.uint8, CPU)
        return ops.qmatmul(getattr(QuantizationEncoding, encoding), None, x, w)

    for columns in (9, 1):
        expected = [f"pack {encoding}", f"packed_matmul {encoding} {columns}"]
        assert packed(lambda x, n=columns: build(x, n), shape=("n", 32)) == expected
    assert packed(lambda x: build(x, 0), shape=("n", 32)) == []
    only = replace(CPU_PACKING, quantized=frozenset({"Q6_K"}))
    assert packed(build, shape=("n", 32), packing=only) == []


def wide(x: Value) -> Value:
    return x.cast(I32)


def test_products_of_bytes() -> None:
    columns = ["pack int8 columns", "packed_matmul int8 columns 9"]
    assert packed(lambda x: wide(x) @ wide(weight(8, 9, dtype=I8)), I8) == columns
    # a product that wraps in 8 bits
    assert packed(lambda x: x @ weight(8, 9, dtype=I8), I8) == columns
    # a transpose of the bytes costs nothing: panels take either orientation
    rows = ["pack int8 rows", "packed_matmul int8 rows 9"]
    assert packed(lambda x: wide(x) @ wide(ops.transpose(weight(9, 8, dtype=I8), 0, 1)), I8) == rows
    assert packed(lambda x: wide(x) @ ops.transpose(wide(weight(9, 8, dtype=I8)), 0, 1), I8) == []
    assert packed(lambda x: x @ ops.transpose(weight(9, 8, dtype=I8), 0, 1), I8) == rows


@pytest.mark.parametrize(
    "build",
    [
        lambda x: x.cast(DType.int64) @ weight(8, 9, dtype=I8).cast(DType.int64),
        lambda x: wide(x) @ weight(8, 9, dtype=I32),
        lambda x: wide(x) @ wide(weight(8, 7, dtype=I8)),
        lambda x: wide(x) @ wide(weight(8, 9, dtype=DType.uint8)),
        lambda x: wide(weight(9, 8, dtype=I8)) @ wide(weight(8, 9, dtype=I8)),
        lambda x: wide(x) @ wide(ops.transpose(x[:9], 0, 1)),
        lambda x: wide(ops.broadcast_to(x, [2, "n", 8])) @ wide(weight(2, 8, 9, dtype=I8)),
    ],
)
def test_products_of_bytes_that_stay(build: Callable[[Value], Any]) -> None:
    assert packed(build, I8) == []
    assert (
        packed(
            lambda x: wide(x) @ wide(weight(8, 9, dtype=I8)), I8, replace(CPU_PACKING, int8=False)
        )
        == []
    )


def convolved(x: Value, *filter: int, groups: int = 1, dtype: DType = F32) -> Value:
    return ops.conv2d(x.cast(dtype), weight(*filter, dtype=dtype), groups=groups)


IMAGE = (1, 5, 5, 4)
CONVOLUTION = ["pack_filter", "packed_conv 6"]


def test_filters() -> None:
    assert packed(lambda x: convolved(x, 3, 3, 4, 6), shape=IMAGE) == CONVOLUTION
    assert packed(lambda x: convolved(x, 3, 3, 2, 6, groups=2), shape=IMAGE) == CONVOLUTION
    # a channel of each group, but two columns
    assert packed(lambda x: convolved(x, 3, 3, 1, 8, groups=4), shape=IMAGE) == [
        "pack_filter",
        "packed_conv 8",
    ]
    # as many columns as groups, of two channels each
    two = ["pack_filter", "packed_conv 2"]
    assert packed(lambda x: convolved(x, 3, 3, 2, 2, groups=2), shape=IMAGE) == two
    one = (1, 5, 5, 1)
    assert packed(lambda x: convolved(x, 3, 3, 1, 6), shape=one) == CONVOLUTION


def test_filters_are_packed_once() -> None:
    def build(x: Value) -> tuple[Value, ...]:
        w = weight(3, 3, 4, 6)
        return ops.conv2d(x, w), ops.conv2d(ops.tanh(x), w)

    assert packed(build, shape=IMAGE) == [*CONVOLUTION, CONVOLUTION[1]]


@pytest.mark.parametrize(
    "build",
    [
        lambda x: convolved(x, 3, 3, 1, 4, groups=4),  # depthwise
        lambda x: convolved(x, 3, 3, 4, 0),
        lambda x: convolved(x, 3, 3, 4, 6, dtype=DType.float64),
        lambda x: ops.conv2d(weight(1, 5, 5, 4), weight(3, 3, 4, 6)) + x[0, 0, 0, 0],
        lambda x: ops.conv2d(x, ops.reshape(x[0, :4, :4], [2, 2, 4, 4])),
    ],
)
def test_filters_that_stay(build: Callable[[Value], Any]) -> None:
    assert packed(build, shape=IMAGE) == []
    assert packed(lambda x: convolved(x, 3, 3, 4, 6), shape=IMAGE, packing=NO_PACKING) == []
    narrow = replace(CPU_PACKING, narrow_channels={F32: 4})
    groups = lambda x: convolved(x, 3, 3, 2, 4, groups=2)  # noqa: E731
    assert packed(groups, shape=IMAGE, packing=narrow) == []
    assert packed(groups, shape=IMAGE, packing=CPU_PACKING) != []
    only = replace(CPU_PACKING, filters=frozenset({BF16}))
    assert packed(lambda x: convolved(x, 3, 3, 4, 6), shape=IMAGE, packing=only) == []


@pytest.mark.parametrize(
    ("sizes", "filters", "options", "chosen"),
    [
        ((20, 20, 32), (32, 64), {}, True),
        (("h", "w", 128), (128, 32), {}, True),
        ((22, 20, 32), (32, 32), {"padding": (1, 1, 1, 1)}, True),
        ((14, 14, 256), (256, 32), {"padding": (1, 1, 1, 1)}, True),
        # 15 tiles; 12 tiles; tiles that lie outside of the image by more than 30 %
        ((12, 20, 32), (32, 32), {"padding": (1, 1, 1, 1)}, False),
        ((11, 14, 32), (32, 32), {"padding": (1, 1, 1, 1)}, False),
        ((200, 5, 32), (32, 32), {"padding": (1, 1, 1, 1)}, False),
        ((20, 20, 31), (31, 32), {}, False),
        ((20, 20, 32), (32, 31), {}, False),
        ((20, 20, 1024), (1024, 32), {}, True),
        ((20, 20, 1025), (1025, 32), {}, False),
        ((20, 20, 64), (32, 64), {"groups": 2}, False),
        ((40, 40, 32), (32, 32), {"stride": (2, 2)}, False),
        ((40, 40, 32), (32, 32), {"dilation": (1, 2)}, True),
        # 17 lines of tiles, 5 of the first of four images; 24, of which 0.46 lie in the image; 1
        ((65, 65, 32), (32, 32), {"dilation": (4, 4), "padding": (4, 4, 4, 4)}, True),
        ((65, 65, 32), (32, 32), {"dilation": (12, 12), "padding": (12, 12, 12, 12)}, False),
        ((65, 65, 32), (32, 32), {"dilation": (80, 80), "padding": (80, 80, 80, 80)}, False),
        (("h", 40, 32), (32, 32), {"dilation": (1, 2)}, False),
    ],
)
def test_winograd(
    sizes: tuple[int | str, ...], filters: tuple[int, int], options: Any, chosen: bool
) -> None:
    """Convolutions of images with 3 × 3 taps, many channels and many tiles."""

    def build(x: Value) -> Value:
        return ops.conv2d(x, weight(3, 3, *filters), **options)

    name = "winograd" if chosen else "packed"
    shape = ("n", *sizes)
    assert packed(build, shape=shape)[-1] == f"{name}_conv {filters[1]}"
    with flags.override(MAX_WINOGRAD=False):
        assert packed(build, shape=shape)[-1] == f"packed_conv {filters[1]}"


def test_winograd_shares_filters() -> None:
    """One filter of two convolutions is transformed once; other taps and dtypes are not transformed."""
    image = ("n", 24, 24, 32)

    def build(x: Value) -> tuple[Value, Value]:
        w = weight(3, 3, 32, 32)
        return ops.conv2d(x, w), ops.conv2d(ops.tanh(x), w)

    assert packed(build, shape=image) == ["winograd_filter", *["winograd_conv 32"] * 2]
    volume = ("n", 9, 24, 24, 32)
    names = packed(lambda x: ops.conv3d(x, weight(3, 3, 3, 32, 32)), shape=volume)
    assert names == ["pack_filter", "packed_conv 32"]
    for taps, dtype in (((3, 1), F32), ((3, 3), BF16)):
        names = packed(lambda x: convolved(x, *taps, 32, 32, dtype=dtype), shape=image)  # noqa: B023
        assert names == ["pack_filter", "packed_conv 32"]


def codes(x: Value, *filter: int, **options: Any) -> Value:
    """A convolution of bytes in int32."""
    return ops.conv2d(x.cast(I32), weight(*filter, dtype=I8).cast(I32), **options)


BYTES = replace(CPU_PACKING, int8_filters=True)


def test_int8_filters() -> None:
    """An instruction for four bytes a lane: `int8_conv`; else a product of patches, or of few channels floats."""
    image = ("n", 6, 7, 20)
    own = ["pack_int8_filter", "int8_conv 9"]
    patches = ["pack int8 columns", "packed_matmul int8 columns 9"]
    for options in ({}, {"stride": (2, 1), "dilation": (1, 2)}, {"padding": (1, 1, 0, 1)}):
        found = packed(lambda x: codes(x, 3, 2, 20, 9, **options), I8, BYTES, shape=image)  # noqa: B023
        assert found == own
    assert packed(lambda x: codes(x, 3, 2, 20, 9), I8, shape=image) == patches
    few = ("n", 6, 7, 4)
    assert packed(lambda x: codes(x, 3, 2, 4, 9), I8, BYTES, shape=few) == own
    assert packed(lambda x: codes(x, 3, 2, 4, 9), I8, shape=few) == ["pack_filter", "packed_conv 9"]
    # 18 channels are not whole lanes; 64 taps have no bits
    odd = ("n", 6, 7, 18)
    assert packed(lambda x: codes(x, 3, 2, 18, 9), I8, BYTES, shape=odd) == patches
    large = ("n", 20, 20, 20)
    assert packed(lambda x: codes(x, 8, 8, 20, 9), I8, BYTES, shape=large) == patches


def test_int8_filters_that_stay() -> None:
    image = ("n", 6, 7, 20)
    assert packed(lambda x: codes(x, 3, 2, 10, 6, groups=2), I8, BYTES, shape=image) == []
    none = replace(BYTES, int8=False)
    assert packed(lambda x: codes(x, 3, 2, 20, 6), I8, none, shape=image) == []
    wraps = packed(lambda x: ops.conv2d(x, weight(3, 2, 20, 6, dtype=I8)), I8, BYTES, shape=image)
    assert wraps == []


def test_ops_of_int8_filters_have_numbers_of_operands() -> None:
    values = Block(arg_types=[MoTensor.get(I8, [2, 2, 4, 8], CPU.to_mlir())] * 3).args
    conv = {"stride": (1, 1), "dilation": (1, 1), "padding": (0,) * 4, "groups": 1, "fill": 0}
    for op, number, attributes in ((PackInt8FilterOp, 1, {}), (Int8ConvOp, 2, conv)):
        for given in (number - 1, number + 1):
            made = op.create(
                operands=values[:given],
                result_types=[values[0].type],
                attributes={name: to_attr(value) for name, value in attributes.items()},
            )
            with pytest.raises(VerifyException, match=f"takes {number} operands, got {given}"):
                made.verify()


@pytest.mark.parametrize("amount", [1, 2, 3])
def test_padding_of_codes(amount: int) -> None:
    """A constant around the image is the padding of the convolution, unless a window would see nothing else."""
    image = (1, 6, 7, 20)

    def build(x: Value) -> Value:
        return codes(ops.pad(x, (0, 0, amount, 0, 0, amount, 0, 0), value=-5), 3, 3, 20, 6)

    with Graph("g", input_types=[TensorType(I8, image, CPU)]) as graph:
        graph.output(build(graph.inputs[0].tensor))
    module = clone_module(graph.to_mlir())
    pack_weights(entry(module).block, lambda op: True, BYTES)
    (found,) = (op for op in entry(module).block.ops if op.name == "mok.int8_conv")
    assert isinstance(found, MoOp)
    merged = amount < 3
    assert found.attr("fill") == (-5 if merged else 0)
    assert tuple(found.attr("padding")) == ((amount, 0, 0, amount) if merged else (0,) * 4)


AVX512 = {"avx2", "avx512f", "avx512bw", "avx512vl"}


@pytest.mark.parametrize(
    ("features", "coded"),
    [
        (set(), {F32: "halved float32"}),
        ({"avx2", "fma"}, {F32: "halved float32"}),
        ({"avx512f"}, {F32: "halved float32"}),
        ({"avx512f", "avx512bf16"}, {F32: "coded float32", BF16: "coded bfloat16"}),
        (AVX512, {F32: "coded float32"}),
        ({*AVX512, "avx512bf16"}, {F32: "coded float32", BF16: "coded bfloat16"}),
    ],
)
def test_what_a_processor_decodes_fast(features: set[str], coded: dict[DType, str]) -> None:
    """Codes of a byte need a lookup of a whole vector, and 512 bits or products of pairs."""
    target = k.CPUTarget(frozenset(features), "x86_64-unknown-linux-gnu", "x86-64")
    packing = packing_of(target)
    assert packing == replace(CPU_PACKING, codings=coded, narrow_channels=packing.narrow_channels)


@pytest.mark.parametrize(
    ("features", "lanes", "paired"),
    [
        (set(), 4, 4),
        ({"avx2", "fma"}, 8, 8),
        (AVX512, 16, 16),
        ({*AVX512, "avx512bf16"}, 16, 8),
    ],
)
def test_groups_that_share_a_vector(features: set[str], lanes: int, paired: int) -> None:
    """As many channels as a vector has sums; half of them where an instruction multiplies pairs of channels."""
    target = k.CPUTarget(frozenset(features), "x86_64-unknown-linux-gnu", "x86-64")
    narrow = packing_of(target).narrow_channels
    assert narrow == {F32: lanes, DType.float16: lanes, BF16: paired}
    for channels, columns, groups, expected in (
        (1, 40, 40, True), (4, 36, 9, True), (3, 9, 3, False), (4, 8, 4, False), ("c", 4, 4, False),
        (lanes, 2 * lanes, 2, True), (2 * lanes, 4 * lanes, 2, False),
    ):  # fmt: skip
        assert has_narrow_groups((3, 3, channels, columns), groups, lanes) is expected


def test_arm64_decodes_what_has_products_of_pairs() -> None:
    for features, coded in (((), {}), (("bf16",), {BF16: "coded bfloat16"})):
        target = k.CPUTarget(frozenset(features), "aarch64-unknown-linux-gnu", "generic")
        assert packing_of(target).codings == {F32: "halved float32", **coded}


def test_kernels_of_other_devices_read_weights_as_they_are() -> None:
    assert Packing() == NO_PACKING and not NO_PACKING.int8 and CPU_PACKING.int8
    assert not (
        NO_PACKING.dense or NO_PACKING.filters or NO_PACKING.quantized or NO_PACKING.codings
    )
    assert (
        CPU_PACKING.dense == {F32, BF16, DType.float16} == CPU_PACKING.filters
        and not CPU_PACKING.codings
    )
    assert NO_PACKING.streamed_bytes == 32 << 20 and NO_PACKING.min_size == 8
