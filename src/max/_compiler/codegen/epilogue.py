"""The function that a library kernel calls on its results before it stores them."""

from __future__ import annotations

from collections.abc import Sequence

from max._backends.regions import ArgView, Leaf, RegionSpec
from max._compiler.codegen.expressions import KERNEL_NAME, compute_dtype
from max._compiler.codegen.values import ValueWriter
from max._dataclass import dataclass

__all__ = ["EpilogueText", "write_epilogue", "write_part_epilogues"]


@dataclass(frozen=True)
class EpilogueText:
    """The text of an epilogue, and the views that it reads, in the order of `extra`."""

    source: str
    args: tuple[ArgView, ...]


class _Body:
    """The body of an epilogue over a strip ``v`` of the result at ``row``, ``col``.

    Args:
        spec: The region, over ``[rows, columns]``.
        args: The views that the function reads; those of this body are appended.
        sums: The expressions of the first leaves; the other leaves become arguments.
    """

    def __init__(self, spec: RegionSpec, args: list[ArgView], sums: Sequence[str]) -> None:
        self.spec = spec
        self.lines: list[str] = []
        # axis 1 has the columns of a strip; the sums are its vectors
        self.writer = ValueWriter(spec, self, 1, "v.width", range(len(sums)))
        self.extra: dict[int, int] = {}
        for i, text in enumerate(sums):
            name = self.writer.names[i] = self.writer.fresh()
            compute = KERNEL_NAME[compute_dtype(spec.values[i].dtype)]
            self.add(f"{name} = k.cast({text}, k.{compute})")
        for i, value in enumerate(spec.values):
            # the first values are the sums, which the kernel passes
            if i >= len(sums) and isinstance(value, Leaf):
                self.extra[i] = len(args)
                # a vector over rows or columns has one axis only
                axes = [axis for axis, stride in enumerate(value.strides) if stride != 0]
                args.append(ArgView.of(spec, value.dtype, value.strides, axes))
        result = spec.results[0]
        self.result = self.writer.operand(result.value, True, result.dtype)

    def add(self, text: str) -> None:
        self.lines.append("    " + text)

    def load(self, i: int, leaf: Leaf) -> str:
        index = [name for name, step in zip(("row", "col"), leaf.strides, strict=True) if step != 0]
        view = f"extra[{self.extra[i]}]"
        if self.writer.is_vector(i):
            return f"{view}.load({', '.join(index)}, width=v.width, mask=mask)"
        return f"{view}[{index[0] if index else '0'}]"

    def size(self, axis: int) -> str:
        dim = self.spec.dims[axis]
        assert isinstance(dim, int), f"axis {axis} has no static size"
        return str(dim)


def write_epilogue(spec: RegionSpec) -> EpilogueText:
    """Writes the epilogue ``epilogue(v, row, col, mask, extra)`` of a library kernel.

    Args:
        spec: A region over ``[rows, columns]`` whose first value is the kernel's result and which has one result.
    """
    args: list[ArgView] = []
    body = _Body(spec, args, ["v"])
    lines = ["def epilogue(v, row, col, mask, extra):", *body.lines, f"    return {body.result}"]
    return EpilogueText("\n".join(lines) + "\n", tuple(args))


def write_part_epilogues(specs: Sequence[tuple[RegionSpec, int] | None]) -> EpilogueText:
    """Writes the epilogue ``epilogue(part, sums, row, col, mask, extra)`` of a kernel with several results.

    `max._backends.cpu.kernels.tiles.strips` calls it.

    Args:
        specs: For each part a region as in `write_epilogue`, and the number of products that its first values are;
            None if the sums are stored as they are.
    """
    args: list[ArgView] = []
    lines: list[str] = []
    for part, item in enumerate(specs):
        lines.append(f"def part_{part}(sums, row, col, mask, extra):")
        if item is None:
            lines += ["    return sums", ""]
            continue
        spec, products = item
        body = _Body(spec, args, [f"sums[{i}]" for i in range(products)])
        # the body takes its width from `v`
        lines += ["    v = sums[0]", *body.lines, f"    return ({body.result},)", ""]
    lines.append("def epilogue(part, sums, row, col, mask, extra):")
    for part in range(len(specs)):
        lines.append(f"    if part == {part}:")
        lines.append(f"        return part_{part}(sums, row, col, mask, extra)")
    return EpilogueText("\n".join(lines) + "\n", tuple(args))
