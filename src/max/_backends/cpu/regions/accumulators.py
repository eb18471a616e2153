"""The accumulators of a region's reductions, and how the parts of long sums are put together."""

from __future__ import annotations

from max._backends.regions import REDUCTIONS, Node, RegionSpec
from max._compiler.codegen.expressions import KERNEL_NAME, combine, compute_dtype, identity
from max._compiler.codegen.values import ValueWriter, cast_source
from max.dtype import DType

__all__ = ["Accumulators", "Lines", "condition_of", "is_float_sum", "is_reduction"]

PIECE = {DType.float32: 128, DType.float64: 512}
"""The most elements that a lane adds up before their sum goes into a wide sum: the error of a sum grows with this
number, not with the length of the axis."""


class Lines:
    """Lines of source at a depth of indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1

    def add(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def open(self, text: str) -> None:
        self.add(text)
        self.depth += 1


class Accumulators:
    """Writes the steps of reductions.

    Args:
        spec: The region.
        values: Writes the values that are reduced.
        out: The lines of the kernel.
        columns: Whether each lane has a reduction of its own.
        width: Lanes of a vector.
    """

    def __init__(
        self, spec: RegionSpec, values: ValueWriter, out: Lines, columns: bool, width: int
    ) -> None:
        self.spec = spec
        self.values = values
        self.out = out
        self.columns = columns
        self.width = width

    def start_of(self, i: int) -> str:
        """The accumulator of a reduction before its first step."""
        node = self.spec.values[i]
        assert isinstance(node, Node)
        start = identity(node.op, node.dtype)
        vector = self.values.is_vector(node.args[0]) or not self.columns
        return f"k.splat({start}, {self.width})" if vector else start

    def in_pieces(self, i: int, blocked: bool) -> bool:
        """Whether a reduction is a sum of floats over so many elements that it is computed in pieces.

        Args:
            i: The reduction.
            blocked: Whether the axis is cut into blocks already: that of a row which the workers share, or the lanes'.
        """
        node = self.spec.values[i]
        assert isinstance(node, Node)
        size = self.spec.dims[-1]
        # blocks of a row are parts already, and are added in a wide sum
        if not is_float_sum(node) or (blocked and not self.columns):
            return False
        return not (isinstance(size, int) and size <= self.piece(i))

    def piece(self, i: int) -> int:
        """The elements of the axis in one piece of a sum."""
        steps = PIECE[compute_dtype(self.spec.values[i].dtype)]
        return steps if self.columns else steps * self.width

    def wide_sum(self, part: str) -> str:
        """The variables of a wide sum of parts such as `part`."""
        name = f"{self.values.fresh()}, {self.values.fresh()}"
        self.out.add(f"{name} = fn.no_sum({part})")
        return name

    def rounded_sum(self, i: int, wide: str) -> str:
        """A wide sum, in the compute type of the reduction."""
        dtype = compute_dtype(self.spec.values[i].dtype)
        return f"fn.rounded_sum({wide}, k.{KERNEL_NAME[dtype]})"

    def accumulate(self, i: int, name: str) -> None:
        """One step of a reduction; lanes beyond the end keep their accumulator."""
        node = self.spec.values[i]
        assert isinstance(node, Node)
        factors = self.factors(node)
        if factors:
            # a product that is only added up is one instruction with its sum
            x, y = (self.values.operand(a, self.values.is_vector(node.args[0])) for a in factors)
            combined = f"k.fma({x}, {y}, {name})"
        else:
            text = self.values.operand(node.args[0], not self.columns)
            combined = combine(node.op, name, text)
        if self.columns:
            self.out.add(f"{name} = {combined}")
            return
        # only the last vector of a row may have a mask
        self.out.open("if m is None:")
        self.out.add(f"{name} = {combined}")
        self.out.depth -= 1
        self.out.open("else:")
        self.out.add(f"{name} = k.select(m, {combined}, {name})")
        self.out.depth -= 1

    def factors(self, node: Node) -> tuple[int, ...]:
        """The factors of the products that a reduction adds up, if it can add each without rounding it first."""
        if not is_float_sum(node):
            return ()
        index = cast_source(self.spec, node.args[0])
        product = self.spec.values[index]
        if not isinstance(product, Node) or product.op != "mul":
            return ()
        # a product that is written already, as are all that do not vary along the axis, would be computed twice
        written = index in self.values.names or index in (self.values.scope or {})
        return () if written else product.args

    def finish_all(self, accumulators: dict[int, str]) -> None:
        """The results of some reductions from their accumulators."""
        for i, name in accumulators.items():
            self.finish(i, name)

    def finish(self, i: int, name: str) -> None:
        """The result of a reduction: the accumulator, in rows combined across its lanes."""
        node = self.spec.values[i]
        assert isinstance(node, Node)
        if self.columns:
            self.values.names[i] = name
            return
        row = self.values.fresh()
        across = {"reduce_sum": "reduce_add"}.get(node.op, node.op)
        self.out.add(f"{row} = k.{across}({name})")
        self.values.names[i] = row


def condition_of(reduction: object) -> int | None:
    """The value that says whether a row needs a reduction; None for reductions without a condition."""
    assert isinstance(reduction, Node)
    return reduction.args[1] if len(reduction.args) > 1 else None


def is_reduction(value: object) -> bool:
    """Whether a value of a region reduces another one along the innermost axis."""
    return isinstance(value, Node) and value.op in REDUCTIONS


def is_float_sum(node: Node) -> bool:
    """Whether a node is a sum of floats."""
    return node.op == "reduce_sum" and node.dtype.is_float()
