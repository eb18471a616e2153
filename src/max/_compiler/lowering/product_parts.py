"""The parts of a launch of several products: the results and the epilogue of each."""

from __future__ import annotations

from xdsl.ir import SSAValue

from max._compiler.lowering.region_specs import RegionParts, epilogue_parts, needed_ops
from max._compiler.mok import ProductsOp, RegionOp
from max._dataclass import dataclass

__all__ = ["PartJob", "plan_products"]


@dataclass(frozen=True)
class PartJob:
    """One part of the launch.

    Args:
        products: The number of products.
        results: The stored values: the result of the epilogue, or each product.
        epilogue: The epilogue; None stores the sums.
        later: The result of the region that a later launch computes from the stored products.
    """

    products: int
    results: tuple[SSAValue, ...]
    epilogue: RegionParts | None = None
    later: int | None = None


def plan_products(op: ProductsOp, outer: RegionOp | None) -> list[PartJob]:
    """The jobs of all parts, in their order.

    Args:
        op: The products.
        outer: The region that contains them and their epilogues.
    """
    stored: dict[SSAValue, SSAValue] = {}
    ends: dict[int, int] = {}
    for number, value in enumerate(outer.results_in_body if outer is not None else ()):
        if value.owner is op:
            assert outer is not None
            # no epilogue: the region returns the product itself
            stored[value] = outer.results[number]
            continue
        operands = {operand for inner in needed_ops(value) for operand in inner.operands}
        ends.update((i, number) for i, result in enumerate(op.results) if result in operands)
    jobs: list[PartJob] = []
    for part in op.parts:
        products = [op.results[i] for i in part]
        number = ends.get(part[0])
        if number is None or outer is None:
            results = tuple([stored.get(value, value) for value in products])
            jobs.append(PartJob(len(part), results))
            continue
        epilogue = epilogue_parts(outer, op, products, outer.results_in_body[number])
        # the kernel cannot compute this epilogue on a tile: the products are stored, and a region follows
        if epilogue is None:
            jobs.append(PartJob(len(part), tuple(products), later=number))
        else:
            jobs.append(PartJob(len(part), (outer.results[number],), epilogue))
    return jobs
