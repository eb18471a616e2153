"""Which files of prefixes a folder keeps: drawn traces of files that are written, against a plain simulation."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from max.pipelines.kv_cache.prefix_costs import (
    StoredFile,
    cost_of_key,
    files_to_remove,
    key_with_cost,
)

EVENTS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 40), st.integers(1, 600)), min_size=1, max_size=30
)
"""The model whose file is written, its size, and the seconds since the event before."""


@settings(max_examples=200, deadline=None)
@given(
    events=EVENTS,
    costs=st.lists(st.floats(0.1, 100), min_size=10, max_size=10),
    bound=st.integers(1, 120),
)
def test_a_trace_of_files(events, costs, bound) -> None:
    """The folder is within its bound, and no removed file could take the place of one that is kept and worth less."""
    now, written = 0.0, dict[int, tuple[int, float]]()
    for model, size, seconds in events:
        now += seconds
        written[model] = (size, now)
        files = {
            m: StoredFile(Path(f"{m}"), own, now - begin, costs[m])
            for m, (own, begin) in written.items()
        }
        room = bound - size
        others = [file for m, file in files.items() if m != model]
        removed = files_to_remove(others, room)
        kept = [file for file in others if file not in removed]
        assert sum(file.size for file in kept) <= max(room, 0)
        for file in removed:
            # with all that are worth more, it does not fit
            better = [o.size for o in kept if (o.rank, o.path) < (file.rank, file.path)]
            assert sum(better) + file.size > room
            del written[int(file.path.name)]
    assert len(written) > 0


def test_what_is_dear_stays_longer() -> None:
    """A file of the same size, written before, whose pages take four times the work."""
    dear, cheap = StoredFile(Path("a"), 60, 300, 4.0), StoredFile(Path("b"), 60, 100, 1.0)
    assert files_to_remove([cheap, dear], 100) == [cheap]
    old = StoredFile(Path("a"), 60, 500, 4.0)
    assert files_to_remove([cheap, old], 100) == [old]
    small = StoredFile(Path("c"), 30, 900, 1.0)
    assert files_to_remove([cheap, dear, small], 100) == [cheap], "a small one still fits"
    assert files_to_remove([dear, small], -1) == [dear, small]
    # all are new: no rank is 0
    new = [StoredFile(Path("a"), 60, 0, 1.0), StoredFile(Path("b"), 60, 0, 2.0)]
    assert files_to_remove(new, 60) == new[:1]


@given(cost=st.floats(1, 2.0**31))
def test_keys_state_the_cost(cost: float) -> None:
    key = key_with_cost("0" * 32, cost)
    found = cost_of_key(key)
    assert found is not None and abs(found / cost - 1) < 0.05 and len(key) == 34
    assert cost_of_key(key[:-2]) is None, "of an earlier version"
    assert cost_of_key("0" * 32 + "g1") is None and cost_of_key("") is None


def test_costs_out_of_range() -> None:
    assert cost_of_key(key_with_cost("0" * 32, 0.0)) == 1.0
    assert cost_of_key(key_with_cost("0" * 32, 1e30)) == 2.0 ** (255 / 8)
