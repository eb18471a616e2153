"""The function that a library kernel calls on its results before it stores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from max._compiler.codegen.expressions import (
    KERNEL_NAME,
    cast,
    compute_dtype,
    expression,
    literal,
    loaded,
    rounded,
)
from max._compiler.codegen.nest import ArgView, converted
from max._compiler.codegen.spec import Leaf, Literal, Node, RegionSpec, SizeOf
from max._compiler.layout import contiguous_strides

__all__ = ["EpilogueText", "write_epilogue", "write_part_epilogues"]


@dataclass(frozen=True)
class EpilogueText:
    """The text of an epilogue, and the views that it reads, in the order of `extra`."""

    source: str
    args: tuple[ArgView, ...]


class _Writer:
    def __init__(self, spec: RegionSpec, args: list[ArgView]) -> None:
        self.spec = spec
        self.args = args
        self.lines: list[str] = []
        self.names: dict[int, str] = {}
        self.vectors: dict[int, bool] = {}
        self.extra: dict[int, int] = {}

    def value(self, i: int) -> str:
        if i in self.names:
            return self.names[i]
        if (same := converted(self.spec, i)) != i:
            name = self.value(same)
            self.vectors[i] = self.vectors[same]
            return name
        value = self.spec.values[i]
        match value:
            case Literal():
                text, vector = literal(value.value, value.dtype), False
            case SizeOf():
                dim = self.spec.dims[value.axis]
                assert isinstance(dim, int)
                text, vector = literal(dim, value.dtype), False
            case Leaf():
                text, vector = self.load(i, value)
            case Node():
                text, vector = self.node(value)
        name = f"t{i}"
        if isinstance(value, Node) and value.op == "round_to":
            self.lines.append(f"    r{i} = {text}")
            text = loaded(f"r{i}", value.dtype)
        self.lines.append(f"    {name} = {text}")
        self.names[i], self.vectors[i] = name, vector
        return name

    def load(self, i: int, leaf: Leaf) -> tuple[str, bool]:
        where = [
            name for name, stride in zip(("row", "col"), leaf.strides, strict=True) if stride != 0
        ]
        view = f"extra[{self.extra[i]}]"
        if leaf.strides[1] != 0:
            return loaded(
                f"{view}.load({', '.join(where)}, width=v.width, mask=mask)", leaf.dtype
            ), True
        return loaded(f"{view}[{where[0] if where else '0'}]", leaf.dtype), False

    def node(self, node: Node) -> tuple[str, bool]:
        texts = [self.value(a) for a in node.args]
        vector = any(self.vectors[a] for a in node.args)
        if vector:
            texts = [
                text if self.vectors[a] else f"k.splat({text}, v.width)"
                for a, text in zip(node.args, texts, strict=True)
            ]
        first = self.spec.values[node.args[1] if node.op == "select" else node.args[0]]
        if node.op == "cast":
            return cast(texts[0], first.dtype, node.dtype), vector
        if node.op == "round_to":
            return rounded(texts[0], node.dtype), vector
        return expression(node.op, node.attr, first.dtype, texts), vector

    def write(self, products: list[str]) -> str:
        """Writes the body of an epilogue; gives the name of what is stored.

        Args:
            products: What the first leaves are; the others become arguments.
        """
        for i, product in enumerate(products):
            compute = KERNEL_NAME[compute_dtype(self.spec.values[i].dtype)]
            self.names[i], self.vectors[i] = f"t{i}", True
            self.lines.append(f"    t{i} = k.cast({product}, k.{compute})")
        for i, value in enumerate(self.spec.values):
            if i >= len(products) and isinstance(value, Leaf):
                axes = [axis for axis, stride in enumerate(value.strides) if stride != 0]
                shape = tuple(self.spec.dims[axis] for axis in axes) or (1,)
                strides = tuple(value.strides[axis] for axis in axes)
                dense = not axes or strides == contiguous_strides(shape)
                self.extra[i] = len(self.args)
                self.args.append(ArgView(value.dtype, shape, None if dense else strides, False))
        number, dtype = self.spec.results[0].value, self.spec.results[0].dtype
        name = self.value(number)
        number = converted(self.spec, number)
        value = self.spec.values[number]
        if isinstance(value, Node) and value.op == "round_to" and value.dtype is dtype:
            name = f"r{number}"
        return name if self.vectors[number] else f"k.splat({name}, v.width)"


def write_epilogue(spec: RegionSpec) -> EpilogueText:
    """Writes the epilogue ``epilogue(v, row, col, mask, extra)`` of a library kernel.

    Args:
        spec: A region over ``[rows, columns]`` whose first value is the kernel's result and which has one result.
    """
    args: list[ArgView] = []
    writer = _Writer(spec, args)
    name = writer.write(["v"])
    lines = ["def epilogue(v, row, col, mask, extra):", *writer.lines, f"    return {name}"]
    return EpilogueText("\n".join(lines) + "\n", tuple(args))


def write_part_epilogues(specs: Sequence[tuple[RegionSpec, int] | None]) -> EpilogueText:
    """Writes the epilogue ``epilogue(part, sums, row, col, mask, extra)`` of a kernel with several results; see `max._kernel_library.tiles.strips`.

    Args:
        specs: For each part a region as that of `write_epilogue`, whose first values are so many products; None where sums are stored.
    """
    args: list[ArgView] = []
    lines: list[str] = []
    for part, item in enumerate(specs):
        lines.append(f"def part_{part}(sums, row, col, mask, extra):")
        if item is None:
            lines += ["    return sums", ""]
            continue
        spec, products = item
        writer = _Writer(spec, args)
        name = writer.write([f"sums[{i}]" for i in range(products)])
        lines += ["    v = sums[0]", *writer.lines, f"    return ({name},)", ""]
    lines.append("def epilogue(part, sums, row, col, mask, extra):")
    for part in range(len(specs)):
        lines.append(f"    if part == {part}:")
        lines.append(f"        return part_{part}(sums, row, col, mask, extra)")
    return EpilogueText("\n".join(lines) + "\n", tuple(args))
