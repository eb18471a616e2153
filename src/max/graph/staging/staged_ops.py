"""The ops of a graph under construction: staging, source locations, symbols, numbers of random streams."""

# the documented names of chains start with an underscore
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from max import mlir
from max.graph.graph_options import ProfileScopeColor
from max.graph.staging.chains import Chains
from max.graph.staging.symbols import Symbols
from max.graph.staging.user_lines import location_at, user_place
from max.graph.value import TensorValue, Value, _ChainValue
from max.mlir.dims import DimExpr

__all__ = ["StagedOps"]


class StagedOps:
    """The base of `Graph`: its block of ops, to which ops of the user's program are appended."""

    name: str
    """The name of the graph."""
    root: Any
    """The entry graph of the module; the graph itself unless it is a subgraph."""
    _block: Any

    def _init_ops(self, name: str) -> None:
        self.name = name
        self._symbols = Symbols(name)
        self._chains = Chains(self.stage)
        self._num_resources = 0
        self._num_streams = 0
        self._seed: TensorValue | None = None
        self._place: tuple[str, int] | None = None
        self._scopes: tuple[str, ...] = ()

    @property
    def has_output(self) -> bool:
        """Whether `output` ended the graph."""
        last = self._block.last_op
        return last is not None and last.name == "mo.output"

    def stage(
        self,
        name: str,
        operands: Sequence[Value[Any]] = (),
        attrs: Mapping[str, Any] | None = None,
        result_types: Sequence[mlir.Attribute] | None = None,
    ) -> Sequence[mlir.OpResult]:
        """Appends an op to the graph.

        Args:
            name: The name of the op, such as ``mo.add``.
            operands: The operands.
            attrs: The attributes, as Python values.
            result_types: The types of the results; inferred if None.

        Returns:
            The results of the op.

        Raises:
            ValueError: The verifier rejects the operands, one belongs to another graph, or the outputs are already set.
            TypeError: The verifier rejects an operand's type.
        """
        block = self._block
        values = [operand.to_mlir() for operand in operands]
        for index, value in enumerate(values):
            if mlir.block_of(value) is not block:
                inner = self._captured_value(value)
                if inner is not None:
                    values[index] = inner
                    continue
                raise ValueError(
                    f"{name.removeprefix('mo.')}: operand {index} ({operands[index]!r}) is not "
                    f"of the graph {self.name}, which is being built"
                )
        place = self.root._place or user_place()
        location = location_at(*place, "/".join(self.root._scopes))
        op = mlir.build(name, values, attrs, result_types, location)
        if self.has_output:
            raise ValueError(
                f"{name.removeprefix('mo.')}: the graph {self.name} has its outputs already; "
                "stage all ops before output()"
            )
        block.add_op(op)
        if op.spec.introduces_symbols:
            self._symbols.add_of([result.type for result in op.results])
        return op.results

    def _captured_value(self, value: mlir.SSAValue) -> mlir.SSAValue | None:
        """The value of this graph for one of an enclosing graph; None if no enclosing graph defines it."""
        return None

    def stage_effect(
        self,
        name: str,
        operands: Sequence[Value[Any]],
        attrs: Mapping[str, Any] | None = None,
        result_types: Sequence[mlir.Attribute] | None = None,
    ) -> Sequence[mlir.OpResult]:
        """`stage` for an op with side effects: appends the chain to operands and results, and returns the other
        results.
        """
        if result_types is not None:
            result_types = (*result_types, mlir.ChainType.get())
        results = self.stage(name, (*operands, self._chains.current), attrs, result_types)
        self._chains.current = _ChainValue(results[-1])
        return results[:-1]

    def check_symbols(self, op: str, dims: Iterable[DimExpr], may_follow: bool = False) -> None:
        """Checks that each symbol of the dimensions is bound by a tensor of the graph.

        Args:
            op: The op, for messages.
            dims: The dimensions.
            may_follow: Whether a later op may bind a symbol; else `to_mlir` raises.

        Raises:
            ValueError: No tensor of the graph has the symbol.
        """
        self._symbols.check(op, dims, may_follow)

    def new_symbol(self, stem: str) -> str:
        """An unused symbol name, for a size that is computed when the graph runs."""
        return self._symbols.new(stem)

    @contextmanager
    def at_place(self, filename: str, line: int) -> Generator[None]:
        """Gives the ops that are staged in a ``with`` block this source location instead of that of the caller."""
        root = self.root
        before, root._place = root._place, (filename, line)
        try:
            yield
        finally:
            root._place = before

    @contextmanager
    def profile_scope(self, name: str, color: ProfileScopeColor | None = None) -> Generator[None]:
        """Names the ops that are staged in a ``with`` block, for profiles.

        `Model.profile` shows a kernel of these ops as ``kernel [name]``, in a scope within a scope as
        ``kernel [outer/inner]``, and errors of a run show the names behind the source line. A kernel that computes ops
        of several scopes is in that of its last op. Ops of a subgraph are in the scopes in which they were staged, not
        in that of the call. Scopes change neither the compiled code nor its place in the cache.

        Args:
            name: The name of the scope.
            color: A color for tools that draw; not used.

        Raises:
            TypeError: The name is no text, or the color no `ProfileScopeColor`.
            ValueError: The name is empty or has a line break.
        """
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"profile_scope: the name is {name!r}, expected text")
        if not name or "\n" in name:
            raise ValueError(f"profile_scope: the name is {name!r}, expected a line of text")
        if color is not None and not isinstance(color, ProfileScopeColor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"profile_scope: the color is {color!r}, expected a ProfileScopeColor")
        root = self.root
        before, root._scopes = root._scopes, (*root._scopes, name)
        try:
            yield
        finally:
            root._scopes = before

    # Random numbers

    def set_random_seed(self, seed: TensorValue) -> None:
        """Sets the seed of the graph's random tensors, a rank-0 int64 tensor on the CPU."""
        self._seed = seed

    def random_seed(self) -> TensorValue | None:
        """The seed that was set, or None."""
        return self._seed

    def reseed(self, seed: TensorValue) -> None:
        """Sets the seed, and numbers the random tensors that follow from 0 again."""
        self._seed = seed
        self.root._num_streams = 0

    def next_random_stream(self) -> int:
        """The stream number of the next random tensor, unique in the module."""
        root = self.root
        root._num_streams += 1
        return root._num_streams - 1

    def resource_key(self) -> str:
        """A new name for a constant of the graph."""
        root = self.root
        root._num_resources += 1
        return f"constant_{root._num_resources - 1}"

    # Side effects

    @property
    def always_ready_chain(self) -> _ChainValue:
        """A chain that waits for nothing and is never advanced."""
        return self._chains.ready
