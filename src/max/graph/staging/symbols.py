"""The symbols of a graph: names of sizes that its tensors bind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from max import mlir
from max._errors import UnboundDimError
from max.graph.staging.user_lines import user_place
from max.mlir.dims import DimExpr

__all__ = ["Symbols"]


class Symbols:
    """The symbols that tensors of a graph bind.

    Args:
        graph: The name of the graph, for messages.
        outer: The symbols of the enclosing graph, which a branch shares.
    """

    def __init__(self, graph: str, outer: Symbols | None = None) -> None:
        self._graph = graph
        # a copy: what a branch binds is unknown outside of it
        self._names: set[str] = set() if outer is None else set(outer._names)
        self._num_new = 0
        self._is_entry = False
        self.later: dict[str, tuple[str, str]] = {}
        """Symbols that were used before an op bound them: the first op that used each, and its place."""

    def declare_inputs(self, types: Sequence[mlir.Attribute], is_entry: bool) -> None:
        """Adds the symbols of the input types.

        Args:
            types: The types.
            is_entry: Whether the graph is the entry of the module, whose inputs must bind each symbol as a plain
                dimension.

        Raises:
            ValueError: A symbol of an entry graph occurs only inside expressions.
        """
        self._is_entry = is_entry
        shapes = [t.shape for t in types if isinstance(t, mlir.ShapedType)]
        plain = {dim.symbol_name for shape in shapes for dim in shape}
        for shape in shapes:
            for dim in shape:
                self._names.update(dim.symbols)
                missing = [name for name in dim.symbols if name not in plain]
                # a run reads sizes off the inputs: it cannot solve an expression for its symbols
                if missing and is_entry:
                    raise ValueError(
                        f"Graph {self._graph}: the input dimension {dim} depends on {missing[0]}, "
                        "which is not itself a dimension of an input"
                    )

    def add_of(self, types: Iterable[mlir.Attribute]) -> None:
        """Adds the symbols of the types of values."""
        for t in types:
            if isinstance(t, mlir.ShapedType):
                for dim in t.shape:
                    if not dim.is_static:
                        self._names.update(dim.symbols)

    def check(self, op: str, dims: Iterable[DimExpr], may_follow: bool = False) -> None:
        """Checks that each symbol of the dimensions is bound.

        Args:
            op: The op, for messages.
            dims: The dimensions.
            may_follow: Whether a later op of an entry graph may bind a symbol, as `nonzero` and `rebind` do.

        Raises:
            ValueError: A symbol is not bound.
        """
        for dim in dims:
            for name in dim.symbols:
                if name not in self._names:
                    if not (may_follow and self._is_entry):
                        raise ValueError(
                            f"{op}: the dimension {name!r} is unknown in the graph {self._graph}; "
                            f"known: {self._known_symbols()}"
                        )
                    self.later[name] = op, "{}:{}".format(*user_place())
                    self._names.add(name)

    def _known_symbols(self) -> str:
        return ", ".join(sorted(self._names - self.later.keys())) or "none"

    def check_bound(self) -> None:
        """Checks, for a complete graph, that no symbol is left that only uses have.

        Raises:
            UnboundDimError: There is one.
        """
        for name, (op, place) in self.later.items():
            raise UnboundDimError(
                f"{op} (staged at {place}): nothing in the graph {self._graph} gives the dimension {name!r} a size; "
                f"inputs and ops such as rebind and nonzero do; known: {self._known_symbols()}"
            )

    def new(self, stem: str) -> str:
        """An unused name."""
        self._num_new += 1
        name = f"{stem}_{self._num_new}"
        return name if name not in self._names else self.new(stem)
