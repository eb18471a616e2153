"""Which ops of a block `fuse` outlines together."""

from __future__ import annotations

import pytest

from max._backends.cpu.passes import packed_ops
from max._compiler import mok
from max._compiler.analysis.shapes import is_view
from max._compiler.mok import RegionOp
from max._compiler.passes.base import ops_of
from max._compiler.passes.fuse import fuse
from max.mlir import MoOp, entry, verify_module

pytestmark = pytest.mark.any_target

assert packed_ops, "the ops of the CPU are part of the dialect once their module is imported"
PACKED = "!mo.tensor<[2, 1024], f32, cpu:0>"
INPUTS = {"x": "32, 32", "y": "32, 32", "z": "32, 32", "v": "32"}
SCAN = "{axis = 1 : i64, exclusive = false, reverse = false}"
EPSILON = "epsilon = 1.0e-05 : f64"
RMS_NORM = f"{{{EPSILON}, weight_offset = 0.0 : f64, multiply_before_cast = true}}"
SPREADING = ("broadcast_to", "reshape", "rebind")


def typed(dims: str) -> str:
    return f"!mo.tensor<[{dims}], f32, cpu:0>"


class Text:
    """The text of a block.

    Args:
        inputs: The dims of each input.
    """

    def __init__(self, inputs: dict[str, str]) -> None:
        self.dims = dict(inputs)
        self.lines: list[str] = []

    def op(self, line: str) -> None:
        """Adds an op.

        Args:
            line: `NAMES = OP VALUES`, where OP has its axis after a dot, and a view the dims of its result after `->`.
        """
        left, right = line.split(" = ")
        right, _, given = right.partition(" -> ")
        name, *operands = right.split()
        name, _, axis = name.partition(".")
        results = left.split()
        dims = self.dims[operands[0]]
        attributes = f"{{axis = {axis} : i64}}" if axis else ""
        if name in SPREADING:
            dims = given
            attributes = '{message = ""}' if name == "rebind" else ""
        elif name == "slice":
            whole = f"stop = #mo.shape<[{dims}]>"
            start, step = (", ".join([n] * len(dims.split(", "))) for n in "01")
            attributes = f"{{start = #mo.shape<[{start}]>, {whole}, step = #mo.shape<[{step}]>}}"
        elif name == "transpose":
            dims = ", ".join(reversed(dims.split(", ")))
            attributes = "{perm = array<i64: 1, 0>}"
        elif name.startswith("reduce_"):
            sizes = dims.split(", ")
            sizes[int(axis)] = "1"
            dims = ", ".join(sizes)
        elif name == "cumsum":
            attributes = SCAN
        elif name == "rms_norm":
            attributes = RMS_NORM
        elif name == "layer_norm":
            attributes = f"{{{EPSILON}}}"
        elif name == "packed_matmul":
            operands.append("w")
            attributes = '{encoding = "rows", columns = 32 : i64, streamed = false}'
        elif name == "packed_products":
            operands.append("w")
            columns = ", ".join(["32"] * len(results))
            attributes = (
                f'{{encoding = "rows", columns = array<i64: {columns}>, '
                f"pairs = array<i64{': ' + axis if axis else ''}>, streamed = false}}"
            )
        dialect = "mok" if name.startswith("packed") else "mo"
        types = ", ".join(PACKED if value == "w" else typed(self.dims[value]) for value in operands)
        made = ", ".join([typed(dims)] * len(results))
        made = f"({made})" if len(results) > 1 else made
        names, values = (", ".join(f"%{each}" for each in some) for some in (results, operands))
        self.lines.append(
            f"{names} = {dialect}.{name}({values}) {attributes} : ({types}) -> {made}"
        )
        self.dims.update(dict.fromkeys(results, dims))


def fused(body: str, outputs: str, **inputs: str) -> list[str]:
    """The launches of a block: of each the names of the results of its ops, that of a region after its kind.

    Args:
        body: Its ops, separated by `; `: see `Text.op`.
        outputs: The names of its outputs.
        inputs: The dims of inputs that differ from `INPUTS`.
    """
    sizes = INPUTS | inputs
    text = Text(sizes)
    for line in body.split("; "):
        text.op(line)
    values = outputs.split()
    types = ", ".join(typed(text.dims[value]) for value in values)
    text.lines.append(f"mo.output({', '.join('%' + value for value in values)}) : ({types}) -> ()")
    given = ", ".join(f"%{name}: {typed(dims)}" for name, dims in sizes.items())
    lines = "\n".join(text.lines)
    module = mok.parse(
        f"builtin.module {{ mo.graph @g({given}, %w: {PACKED}) -> ({types}) {{ {lines} }} }}"
    )
    verify_module(module)
    fuse(entry(module).block)
    verify_module(module)
    launches: list[str] = []
    for op in ops_of(entry(module).block):
        if isinstance(op, RegionOp):
            launches.append(f"{op.kind}: {named(ops_of(op.block))}")
        elif op.name != "mo.output" and not is_view(op):
            launches.append(named([op]))
    return launches


def named(ops: list[MoOp]) -> str:
    """The names of the results of ops that are no views."""
    return " ".join(r.name_hint or "" for op in ops if not is_view(op) for r in op.results)


def chain(name: str, first: str, count: int) -> str:
    """A chain of `count` ops, the results of which are `NAME1`, `NAME2`, …

    Args:
        name: The beginning of their names.
        first: The first op and its operands.
        count: The number of ops.
    """
    return "; ".join(
        f"{name}{i} = {first if i == 1 else f'tanh {name}{i - 1}'}" for i in range(1, count + 1)
    )


def sizes_of(launches: list[str]) -> list[int]:
    """The number of ops of each launch."""
    return [len(launch.split()) - 1 for launch in launches]


@pytest.mark.parametrize(
    ("first", "size"),
    [("softmax.1 x", 6), ("logsoftmax.1 x", 6), ("layer_norm x v v", 8), ("rms_norm x v", 6),
     ("reduce_sum.1 x", 1), ("tanh x", 1)],
)  # fmt: skip
def test_a_region_has_at_most_96_ops(first: str, size: int) -> None:
    count = 97 - size
    assert sizes_of(fused(chain("a", first, count), f"a{count}")) == [count]
    assert sizes_of(fused(chain("a", first, count + 1), f"a{count + 1}")) == [count, 1]


def test_merged_groups_have_at_most_96_ops() -> None:
    def met(left: int, right: int) -> list[int]:
        both = chain("a", "tanh x", left) + "; " + chain("b", "tanh y", right)
        return sizes_of(fused(f"{both}; c = add a{left} b{right}", "c"))

    def siblings(*sizes: int) -> list[int]:
        chains = [chain(name, "tanh x", size) for name, size in zip("abc", sizes, strict=False)]
        outputs = [f"{name}{size}" for name, size in zip("abc", sizes, strict=False)]
        return sizes_of(fused("; ".join(chains), " ".join(outputs)))

    assert met(48, 48) == [97]
    assert met(48, 49) == [49, 49]
    assert siblings(48, 48) == [96]
    assert siblings(48, 49) == [48, 49]
    assert siblings(90, 50, 46) == [90, 96], "the first group is full"
    assert siblings(90, 50, 6) == [90, 56], "the last group could join either"


OVER_AXES = {
    "one axis": ("a = softmax.1 x; b = softmax.1 a", "b", ["rows: a b"]),
    "two axes": ("a = softmax.0 x; b = softmax.1 a", "b", ["rows: a", "rows: b"]),
    "two axes, the last first": ("a = softmax.1 x; b = softmax.0 a", "b", ["rows: a", "rows: b"]),
    "a map, then rows": ("a = tanh x; b = softmax.1 a", "b", ["rows: a b"]),
    "a map, then columns": ("a = tanh x; b = softmax.0 a", "b", ["rows: a b"]),
    "a map, columns and rows": (
        "a = tanh x; b = softmax.0 a; c = softmax.1 b", "c", ["rows: a b", "rows: c"],
    ),
    "a map, rows and columns": (
        "a = tanh x; b = softmax.1 a; c = softmax.0 b", "c", ["rows: a b", "rows: c"],
    ),
    "a map and rows that meet": (
        "a = tanh x; b = softmax.1 y; c = add a b; d = softmax.1 c", "d", ["rows: a b c d"],
    ),
    "a map and rows that meet, then columns": (
        "a = tanh x; b = softmax.1 y; c = add a b; d = softmax.0 c", "d", ["rows: a b c", "rows: d"],
    ),
    "a map and columns that meet, then rows": (
        "a = tanh x; b = softmax.0 y; c = add a b; d = softmax.1 c", "d", ["rows: a b c", "rows: d"],
    ),
    "rows and a map that meet, then columns": (
        "a = softmax.1 x; b = tanh y; c = add a b; d = softmax.0 c", "d", ["rows: a b c", "rows: d"],
    ),
    "rows that meet": ("a = softmax.1 x; b = softmax.1 y; c = add a b", "c", ["rows: a b c"]),
    "rows and columns that meet": (
        "a = softmax.1 x; b = softmax.0 y; c = add a b", "c", ["rows: b", "rows: a c"],
    ),
    "columns and rows that meet": (
        "a = softmax.0 x; b = softmax.1 y; c = add a b", "c", ["rows: b", "rows: a c"],
    ),
    "columns, and a map of them": ("a = softmax.0 x; b = tanh a", "b", ["rows: a b"]),
    "an axis of size 1 and no other": (
        "a = tanh x; r = reshape a -> 32, 1, 32; b = softmax.1 r; c = softmax.1 b; d = tanh c", "d",
        ["rows: a b c d"],
    ),
    "an axis of size 1, then another": (
        "r = reshape x -> 32, 1, 32; b = softmax.1 r; c = softmax.2 b", "c", ["rows: b", "rows: c"],
    ),
    "an axis, then one of size 1": (
        "r = reshape x -> 32, 1, 32; b = softmax.2 r; c = softmax.1 b", "c", ["rows: b", "rows: c"],
    ),
    "an axis of the same number without one of size 1 before it": (
        "r = reshape x -> 32, 1, 32; b = softmax.1 r; s = reshape b -> 32, 32; c = softmax.1 s", "c",
        ["rows: b", "rows: c"],
    ),
    "two axes of size 1 before the reduced one": (
        "r = reshape x -> 1, 1, 32, 32; b = softmax.3 r; s = reshape b -> 32, 32; c = softmax.1 s", "c",
        ["rows: b c"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OVER_AXES)
def test_ops_over_axes(name: str) -> None:
    """A region reduces one axis, at one place of its space."""
    body, outputs, launches = OVER_AXES[name]
    assert fused(body, outputs) == launches


SUM = "a = reduce_sum.1 x; "
ROWS = {
    "spread over their axis": (SUM + "r = broadcast_to a -> 32, 32; b = mul x r", "b", ["rows: a b"]),
    "spread over it beside another value": (
        SUM + "c = tanh y; r = broadcast_to a -> 32, 32; b = mul c r", "b", ["rows: a c b"],
    ),
    "spread over the other axis": (
        SUM + "q = reshape a -> 1, 32; r = broadcast_to q -> 32, 32; b = mul x r", "b",
        ["rows: a", "map: b"],
    ),
    "spread as a vector over the other axis": (
        SUM + "q = reshape a -> 32; r = broadcast_to q -> 32, 32; b = mul x r", "b",
        ["rows: a", "map: b"],
    ),
    "spread over other columns": (
        SUM + "r = broadcast_to a -> 32, 5; b = tanh r", "b", ["rows: a", "map: b"],
    ),
    "spread over their axis and one more": (
        SUM + "q = reshape a -> 1, 32, 1; r = broadcast_to q -> 3, 32, 32; b = tanh r", "b",
        ["rows: a", "map: b"],
    ),
    "spread with an axis of size 1": (
        SUM + "q = reshape a -> 32, 1, 1; r = broadcast_to q -> 32, 1, 32; b = tanh r", "b",
        ["rows: a b"],
    ),
    "of columns": (
        "a = reduce_sum.0 x; r = broadcast_to a -> 32, 32; b = mul x r", "b", ["rows: a b"],
    ),
    "of columns, spread over the other axis": (
        "a = reduce_sum.0 x; q = transpose a; r = broadcast_to q -> 32, 32; b = mul x r", "b",
        ["rows: a", "map: b"],
    ),
    "with ops on them": (
        SUM + "b = tanh a; c = exp b; r = broadcast_to c -> 32, 32; d = mul x r", "d", ["rows: a b c d"],
    ),
    "of columns, with ops on them": (
        "a = reduce_sum.0 x; b = tanh a; c = exp b; r = broadcast_to c -> 32, 32; d = mul x r", "d",
        ["rows: a b c d"],
    ),
    "with a softmax over all of them": (SUM + "b = softmax.0 a", "b", ["rows: a", "rows: b"]),
    "with ops on them as a vector": (
        SUM + "q = reshape a -> 32; b = tanh q; c = reshape b -> 32, 1; r = broadcast_to c -> 32, 32; "
        "d = mul x r", "d", ["rows: a b d"],
    ),
    "that are used twice": (
        SUM + "r = broadcast_to a -> 32, 32; b = mul x r; s = broadcast_to a -> 32, 32; c = add b s", "c",
        ["rows: a b c"],
    ),
    "whose spread values are reduced": (
        SUM + "r = broadcast_to a -> 32, 32; b = mul x r; c = reduce_max.1 b", "c", ["rows: a b c"],
    ),
    "beside a map of their size": (
        SUM + "q = reshape v -> 32, 1; b = tanh q; c = mul a b", "c", ["map: b", "rows: a c"],
    ),
    "after a map of their size": (
        "q = reshape v -> 32, 1; b = tanh q; a = reduce_sum.1 x; c = mul b a", "c",
        ["rows: a", "map: b c"],
    ),
    "reduced once more": (SUM + "b = reduce_sum.0 a", "b", ["rows: a", "rows: b"]),
    "of a matrix of one column": (
        "q = reshape v -> 32, 1; a = reduce_sum.1 q; b = tanh a; c = mul b q", "c", ["rows: a b c"],
    ),
    "of a map, and the map": ("b = tanh x; a = reduce_sum.1 b; c = exp b", "a c", ["rows: b a c"]),
    "of each of two values": (
        SUM + "b = reduce_max.1 y; c = add a b", "c", ["rows: a b c"],
    ),
}  # fmt: skip


def test_rows_of_the_axis_in_the_middle() -> None:
    body = "a = reduce_sum.1 u; b = tanh a; r = broadcast_to b -> 4, 8, 16; c = mul u r"
    assert fused(body, "c", u="4, 8, 16") == ["rows: a b c"]
    flat = "a = reduce_sum.1 u; q = reshape a -> 4, 16; b = tanh q"
    assert fused(flat, "b", u="4, 8, 16") == ["rows: a b"]


def test_a_dtype_that_kernels_do_not_compute_with() -> None:
    narrow = "!mo.tensor<[8], f8e8m0fnu, cpu:0>"
    text = f"%r = mo.cast(%x) : ({narrow}) -> {typed('8')} mo.output(%r) : ({typed('8')}) -> ()"
    module = mok.parse(
        f"builtin.module {{ mo.graph @g(%x: {narrow}) -> ({typed('8')}) {{ {text} }} }}"
    )
    verify_module(module)
    fuse(entry(module).block)
    assert [op.name for op in entry(module).block.ops] == ["mo.cast", "mo.output"]


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    """Values without the reduced axis: ops on them are in the region, and ops that spread them over that axis."""
    body, outputs, launches = ROWS[name]
    assert fused(body, outputs) == launches


VIEWS = {
    "axes of size 1": ("r = reshape a -> 32, 1, 32; b = exp r", True),
    "a rebind": ("r = rebind a -> 32, 32; b = exp r", True),
    "two views": ("q = rebind a -> 32, 32; r = reshape q -> 1, 32, 32; b = exp r", True),
    "other rows": ("r = reshape a -> 64, 16; b = exp r", False),
    "other rows and back": ("q = reshape a -> 64, 16; r = reshape q -> 32, 32; b = exp r", False),
    "repeated": ("q = reshape a -> 1, 32, 32; r = broadcast_to q -> 3, 32, 32; b = exp r", False),
    "a transpose": ("r = transpose a; b = exp r", False),
    "a slice": ("r = slice a; b = exp r", False),
    "a slice of a rebind": ("q = rebind a -> 32, 32; r = slice q; b = exp r", False),
    "a rebind of a slice": ("q = slice a; r = rebind q -> 32, 32; b = exp r", False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_a_value(name: str) -> None:
    """A view that keeps each element in its place is in the region of its operand."""
    body, together = VIEWS[name]
    assert fused(f"a = tanh x; {body}", "a b") == (
        ["map: a b"] if together else ["map: a", "map: b"]
    )


def test_operands_of_norms_have_regions_of_their_own() -> None:
    """Each row of the norm reads the whole weight."""
    assert fused("a = tanh v; b = rms_norm x a", "b") == ["map: a", "rows: b"]
    assert fused("a = softmax.0 v; c = tanh a; b = rms_norm c a", "b") == ["rows: a c", "rows: b"]
    assert fused("a = tanh x; b = rms_norm a v", "b") == ["rows: a b"]
    assert fused("c = tanh v; a = tanh x; b = layer_norm a v c", "b") == ["map: c", "rows: a b"]


def test_values_that_meet_twice() -> None:
    assert fused("a = tanh x; b = mul a a; c = add b a", "c") == ["map: a b c"]
    assert fused("a = tanh x; b = exp y; c = add a b; d = mul c b; e = mul d a", "e") == [
        "map: a b c d e"
    ]


CYCLES = {
    "through a scan": ("a = tanh x; s = cumsum a; b = add a s", "b", ["map: a", "s", "map: b"]),
    "through a scan, the scan first": (
        "a = tanh x; s = cumsum a; b = add s a", "b", ["map: a", "s", "map: b"],
    ),
    "through another group": (
        "a = tanh y; b = exp x; s = cumsum b; c = add a s; t = cumsum c; d = add b t", "d",
        ["map: b", "s", "map: a c", "t", "map: d"],
    ),
    "of two groups that would merge": (
        "a = tanh x; s = cumsum a; b = add s y; c = mul a b", "c", ["map: a", "s", "map: b c"],
    ),
    "of two groups that would merge, the later first": (
        "a = tanh x; s = cumsum a; b = add s y; c = mul b a", "c", ["map: a", "s", "map: b c"],
    ),
    "from before a merged group": (
        "a = tanh x; s = cumsum a; b = exp y; c = add b a; d = add c s", "d",
        ["map: a b c", "s", "map: d"],
    ),
    "through a group that waits for a later one": (
        "a = add y x; b = slice a; c = tanh y; d = slice c; e = add d a; f = mul b c", "e f",
        ["map: c", "map: a e", "map: f"],
    ),
    "of none, with a scan before both": (
        "s = cumsum x; a = tanh s; b = exp y; c = add a b", "c", ["s", "map: a b c"],
    ),
    "of none, with a scan of another group": (
        "a = tanh x; b = exp y; s = cumsum b; c = add a s", "c", ["map: b", "s", "map: a c"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CYCLES)
def test_no_region_waits_for_itself(name: str) -> None:
    body, outputs, launches = CYCLES[name]
    assert fused(body, outputs) == launches


SIBLINGS = {
    "of a matrix": ("a = tanh x; b = exp x", "a b", ["map: a b"]),
    "of a value": ("a = cumsum x; b = exp a; c = tanh a", "b c", ["a", "map: b c"]),
    "of two matrices": ("a = tanh x; b = exp y; c = mul x y; d = sin x", "a b c d", ["map: a b c d"]),
    "of two matrices, two by two": (
        "a = tanh x; b = exp y; c = sin x; d = cos y", "a b c d", ["map: a c", "map: b d"],
    ),
    "of a row": (
        "r = broadcast_to v -> 32, 32; a = add x r; q = broadcast_to v -> 32, 32; b = add y q", "a b",
        ["map: a", "map: b"],
    ),
    "of a row, over its own space": ("a = tanh v; b = exp v", "a b", ["map: a b"]),
    "of views of a matrix": ("q = slice x; a = tanh x; b = exp q", "a b", ["map: a b"]),
    "of slices of a value of another region": (
        "a = tanh x; q = slice a; b = exp q; r = slice a; c = sin r", "b c", ["map: a", "map: b c"],
    ),
    "of slices of a value of a region that was merged": (
        "a = tanh x; b = exp x; c = neg b; q = slice b; d = sin q; r = slice b; e = cos r", "a c d e",
        ["map: a b c", "map: d e"],
    ),
    "of other spaces": (
        "r = reshape x -> 1024; a = tanh x; b = exp r", "a b", ["map: a", "map: b"],
    ),
    "of a matrix, over rows": ("a = tanh x; b = softmax.1 x; c = exp x", "a b c", ["rows: a b c"]),
    "of a matrix, over rows and columns": (
        "a = softmax.0 x; b = softmax.1 x; c = softmax.0 x", "a b c", ["rows: b", "rows: a c"],
    ),
    "of a matrix, of which one waits for the other": (
        "a = tanh x; s = cumsum a; b = add s x", "b", ["map: a", "s", "map: b"],
    ),
    "of a matrix, of which one waits for a third": (
        "a = tanh x; s = cumsum y; b = add s x", "a b", ["s", "map: a b"],
    ),
    "of two matrices, each waiting for one of the other": (
        "a = neg x; q = slice a; c = neg y; r = slice c; b = add r x; d = add q y", "b d",
        ["map: c", "map: a b", "map: d"],
    ),
    "that the epilogue of a product is one of": (
        "p = packed_matmul x; a = add p z; b = tanh z; c = exp z", "a b c", ["library: p a", "map: b c"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIBLINGS)
def test_siblings(name: str) -> None:
    """Regions over one space that read a value as large as the space are one region."""
    body, outputs, launches = SIBLINGS[name]
    assert fused(body, outputs) == launches


EPILOGUES = {
    "some ops": ("p = matmul x y; a = tanh p; b = mul a z", "b", ["library: p a b"]),
    "none": ("p = matmul x y; q = slice p; a = tanh q", "a", ["p", "map: a"]),
    "two outputs": ("p = matmul x y; a = tanh p; b = exp a", "a b", ["p", "map: a b"]),
    "a product that is an output": ("p = matmul x y; a = tanh p", "p a", ["p", "map: a"]),
    "a product that another op reads": (
        "p = matmul x y; a = tanh p; s = cumsum p", "a s", ["p", "map: a", "s"],
    ),
    "rows": ("p = matmul x y; a = softmax.1 p", "a", ["p", "rows: a"]),
    "columns": ("p = matmul x y; a = softmax.0 p", "a", ["p", "rows: a"]),
    "a map and rows of it": ("p = matmul x y; a = tanh p; b = softmax.1 a", "b", ["p", "rows: a b"]),
    "the last of two products": ("p = matmul x y; q = matmul y x; a = mul p q", "a", ["p", "library: q a"]),
    "the first, as the last has another use": (
        "p = matmul x y; q = matmul y x; a = mul p q", "q a", ["q", "library: p a"],
    ),
    "an op of another shape": (
        "p = matmul x y; a = tanh p; r = reshape a -> 32, 1, 32; b = exp r", "b", ["p", "map: a b"],
    ),
    "an op of another shape first": (
        "r = reshape z -> 32, 1, 32; c = exp r; q = reshape c -> 32, 32; p = matmul x y; a = mul p q", "a",
        ["p", "map: c a"],
    ),
    "both products of one launch": (
        "l r = packed_products x; a = tanh l; b = exp r", "a b", ["library: l r a b"],
    ),
    "one product of a launch": ("l r = packed_products x; a = tanh r", "l a", ["library: l r a"]),
    "a pair": ("l r = packed_products.0 x; a = tanh l; b = mul a r", "b", ["library: l r a b"]),
    "no pair": ("l r = packed_products x; a = tanh l; b = mul a r", "b", ["l r", "map: a b"]),
    "half of a pair": ("l r = packed_products.0 x; a = tanh l", "r a", ["l r", "map: a"]),
    "a group that waits for another epilogue": (
        "l r = packed_products x; a = tanh l; s = cumsum a; b = mul r s", "b",
        ["library: l r a", "s", "map: b"],
    ),
    "a group that waits for the other product": (
        "l r = packed_products x; s = cumsum l; b = mul r s", "b", ["l r", "s", "map: b"],
    ),
    "a group that waits for another launch": (
        "l r = packed_products x; m n = packed_products y; s = cumsum m; b = mul r s; c = tanh n", "b c l",
        ["library: m n c", "s", "library: l r b"],
    ),
    "groups that wait for each other's products": (
        "l r = packed_products x; m n = packed_products y; a = tanh l; s = cumsum a; b = exp m; "
        "t = cumsum b; c = mul r t; d = mul n s", "c d",
        ["library: m n b", "t", "library: l r a c", "s", "map: d"],
    ),
    "a product of two launches": (
        "p = packed_matmul x; q = packed_matmul y; a = mul p q; b = tanh a", "b",
        ["p", "library: q a b"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name: str) -> None:
    """A group with one output that contains all users of a product is its epilogue."""
    body, outputs, launches = EPILOGUES[name]
    assert fused(body, outputs) == launches


def test_siblings_of_which_one_waits_for_an_epilogue_and_one_is_waited_for() -> None:
    """`t` and `u` read `y`. The launch of the product waits for `t`, which one of its epilogues reads."""
    body = (
        "l r = packed_products x; a = tanh l; q = slice a; t = neg y; o = slice t; b = mul r o; "
        "u = add q y"
    )
    assert fused(body, "b u") == ["map: t", "library: l r a b", "map: u"]


NORMS = {
    "of an input": ("n = rms_norm x v; p = packed_matmul n", "p", ["library: n p"]),
    "with an epilogue": ("n = rms_norm x v; p = packed_matmul n; a = tanh p", "a", ["library: n p a"]),
    "of several products": (
        "n = rms_norm x v; l r = packed_products n; a = tanh l", "a r", ["library: n l r a"],
    ),
    "of an op": ("a = tanh x; n = rms_norm a v; p = packed_matmul n", "p", ["map: a", "library: n p"]),
    "that is an output": ("n = rms_norm x v; p = packed_matmul n", "n p", ["rows: n", "p"]),
    "of two products": (
        "n = rms_norm x v; p = packed_matmul n; q = packed_matmul n", "p q", ["rows: n", "p", "q"],
    ),
    "of a view": ("q = slice x; n = rms_norm q v; p = packed_matmul n", "p", ["rows: n", "p"]),
    "with a view of a weight": ("q = slice v; n = rms_norm x q; p = packed_matmul n", "p", ["rows: n", "p"]),
    "of a product by a plain weight": ("n = rms_norm x v; p = matmul n y", "p", ["rows: n", "p"]),
    "that is a plain weight": ("n = rms_norm x v; p = matmul y n", "p", ["rows: n", "p"]),
    "before an op": ("n = rms_norm x v; a = tanh n; p = packed_matmul a", "p", ["rows: n a", "p"]),
    "of another kind": ("n = layer_norm x v v; p = packed_matmul n", "p", ["rows: n", "p"]),
    "of a product": (
        "p = packed_matmul x; n = rms_norm p v; q = packed_matmul n", "q", ["p", "library: n q"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_products(name: str) -> None:
    """An RMS norm that only a product by packed weights uses is in its launch."""
    body, outputs, launches = NORMS[name]
    assert fused(body, outputs) == launches
