"""What a graph under construction keeps beside its ops: numbers of streams and constants, scopes, symbols, seeds."""

from __future__ import annotations

from typing import Any

import pytest

from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.graph.graph_options import ProfileScopeColor
from max.mlir.dims import DimExpr

VECTOR = TensorType(DType.float32, ("n",), DeviceRef.CPU())


def seed_of(number: int) -> TensorValue:
    return ops.constant(number, DType.int64, DeviceRef.CPU())


def test_random_streams_are_numbered_in_the_module_and_from_0_after_a_seed() -> None:
    with Graph("g") as graph:
        assert graph.random_seed() is None
        assert [graph.next_random_stream() for _ in range(3)] == [0, 1, 2]
        subgraph = graph.add_subgraph("s", lambda: None)
        assert subgraph.next_random_stream() == 3
        first, second = seed_of(1), seed_of(2)
        graph.set_random_seed(first)
        assert graph.random_seed() is first
        assert graph.next_random_stream() == 4
        graph.reseed(second)
        assert graph.random_seed() is second
        assert [graph.next_random_stream() for _ in range(2)] == [0, 1]


def test_constants_have_names_of_their_own_in_a_module() -> None:
    with Graph("g") as graph:
        names = [graph.resource_key() for _ in range(3)]
        names.append(graph.add_subgraph("s", lambda: None).resource_key())
    assert names == [f"constant_{number}" for number in range(4)]


def test_scopes_nest_and_end_also_with_an_error() -> None:
    def scopes(value: Any) -> str:
        return value.to_mlir().owner.location.scope

    with Graph("g", input_types=[VECTOR]) as graph:
        x = graph.inputs[0].tensor
        with graph.profile_scope("outer", next(iter(ProfileScopeColor))):
            with pytest.raises(KeyError), graph.profile_scope("inner"):
                assert scopes(x + 1) == "outer/inner"
                raise KeyError
            assert scopes(x + 2) == "outer"
        assert scopes(x + 3) == ""


@pytest.mark.parametrize(
    ("name", "color", "error"),
    [
        (3, None, TypeError),
        ("", None, ValueError),
        ("a\nb", None, ValueError),
        ("a", "red", TypeError),
    ],
)
def test_scopes_with_other_arguments(name: Any, color: Any, error: type[Exception]) -> None:
    with Graph("g") as graph, pytest.raises(error, match="profile_scope"):
        graph.profile_scope(name, color).__enter__()


def test_symbols_that_no_tensor_binds_are_refused_where_they_are_used() -> None:
    with Graph("g", input_types=[VECTOR]) as graph:
        graph.check_symbols("op", [DimExpr.symbol("n") * 2])
        with pytest.raises(ValueError, match="m"):
            graph.check_symbols("op", [DimExpr.symbol("m")])
        graph.check_symbols("op", [DimExpr.symbol("m")], may_follow=True)
        fresh = graph.new_symbol("n")
        assert fresh != "n" and graph.new_symbol("n") not in ("n", fresh)


def test_the_chain_that_waits_for_nothing_stays_the_same() -> None:
    with Graph("g", input_types=[VECTOR]) as graph:
        ready = graph.always_ready_chain.to_mlir()
        ops.print("text")
        assert graph.always_ready_chain.to_mlir() is ready


def test_ops_have_the_place_that_is_stated() -> None:
    with Graph("g", input_types=[VECTOR]) as graph:
        x = graph.inputs[0].tensor
        with graph.at_place("/elsewhere.py", 77):
            assert "/elsewhere.py" in str((x + 1).to_mlir().owner.location)
        assert "/elsewhere.py" not in str((x + 1).to_mlir().owner.location)
