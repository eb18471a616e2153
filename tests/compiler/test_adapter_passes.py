"""The passes for adapters on modules: which products take their terms, and what the launches are told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from xdsl.ir import SSAValue

from max._backends.cpu.passes.adapted_products import (
    attach_adapters,
    insert_adapted,
    project_adapters,
)
from max._backends.cpu.passes.packed_ops import (
    AdaptedMatmulOp,
    AdaptedProductsOp,
    PackedMatmulOp,
    ProjectAdaptersOp,
)
from max.dtype import DType
from max.mlir import Block, MoOp, TensorType, build, line_location
from max.mlir.builtin import UNKNOWN_LOC
from max.mlir.dims import DimExpr
from max.mlir.ops.elementwise import CastOp
from max.mlir.ops.models.adapters import LoraAddOp, lora_place_size, lora_place_starts

F32, BF16, F64, I64 = DType.float32, DType.bfloat16, DType.float64, DType.int64
INNER, RANK = 64, 4


def tensor(dtype: DType, *shape: int | str) -> TensorType:
    return TensorType.get(
        dtype, [DimExpr.symbol(d) if isinstance(d, str) else DimExpr.of(d) for d in shape]
    )


class Module:
    """A block with the arguments of products with adapters: `x`, a packed weight, and what `mo.lora.add` takes."""

    def __init__(self, dtype: DType = F32) -> None:
        types = [
            tensor(dtype, "n", INNER), tensor(dtype, 2, 2048), tensor(BF16, 2, 9000), tensor(DType.int32, 2, 3, 2),
            tensor(DType.int32, "n"), tensor(DType.int32, "n"), tensor(F32, "n"), tensor(DType.int32, 1),
            tensor(I64, 2), tensor(I64, 2), tensor(BF16, "n", INNER),
        ]  # fmt: skip
        self.block = Block(arg_types=types)
        self.x, self.weight, *self.adapters, self.place, self.other_place, self.other = (
            self.block.args
        )

    def add(self, op: MoOp) -> SSAValue:
        self.block.add_op(op)
        return op.results[0]

    def product(self, x: SSAValue, columns: int = 40, encoding: str = "columns") -> SSAValue:
        op = PackedMatmulOp.of(x, self.weight, encoding, columns, False, UNKNOWN_LOC)
        return self.add(op)

    def cast(self, x: SSAValue, dtype: DType) -> SSAValue:
        assert isinstance(x.type, TensorType)
        return self.add(build(CastOp, (x,), {}, (TensorType.get(dtype, x.type.shape),)))

    def terms(
        self,
        y: SSAValue,
        x: SSAValue,
        offset: int = 128,
        site: int = 1,
        place: SSAValue | None = None,
    ) -> SSAValue:
        attrs = {"max_rank": RANK, "inputs": INNER, "site": site, "offset": offset}
        operands = (y, x, *self.adapters, self.place if place is None else place)
        return self.add(build(LoraAddOp, operands, attrs))

    def output(self, *values: SSAValue) -> list[MoOp]:
        """Ends the block, and returns the ops before."""
        self.add_output(values)
        return self.ops()

    def add_output(self, values: Sequence[SSAValue]) -> None:
        self.end = build("mo.output", values)
        self.block.add_op(self.end)

    def ops(self) -> list[MoOp]:
        return [op for op in self.block.ops if isinstance(op, MoOp) and op is not self.end]


def attached(module: Module, *outputs: SSAValue) -> list[MoOp]:
    module.add_output(outputs)
    attach_adapters(module.block, lambda op: True)
    check_uses(module)
    return module.ops()


def check_uses(module: Module) -> None:
    """No op that was removed reads a value: passes ask who uses one."""
    for value in module.block.args:
        assert all(use.operation.parent is module.block for use in value.uses)


def test_a_product_takes_the_terms() -> None:
    module = Module()
    (op,) = attached(module, module.terms(module.product(module.x), module.x))
    assert type(op) is AdaptedMatmulOp
    assert [*op.operands] == [module.x, module.weight, *module.adapters, module.place]
    assert module.end.operands[0] is op.results[0]
    assert (op.attr("columns"), op.attr("site"), op.attr("max_rank")) == (40, (128, 1), RANK)
    assert (op.attr("encoding"), op.attr("dtype")) == ("columns", F32)


@pytest.mark.parametrize("encoding", ["rows", "Q4_K"])
def test_formats_of_weights(encoding: str) -> None:
    module = Module()
    y = module.product(module.x, encoding=encoding)
    (op,) = attached(module, module.terms(y, module.x))
    assert type(op) is AdaptedMatmulOp and op.attr("encoding") == encoding


def test_casts_around_a_product() -> None:
    """Of its result, of x, of its x alone, and of the x of the terms alone: the numbers are those of one x."""
    module = Module()
    x = module.cast(module.other, F32)
    ops = attached(module, module.terms(module.product(x), x))
    assert [type(op) for op in ops] == [CastOp, AdaptedMatmulOp]
    module = Module(BF16)
    y = module.cast(module.product(module.x), F32)
    (op,) = attached(module, module.terms(y, module.x))
    assert type(op) is AdaptedMatmulOp and op.attr("dtype") == F32
    assert op.operands[0] is module.x
    module = Module()
    cast, *rest = attached(
        module, module.terms(module.product(module.cast(module.other, F32)), module.other)
    )
    assert type(cast) is CastOp and [type(op) for op in rest] == [AdaptedMatmulOp]
    assert rest[0].operands[0] is cast.results[0]
    module = Module()
    wide = module.cast(module.x, BF16)
    cast, *rest = attached(module, module.terms(module.product(module.x), wide))
    assert type(cast) is CastOp and [type(op) for op in rest] == [AdaptedMatmulOp]
    assert rest[0].operands[0] is module.x


def kept(module: Module, *outputs: SSAValue, here: bool = True) -> bool:
    """Whether the pass changes nothing."""
    module.add_output(outputs)
    before = module.ops()
    attach_adapters(module.block, lambda op: here)
    return module.ops() == before and [*module.end.operands] == [*outputs]


def test_what_takes_no_terms() -> None:
    module = Module()
    assert kept(module, module.terms(module.product(module.x), module.x), here=False)
    # another op than a packed product, also behind a cast
    module = Module()
    assert kept(module, module.terms(module.x, module.x))
    module = Module()
    assert kept(module, module.terms(module.cast(module.other, F32), module.x))
    module = Module()
    assert kept(module, module.terms(module.add(build("mo.neg", (module.x,))), module.x))
    # the product, or its cast, is read elsewhere too
    module = Module()
    y = module.product(module.x)
    assert kept(module, module.terms(y, module.x), y)
    module = Module()
    y = module.cast(module.product(module.x), BF16)
    assert kept(module, module.terms(y, module.x), y)
    module = Module()
    y = module.product(module.x)
    assert kept(module, module.terms(module.cast(y, BF16), module.x), y)
    # a format without such launches
    module = Module()
    assert kept(module, module.terms(module.product(module.x, encoding="other"), module.x))
    # the terms are of another x, or of one that was cast otherwise
    module = Module()
    assert kept(
        module, module.terms(module.product(module.x), module.add(build("mo.neg", (module.x,))))
    )
    module = Module()
    assert kept(module, module.terms(module.product(module.x), module.cast(module.other, F32)))
    # products of 64 bits
    module = Module(F64)
    y = module.cast(module.product(module.x), F32)
    assert kept(module, module.terms(y, module.cast(module.x, F32)))


def test_other_terms_stay() -> None:
    """One module with a product that takes its terms, and others before and after it."""
    module = Module()
    first = module.terms(module.x, module.x)
    middle = module.terms(module.product(module.x), module.x)
    last = module.terms(module.x, module.x)
    ops = attached(module, first, middle, last)
    assert [type(op) for op in ops] == [LoraAddOp, AdaptedMatmulOp, LoraAddOp]
    assert [*module.end.operands] == [op.results[0] for op in ops]


def adapted(module: Module, columns: Sequence[int], places: Sequence[SSAValue]) -> list[MoOp]:
    """The launches of products one after the other, whose sites follow each other in a place."""
    values, offset = [], 0
    for size, place in zip(columns, places, strict=True):
        values.append(module.terms(module.product(module.x, size), module.x, offset, 7, place))
        offset += lora_place_size(RANK, INNER, size)
    module.add_output(values)
    attach_adapters(module.block, lambda op: True)
    project_adapters(module.block, lambda op: True)
    check_uses(module)
    ops = module.ops()
    assert [type(op) for op in ops] == [ProjectAdaptersOp, AdaptedProductsOp] * len(columns)
    assert [*module.end.operands] == [op.results[0] for op in ops[1::2]]
    for project, products in zip(ops[::2], ops[1::2], strict=True):
        assert [*products.operands] == [
            module.x, module.weight, *project.results, module.adapters[0], module.adapters[4],
        ]  # fmt: skip
    return ops


def test_each_launch_reads_the_sites_of_the_next_one() -> None:
    """What follows B of the first product: the place of the next launch, or of the next block's first one."""
    module, columns = Module(), (40, 96, 64)
    ops = adapted(module, columns, [module.place] * 3)
    sizes = [lora_place_size(RANK, INNER, size) for size in columns]
    starts = [0, sizes[0], sizes[0] + sizes[1], sum(sizes)]
    for index, (project, products) in enumerate(zip(ops[::2], ops[1::2], strict=True)):
        assert [*project.operands] == [module.x, *module.adapters, module.place]
        assert project.attr("sites") == ((starts[index], 7, columns[index]),)
        b = starts[index] + lora_place_starts(RANK, INNER, columns[index])[0]
        assert products.attr("next") == (starts[index + 1] - b,)
        assert products.attr("next_inputs") == INNER
    (alone,) = adapted(module := Module(), [40], [module.place])[1::2]
    assert alone.attr("next") == (sizes[0] - lora_place_starts(RANK, INNER, 40)[0],)


def test_a_launch_of_several_products() -> None:
    """It is where the first op was, with the sites of all; the next launch follows the sites of all."""
    module, columns = Module(), (40, 96, 64)
    sizes = [lora_place_size(RANK, INNER, size) for size in columns]
    values = [
        module.terms(module.product(module.x, size), module.x, offset, site)
        for size, offset, site in zip(columns, (0, sizes[0], sum(sizes[:2])), (3, 4, 5), strict=True)
    ]  # fmt: skip
    first, second, _ = attached(module, *values)
    first.location, second.location = line_location("model.py", 7), line_location("model.py", 8)
    merged = insert_adapted([first, second], module.weight, (0,), first)
    for op, result in zip((first, second), (merged.results[0], module.x), strict=True):
        op.results[0].replace_all_uses_with(result)
        op.detach()
        op.erase()
    project_adapters(module.block, lambda op: True)
    check_uses(module)
    ops = module.ops()
    assert [type(op) for op in ops] == [ProjectAdaptersOp, AdaptedProductsOp] * 2
    assert ops[0].attr("sites") == ((0, 3, 40), (sizes[0], 4, 96))
    assert ops[0].location is ops[1].location is merged.location
    assert merged.location == line_location("model.py", 7)
    assert (merged.attr("columns"), merged.attr("pairs")) == ((40, 96), (0,))
    after = lora_place_starts(RANK, INNER, 40)[0]
    assert merged.attr("next") == (sum(sizes[:2]) - after,)
    # the last one is followed by the first one of the next block, which has two sites
    b = sum(sizes[:2]) + lora_place_starts(RANK, INNER, 64)[0]
    assert ops[3].attr("next") == (sum(sizes) - b, sum(sizes) + sizes[0] - b)


def test_the_next_block_begins_after_all_sites_of_the_last_launch() -> None:
    module, sizes = Module(), [lora_place_size(RANK, INNER, size) for size in (40, 96)]
    values = [
        module.terms(module.product(module.x, size), module.x, offset, 1)
        for size, offset in ((40, 0), (96, sizes[0]))
    ]
    members = attached(module, *values)
    merged = insert_adapted(members, module.weight, (), members[0])
    for op, result in zip(members, merged.results, strict=True):
        op.results[0].replace_all_uses_with(result)
        op.detach()
        op.erase()
    project_adapters(module.block, lambda op: True)
    b = lora_place_starts(RANK, INNER, 40)[0]
    assert merged.attr("next") == (sum(sizes) - b, sum(sizes) + sizes[0] - b)


def test_launches_of_other_places_are_not_read_ahead() -> None:
    module = Module()
    first, second, third = adapted(
        module, (40, 40, 40), [module.place, module.other_place, module.other_place]
    )[1::2]
    assert first.attributes.keys() == third.attributes.keys()
    assert "next" not in first.attributes and "next_inputs" not in third.attributes
    assert "next" in second.attributes


def test_a_block_without_adapters() -> None:
    module = Module()
    module.add_output([module.product(module.x)])
    before = module.ops()
    for step in (attach_adapters, project_adapters):
        step(module.block, lambda op: True)
        assert module.ops() == before
