"""Row thresholds without models: what is stored and found, and which launches are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from max._backends.backend import Tuning
from max._compiler.program.code import (
    FixedBuffer,
    LaunchCode,
    LimitCode,
    SlotCode,
)
from max._config import flags
from max._host.disk_cache import default_cache, source_fingerprint
from max.engine.tune import row_thresholds
from max.engine.tune.row_thresholds import (
    QUIET,
    USABLE,
    Threshold,
    ThresholdStore,
    _sample,
    find_thresholds,
)

pytestmark = pytest.mark.any_target

TUNING = Tuning(least_bytes=100, sample_bytes=300, most_rows=128)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    monkeypatch.setattr(row_thresholds, "process_thresholds", ThresholdStore())
    with flags.override(MAX_AUTOTUNE=True, MAX_CACHE_DIR=tmp_path):
        yield


def launch(name: str | None, *fixed: int) -> LaunchCode:
    """A launch that reads fixed buffers, with a threshold of that name."""
    limit = None if name is None else LimitCode(0, name, 64, SlotCode(0, 0))
    slots = (SlotCode(0, 8), *(SlotCode(0, 0, number) for number in fixed))
    return LaunchCode("kernel", slots, False, False, "product", limit=limit)


def program(launches: Sequence[LaunchCode], sizes: Sequence[int] = (1000,) * 8) -> Any:
    return SimpleNamespace(
        main=SimpleNamespace(launches=list(launches)),
        fixed_buffers=[FixedBuffer("weight", size) for size in sizes],
    )


def device(key: str = "cpu", workers: int = 4, tuning: Tuning | None = TUNING) -> Any:
    return SimpleNamespace(tuning=tuning, target=SimpleNamespace(cache_key=key), workers=workers)


def test_of_two_results_the_one_of_better_quality_is_kept() -> None:
    store = ThresholdStore()
    assert store.get("key") is None
    assert store.keep("key", Threshold(3, 0.5)) and store.get("key") == (3, 0.5)
    # an equal one would only be written again
    assert not store.keep("key", Threshold(4, 0.5)) and not store.keep("key", Threshold(4, 0.25))
    assert store.get("key") == (3, 0.5) == ThresholdStore().get("key")
    assert ThresholdStore().keep("key", Threshold(5, 0.75)) and ThresholdStore().get("key") == (
        5,
        0.75,
    )
    # what the process knows goes before the disk
    assert store.get("key") == (3, 0.5) and store.get("other") is None
    assert store.keep("key", Threshold(6, 1.0)) and store.get("key") == (6, 1.0)
    for text in (b"", b"x" * 11, b"x" * 13):
        default_cache().put("limits", "damaged", text)
        assert store.get("damaged") is None


@given(
    sizes=st.lists(st.integers(0, 120) | st.integers(301, 400), min_size=1, max_size=6),
    reads=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6),
)
def test_the_smallest_weights_are_the_sample(sizes: list[int], reads: list[list[int]]) -> None:
    launches = [launch("x", *(number % len(sizes) for number in numbers)) for numbers in reads]
    found = _sample(program(launches, sizes), launches, TUNING)
    # a buffer that a launch reads twice counts once
    read = [sum(sizes[n] for n in {number % len(sizes) for number in numbers}) for numbers in reads]
    if sum(read) < TUNING.least_bytes:
        assert found == []
        return
    order = sorted(range(len(read)), key=lambda i: (read[i], i))
    count = max(
        n for n in range(len(read) + 1) if sum(read[i] for i in order[:n]) <= TUNING.sample_bytes
    )
    assert list(map(id, found)) == [id(launches[i]) for i in order[: max(count, 1)]]


def test_limits_of_a_sample_are_included() -> None:
    launches = [launch("x", 0), launch("x", 1)]
    for sizes, count in (
        ((50, 50), 2),
        ((50, 49), 0),
        ((150, 150), 2),
        ((150, 151), 1),
        ((400, 500), 1),
    ):
        assert _sample(program(launches, sizes), launches, TUNING) == launches[:count]
    assert _sample(program(launches, (500, 400)), launches, TUNING) == launches[1:]
    assert _sample(program([], ()), [], Tuning(1, 1, 1)) == []


def test_thresholds_are_found_by_name_device_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(name: str = "a", **options: Any) -> str:
        (unsure,) = find_thresholds(
            program([launch(name, 1), launch(None, 2)]), device(**options)
        ).unsure
        assert unsure.name == name and unsure.sample == [launch(name, 1)]
        return unsure.key

    keys = [key(), key("b"), key(key="cpu avx2"), key(workers=5)]
    for package in ("_backends", "kernel", "engine"):
        with monkeypatch.context() as patch:

            def edited(asked: str, package: str = package) -> str:
                return "edited" if asked == package else source_fingerprint(asked)

            patch.setattr(row_thresholds, "source_fingerprint", edited)
            keys.append(key())
    assert len(set(keys)) == len(keys) and key() == keys[0]
    store = row_thresholds.process_thresholds
    for quality, is_used, is_measured in (
        (USABLE - 0.1, False, True), (USABLE, True, True), (0.7, True, True), (QUIET, True, False), (1.0, True, False),
    ):  # fmt: skip
        store._known = {keys[0]: Threshold(33, quality)}
        found = find_thresholds(program([launch("a", 1), launch("b", 2), launch("a", 3)]), device())
        assert found.rows == ({"a": 33} if is_used else {})
        assert [each.name for each in found.unsure] == (["a", "b"] if is_measured else ["b"])


def test_nothing_is_looked_up_where_nothing_can_be_measured() -> None:
    launches = [launch("a", 1)]

    def found(on: Any = None, **values: bool) -> int:
        with flags.override(**values):
            result = find_thresholds(program(launches), on or device())
        assert not result.rows
        return len(result.unsure)

    assert found() == 1
    assert found(device(tuning=None)) == 0
    assert found(MAX_AUTOTUNE=False) == found(MAX_KERNEL_INTERPRET=True) == 0
    # little work first, then more
    launches = [launch("small"), launch("a", 1)]
    assert found() == 1
