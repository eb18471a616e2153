"""The spread of many times is that of NumPy, whether the times are kept or counted in classes."""

from __future__ import annotations

import numpy as np
import pytest

from max.entrypoints.load_test import times
from max.entrypoints.load_test.times import Times


def expected(values: np.ndarray) -> dict[str, float]:
    ordered = np.sort(values) * 1e3
    places = {"p90": 0.9, "p99": 0.99, "max": 1.0}
    found = {
        name: ordered[min(int(at * len(ordered)), len(ordered) - 1)] for name, at in places.items()
    }
    return {"mean": ordered.mean(), "median": np.median(ordered), **found}


@pytest.mark.parametrize("count", [1, 2, 999, 1000, 1001, 5000])
def test_many_times_are_counted(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "MOST_EXACT", 1000)
    draw = np.random.default_rng(count)
    # some are equal, some 0, and they differ by five orders of magnitude
    values = np.concatenate([draw.lognormal(-4, 3, count - count // 3), np.zeros(count // 3)])
    values = np.repeat(draw.permutation(values), 3)[:count]
    kept = Times()
    for part in np.array_split(values, 7):
        kept.add(part.tolist())
    for _ in range(2):  # to ask changes nothing
        found, wanted = kept.percentiles(), expected(values)
        assert list(found) == list(wanted)
        # the middle of a class is at most half its width from each time in it
        exact = 1e-12 if count <= 1000 else 1 / 8000
        for name, value in wanted.items():
            limit = 1e-12 if name in ("mean", "max") else exact
            assert found[name] == pytest.approx(value, rel=limit, abs=1e-300), name


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "MOST_EXACT", 1000)
    draw, kept = np.random.default_rng(0), Times()
    for _ in range(300):
        kept.add(draw.uniform(1.0, 2.0, 400).tolist())
        assert len(kept._values) <= 1000 and len(kept._classes) <= 4096
    assert kept.percentiles()["median"] == pytest.approx(1500, rel=0.01)


def test_no_times() -> None:
    kept = Times()
    assert kept.percentiles() == {}
    kept.add([])
    assert kept.percentiles() == {}
