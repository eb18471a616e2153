"""Ops on quantized weights."""

from __future__ import annotations

from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS, BlockFormat
from max.mlir.conditions import Condition
from max.mlir.dims import DimExpr
from max.mlir.operation import Attrs, Conditions, OpSpec, Types, define, same_device, tensor
from max.mlir.ops.matmul import product_flops
from max.mlir.types import TensorType

FLOATS = (DType.float32, DType.bfloat16, DType.float16)
GPTQ_BITS = (2, 4, 8)


def _form(op: str, attrs: Attrs) -> BlockFormat:
    if attrs["encoding"] not in BLOCK_FORMATS:
        raise ValueError(
            f"{op}: the encoding is {attrs['encoding']!r}, expected {', '.join(BLOCK_FORMATS)}"
        )
    return BLOCK_FORMATS[attrs["encoding"]]


def _blocks_of(op: str, x: TensorType, attrs: Attrs, size: int, unit: str) -> DimExpr:
    """The number of blocks in the last dimension of a tensor.

    Raises:
        ValueError: The rank is 0, or the last dimension is not a multiple of a block.
    """
    if x.rank == 0:
        raise ValueError(f"{op}: {x.short} has rank 0, expected rows of {attrs['encoding']} blocks")
    last = x.shape[-1]
    if last.is_static and last.value % size:
        raise ValueError(
            f"{op}: the last dimension of {x.short} is not a multiple of {size} {unit}, a block of "
            f"{attrs['encoding']}"
        )
    return last // size


def _whole_blocks(op: str, attribute: str, operand: int = 0) -> Conditions:
    """The condition that the last dimension of an operand is a multiple of a block."""

    def conditions(operands: Types, results: Types, attrs: Attrs) -> list[Condition]:
        x = tensor(op, operands, operand)
        size: int = getattr(BLOCK_FORMATS[attrs["encoding"]], attribute)
        last: DimExpr = x.shape[-1]
        message = f"{op}: the last dimension of {x.short} is not a multiple of {size} {attribute}"
        return [Condition.equal(last, last // size * size, message)]

    return conditions


def _infer_dequantize(types: Types, attrs: Attrs) -> Types:
    """The result: float32 of the decoded elements, `[…, blocks * elements per block]`."""
    x = tensor("dequantize", types, 0)
    form = _form("dequantize", attrs)
    if x.dtype is not DType.uint8:
        raise TypeError(f"dequantize: the operand is {x.short}, expected uint8 blocks")
    blocks = _blocks_of("dequantize", x, attrs, form.bytes, "bytes")
    shape = (*x.shape[:-1], blocks * form.elements)
    return (TensorType.get(DType.float32, shape, x.device),)


define(
    OpSpec(
        "mo.dequantize",
        (1, 1),
        1,
        attributes={"encoding": str},
        infer=_infer_dequantize,
        conditions=_whole_blocks("dequantize", "bytes"),
        takes="x ui8 `[…, bytes]`",
        doc=(
            "`encoding` = Q4_0, Q4_K, Q5_K, Q6_K, Q8_0; f32 `[…, bytes / block_size * "
            "elements_per_block]`, as `max.dtype.blocks.decode`"
        ),
    )
)


def _infer_quantize(types: Types, attrs: Attrs) -> Types:
    """The result: uint8 of the encoded blocks, `[…, blocks * bytes per block]`."""
    x = tensor("quantize", types, 0)
    form = _form("quantize", attrs)
    if not x.dtype.is_float():
        raise TypeError(f"quantize: the operand is {x.short}, expected a floating-point type")
    blocks = _blocks_of("quantize", x, attrs, form.elements, "elements")
    if len(types) > 1:
        weights = tensor("quantize", types, 1)
        if weights.dtype is not DType.float32:
            raise TypeError(f"quantize: the weights are {weights.short}, expected float32")
        if weights.shape != x.shape[-1:]:
            raise ValueError(
                f"quantize: the weights are {weights.short} for {x.short}, expected one for each of "
                f"{x.shape[-1]} columns"
            )
        same_device("quantize", [x, weights])
    shape = (*x.shape[:-1], blocks * form.bytes)
    return (TensorType.get(DType.uint8, shape, x.device),)


define(
    OpSpec(
        "mo.quantize",
        (1, 2),
        1,
        attributes={"encoding": str},
        infer=_infer_quantize,
        conditions=_whole_blocks("quantize", "elements"),
        takes="x `[…, elements]`, any float",
        doc="`encoding` = Q4_0, Q8_0; ui8 `[…, elements / elements_per_block * block_size]`",
    )
)


def _check_left(op: str, x: TensorType) -> None:
    """Checks that the left operand is float32, bfloat16 or float16 of rank 2 or more."""
    if x.dtype not in FLOATS:
        raise TypeError(
            f"{op}: the left operand is {x.short}, expected float32, bfloat16 or float16"
        )
    if x.rank < 2:
        raise ValueError(f"{op}: the left operand is {x.short}, expected rank 2 or more")


def _infer_qmatmul(types: Types, attrs: Attrs) -> Types:
    """The result: `[*x.shape[:-1], rows of the weight]`."""
    x, w = tensor("qmatmul", types, 0), tensor("qmatmul", types, 1)
    form = _form("qmatmul", attrs)
    _check_left("qmatmul", x)
    if w.dtype is not DType.uint8:
        raise TypeError(f"qmatmul: the weight is {w.short}, expected uint8 blocks")
    if w.rank != 2:
        raise ValueError(f"qmatmul: the weight is {w.short}, expected rank 2: rows of blocks")
    inner = _blocks_of("qmatmul", w, attrs, form.bytes, "bytes") * form.elements
    if x.shape[-1] != inner:
        raise ValueError(
            f"qmatmul: {x.short} by the {attrs['encoding']} weight {w.short}: the last dimension of the "
            f"left operand is {x.shape[-1]}, a row of the weight holds {inner} elements; they must be equal"
        )
    same_device("qmatmul", [x, w])
    return (x.with_shape([*x.shape[:-1], w.shape[0]]),)


QmatmulOp = define(
    OpSpec(
        "mo.qmatmul",
        (2, 2),
        1,
        attributes={"encoding": str},
        infer=_infer_qmatmul,
        conditions=_whole_blocks("qmatmul", "bytes", operand=1),
        flops=product_flops,
        packable=True,
        takes="x `[…, M, K]` f32, bf16 or f16, w ui8 `[N, bytes]`",
        doc=(
            "`encoding` as `mo.dequantize`; x's dtype `[…, M, N]`: `x @ dequantize(w).T`; "
            "kernels may round x to 8 bits in blocks of 32 (docs/quantization.md)"
        ),
    )
)


def _infer_qmatmul_gptq(types: Types, attrs: Attrs) -> Types:
    """The result: `[*x.shape[:-1], columns of the weight]`; checks the packed weight, zeros, scales and group index."""
    op = "qmatmul_gptq"
    x, weight, zeros, scales = (tensor(op, types, i) for i in range(4))
    bits, group = attrs["bits"], attrs["group_size"]
    if bits not in GPTQ_BITS:
        raise ValueError(f"{op}: bits is {bits}, expected {', '.join(map(str, GPTQ_BITS))}")
    if group < 1:
        raise ValueError(f"{op}: group_size is {group}, expected 1 or more")
    _check_left(op, x)
    for name, part in (("qweight", weight), ("qzeros", zeros)):
        if part.dtype is not DType.int32:
            raise TypeError(f"{op}: {name} is {part.short}, expected int32 of packed integers")
    if not scales.dtype.is_float():
        raise TypeError(f"{op}: scales is {scales.short}, expected a floating-point type")
    for name, part in (("qweight", weight), ("qzeros", zeros), ("scales", scales)):
        if part.rank != 2:
            raise ValueError(f"{op}: {name} is {part.short}, expected rank 2")
    # integers in an int32: along the inputs in qweight, along the outputs in qzeros
    packed = 32 // bits
    inner = weight.shape[0] * packed
    if x.shape[-1] != inner:
        raise ValueError(
            f"{op}: {x.short} by qweight {weight.short} of {bits} bits: the last dimension of the left "
            f"operand is {x.shape[-1]}, the weight has {inner} inputs; they must be equal"
        )
    # the last group may be shorter
    groups = (inner + (group - 1)) // group
    columns = weight.shape[1]
    for name, part, shape in (
        ("scales", scales, (groups, columns)),
        ("qzeros", zeros, (groups, columns // packed)),
    ):
        if part.shape != shape:
            raise ValueError(
                f"{op}: {name} is {part.short}, expected {shape[0]} groups of {group} inputs by {shape[1]}"
            )
    if columns.is_static and columns.value % packed:
        raise ValueError(
            f"{op}: qweight {weight.short}: the outputs must be a multiple of {packed} for {bits} bits"
        )
    operands = [x, weight, zeros, scales]
    if len(types) > 4:
        index = tensor(op, types, 4)
        if index.dtype is not DType.int32 or index.shape != (inner,):
            raise ValueError(
                f"{op}: g_idx is {index.short}, expected the group of each of {inner} inputs, int32"
            )
        operands.append(index)
    same_device(op, operands)
    return (x.with_shape([*x.shape[:-1], columns]),)


define(
    OpSpec(
        "mo.qmatmul_gptq",
        (4, 5),
        1,
        attributes={"bits": int, "group_size": int},
        infer=_infer_qmatmul_gptq,
        takes=(
            "x `[…, M, K]`, qweight si32 `[K * bits / 32, N]`, qzeros si32 `[groups, N * "
            "bits / 32]`, scales `[groups, N]`, [g_idx si32 `[K]`]"
        ),
        doc=(
            "`bits` = 2, 4, 8, `group_size`; `x @ (scales[g] * (q - (zeros[g] + 1) % 2 ** "
            "bits))`; g is `g_idx[k]`, else `k / group_size`; integers are packed with the "
            "lowest bits first"
        ),
    )
)
