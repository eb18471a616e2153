"""The parts in which a model computes results at load: when weights are read for the last time; no model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from max._compiler.program.code import FixedBuffer, LaunchCode, SlotCode
from max.engine.load import load_time_results
from max.engine.load.load_time_results import inputs_of, needed_later

KINDS = ["weight", "kept", "weight", "constant", "weight", "weight"]


def launch(*fixed: int) -> LaunchCode:
    slots = (SlotCode(0, 0), *(SlotCode(0, 0, index) for index in fixed))
    return LaunchCode("k", slots, True, False, "k")


def code(launches: Sequence[LaunchCode], bounds: Sequence[int] = (), shape: Sequence[int] = ()) -> Any:  # fmt: skip
    step = SimpleNamespace(
        bounds=[SlotCode(0, 0, index) for index in bounds],
        shape=[SlotCode(0, 0, index) for index in shape],
    )
    return SimpleNamespace(launches=list(launches), host_steps=[step])


def compiled(**parts: Any) -> Any:
    fixed = [FixedBuffer(kind, 10 * (index + 1)) for index, kind in enumerate(KINDS)]
    return SimpleNamespace(fixed=fixed, **{"main": code([]), "later": [], "once": [], **parts})


def parts(
    launches: Sequence[LaunchCode], part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, set[int], set[int]]]:
    """The number of launches of each part, the weights that it reads, and those read for the last time."""
    monkeypatch.setattr(load_time_results, "PART_BYTES", part_bytes)
    found = list(load_time_results._parts(compiled(), launches))
    assert [one for part, _, _ in found for one in part] == list(launches)
    return [(len(part), read, finished) for part, read, finished in found]


def test_parts_end_where_enough_is_read_for_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights 0, 2, 4 and 5 have 10, 30, 50 and 60 bytes; buffers that are no weights do not count."""
    launches = [launch(0, 1), launch(2, 0, 3), launch(4), launch(2), launch(5)]
    # 0 after the second launch, 4 after the third
    assert parts(launches, 60, monkeypatch) == [
        (3, {0, 2, 4}, {0, 4}), (2, {2, 5}, {2, 5}),
    ]  # fmt: skip
    assert parts(launches, 61, monkeypatch) == [
        (4, {0, 2, 4}, {0, 2, 4}), (1, {5}, {5}),
    ]  # fmt: skip
    assert parts(launches, 1000, monkeypatch) == [(5, {0, 2, 4, 5}, {0, 2, 4, 5})]
    assert parts(launches, 1, monkeypatch) == [
        (2, {0, 2}, {0}), (1, {4}, {4}), (1, {2}, {2}), (1, {5}, {5}),
    ]  # fmt: skip


def test_the_last_part_may_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts([launch(0), launch(1)], 10, monkeypatch) == [(1, {0}, {0}), (1, set(), set())]
    assert parts([], 10, monkeypatch) == []


def test_what_executions_read_and_what_is_computed_once() -> None:
    """Of all segments, their launches and what the host does after them."""
    model = compiled(
        main=code([launch(0), launch(1)], bounds=[3]),
        later=[code([launch(2)]), code([], shape=[4])],
        once=[code([launch(5, 1)]), code([launch()], bounds=[0])],
    )
    assert needed_later(model) == {0, 1, 2, 3, 4}
    assert inputs_of(model) == {0, 1, 5}


@pytest.mark.parametrize(("device", "count"), [(0, 2), (1, 1)])
def test_programs_of_other_devices_run_at_once(
    device: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that no execution reads are dropped after all of them."""
    once = [code([launch(0, 1, 2)]), code([launch(3, 4)])][:count]
    for part in once:
        part.device = device
    model = compiled(once=once, main=code([launch(2)]))
    calls = list[tuple[str, set[int]]]()
    monkeypatch.setattr(load_time_results, "_run_segments", lambda *_: calls.append(("run", set())))
    load_time_results.run_once(
        model, pytest.fail, [], None, None,
        lambda read: calls.append(("prepare", read)), lambda done: calls.append(("drop", done)),
    )  # type: ignore[arg-type]  # fmt: skip
    dropped = {0, 4} if count == 2 else {0}
    used = {0, 1, 2, 3, 4} if count == 2 else {0, 1, 2}
    assert calls == [("prepare", used), ("run", set()), ("drop", dropped)]
