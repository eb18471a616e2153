"""The IR that methods of matrix tiles emit."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from max._dataclass import dataclass
from max.kernel.errors import KernelError, KernelIndexError, KernelTypeError, KernelValueError
from max.kernel.frontend.conversions import as_index
from max.kernel.frontend.functions.table import HandlerTable
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import Index, Runtime, describe
from max.kernel.frontend.views.memory import check_bytes
from max.kernel.frontend.views.views import View, address, check_indices
from max.kernel.ir.nodes import Atom, Const, Ref
from max.kernel.language import lang
from max.kernel.language import tile_values as rules

_KINDS: dict[type[Exception], type[KernelError]] = {
    IndexError: KernelIndexError,
    TypeError: KernelTypeError,
    ValueError: KernelValueError,
}


@dataclass(frozen=True, slots=True, eq=False)
class TilesValue(Runtime):
    """``k.matrix_tiles(shapes)``: the shapes of the tiles; the tiles are registers."""

    shapes: rules.Shapes

    def __str__(self) -> str:
        return f"{len(self.shapes)} matrix tiles"


def _checked_result(fe: Frontend, rule: Callable[..., Any], *args: Any) -> Any:
    """The result of a rule over compile-time arguments; its errors become errors of the kernel."""
    for x in args:
        if isinstance(x, (Ref, Const)):
            fe.fail(f"matrix tiles are known at compile time, got {describe(x)}")
    try:
        return rule(*args)
    except (IndexError, TypeError, ValueError) as error:
        fe.fail(str(error), _KINDS[type(error)])


FUNCTIONS = HandlerTable()


@FUNCTIONS.emits(lang.matrix_tiles)
def emit_matrix_tiles(fe: Frontend, shapes: Any) -> TilesValue:
    """``k.matrix_tiles(shapes)``."""
    return TilesValue(_checked_result(fe, rules.tile_shapes, shapes))


def configure(fe: Frontend, tiles: TilesValue) -> None:
    """``tiles.configure()``."""
    fe.b.effect("tile_configure", (), tiles.shapes)


def release(fe: Frontend, tiles: TilesValue) -> None:
    """``tiles.release()``."""
    fe.b.effect("tile_release", ())


def zero(fe: Frontend, tiles: TilesValue, tile: Any) -> None:
    """``tiles.zero(tile)``."""
    _checked_result(fe, rules.check_tile, tiles.shapes, tile)
    fe.b.effect("tile_zero", (), (tile,))


def _memory(
    fe: Frontend,
    tiles: TilesValue,
    tile: Any,
    view: Any,
    indices: tuple[Any, ...],
    stride: Any,
    access: str,
) -> tuple[Atom, Atom, tuple[int, int, int]]:
    """Resolves a tile in memory: its address, the bytes between rows, and the tile with its shape."""
    rows, size = shape = _checked_result(fe, rules.check_tile, tiles.shapes, tile)
    if not isinstance(view, View):
        fe.fail(f"a matrix tile is loaded from and stored to a view, got {describe(view)}")
    count = _checked_result(fe, rules.check_elements, shape, view.dtype)
    if len(indices) == 1 and isinstance(indices[0], tuple):
        indices = indices[0]
    if len(indices) != view.rank or view.rank == 0:
        fe.fail(f"{view.name} takes {view.rank} indices, got {len(indices)}", KernelIndexError)
    # tile instructions stride between rows, not within one
    if view.strides[-1] != 1:
        fe.fail(f"{view.name}: rows of a matrix tile must be contiguous")
    if stride is None and view.rank < 2:
        fe.fail(f"{view.name} has no rows; stride= sets their distance")
    step: Index = view.strides[-2] if stride is None else as_index(fe, stride)
    check_indices(fe, view, indices, count)
    if stride is None:
        last_row = list(indices)
        last_row[-2] = fe.b.add(as_index(fe, last_row[-2]), rows - 1)
        check_indices(fe, view, tuple(last_row))
    else:
        # all rows lie in the view if the first and the last one do
        last = fe.b.add(as_index(fe, indices[-1]), fe.b.mul(step, rows - 1))
        check_indices(fe, view, (*indices[:-1], last), count)
    pointer = address(fe, view, indices)
    last_pointer = fe.b.gep(pointer, fe.b.mul(step, rows - 1), view.dtype)
    # rows between the first and the last are between them in memory too
    for row in (pointer, last_pointer):
        check_bytes(fe, view.memory, row, size, access)
    return pointer, fe.b.index(fe.b.mul(step, view.dtype.size)), (tile, rows, size)


def load(
    fe: Frontend, tiles: TilesValue, tile: Any, view: Any, *indices: Any, stride: Any = None
) -> None:
    """``tiles.load(tile, view, i, j)``."""
    pointer, step, attr = _memory(fe, tiles, tile, view, indices, stride, "read")
    fe.b.effect("tile_load", (pointer, step), attr)


def store(
    fe: Frontend, tiles: TilesValue, tile: Any, view: Any, *indices: Any, stride: Any = None
) -> None:
    """``tiles.store(tile, view, i, j)``."""
    pointer, step, attr = _memory(fe, tiles, tile, view, indices, stride, "write")
    if not view.writable:
        fe.fail(f"{view.name} is a k.Input and cannot be written; declare it k.Output or k.InOut")
    fe.b.effect("tile_store", (pointer, step), attr)


def dot(
    fe: Frontend, tiles: TilesValue, c: Any, a: Any, b: Any, left: Any, right: Any = None
) -> None:
    """``tiles.dot(c, a, b, k.bf16)``."""
    name = _checked_result(fe, rules.check_product, tiles.shapes, c, a, b, left, right)
    fe.b.effect("tile_dot", (), (name, c, a, b, tiles.shapes[c][0], tiles.shapes[b][0]))


TILE_METHODS: dict[str, Callable[..., Any]] = {
    "configure": configure,
    "release": release,
    "zero": zero,
    "load": load,
    "store": store,
    "dot": dot,
}
