"""The parts in which a model computes results at load: when weights are read for the last time; no model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from max._abi import BaseLayout
from max._backends import BackendOptions, backends_for
from max._compiler.program.code import FixedBuffer, LaunchCode, ProgramCode, SlotCode
from max.engine.load import load_time_results
from max.engine.load.load_time_results import inputs_of, needed_later
from tests.devices.fake import fake_devices

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
    return SimpleNamespace(
        fixed_buffers=fixed, **{"main": code([]), "later": [], "once": [], **parts}
    )


def parts(
    launches: Sequence[LaunchCode], part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, set[int], set[int]]]:
    """The number of launches of each part, the weights that it reads, and those read for the last time."""
    monkeypatch.setattr(load_time_results, "PART_BYTES", part_bytes)
    found = list(load_time_results._parts(compiled(), launches))
    assert [one for part, _, _ in found for one in part] == list(launches)
    return [(len(part), read, finished) for part, read, finished in found]


def test_parts_end_where_enough_is_read_for_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights 0, 2, 4 and 5 have 10, 30, 50 and 60 bytes, the constant 3 has 40; results do not count."""
    launches = [launch(0, 1), launch(2, 0, 3), launch(4), launch(2), launch(5)]
    # 0 and 3 after the second launch, 4 after the third
    assert parts(launches, 100, monkeypatch) == [
        (3, {0, 2, 3, 4}, {0, 3, 4}), (2, {2, 5}, {2, 5}),
    ]  # fmt: skip
    assert parts(launches, 101, monkeypatch) == [
        (4, {0, 2, 3, 4}, {0, 2, 3, 4}), (1, {5}, {5}),
    ]  # fmt: skip
    assert parts(launches, 1000, monkeypatch) == [(5, {0, 2, 3, 4, 5}, {0, 2, 3, 4, 5})]
    assert parts(launches, 1, monkeypatch) == [
        (2, {0, 2, 3}, {0, 3}), (1, {4}, {4}), (1, {2}, {2}), (1, {5}, {5}),
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
    dropped = {0, 3, 4} if count == 2 else {0}
    used = {0, 1, 2, 3, 4} if count == 2 else {0, 1, 2}
    assert calls == [("prepare", used), ("run", set()), ("drop", dropped)]


def test_parts_of_the_host_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files give back the pages of weights read for the last time; what executions read stays."""
    monkeypatch.setattr(load_time_results, "PART_BYTES", 1)
    backends = backends_for([], BackendOptions())
    launches = [launch(0), launch(2), launch(4)]
    once = ProgramCode(launches=launches)
    layout = BaseLayout(0, 0)
    model = compiled(once=[once], main=code([launch(2)]), symbols=("n", "m"), bases=layout)
    calls = list[tuple[str, Any]]()

    def link(part: ProgramCode) -> Any:
        def instance(symbols: tuple[int, ...]) -> Any:
            assert symbols == (0, 0)
            return SimpleNamespace(arena_bytes=100, holes=())

        def run(_: Any, bases: bytes) -> None:
            words = np.frombuffer(bases, np.int64)
            assert words.size == layout.count() and words[layout.arena()] != 0
            calls.append(
                ("run", [index for index, one in enumerate(launches) if one in part.launches])
            )

        return SimpleNamespace(instance=instance, run=run)

    steps = list[tuple[int, int]]()
    monkeypatch.setattr(
        load_time_results, "STEPS", SimpleNamespace(at=lambda _, *step: steps.append(step))
    )
    load_time_results.run_once(
        model, link, [1000 * index for index in range(6)], backends,
        SimpleNamespace(give_back=lambda *span: calls.append(("give back", span))),
        lambda read: calls.append(("prepare", read)), lambda done: calls.append(("drop", done)),
    )  # type: ignore[arg-type]  # fmt: skip
    assert calls == [
        ("prepare", {0}), ("run", [0]), ("give back", (0, 10)), ("drop", {0}),
        ("prepare", {2}), ("run", [1]), ("give back", (2000, 30)), ("drop", set()),
        ("prepare", {4}), ("run", [2]), ("give back", (4000, 50)), ("drop", {4}),
    ]  # fmt: skip
    assert steps == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("waits", [False, True])
def test_segments_have_arenas_of_their_own(waits: bool) -> None:
    """Those without launches only carry out their host steps; devices with a queue are waited for."""
    calls = list[str]()
    with fake_devices(1) as (device,):
        backends = backends_for([device], BackendOptions())
        layout = BaseLayout(0, 0)
        arenas = list[int]()

        def link(part: Any) -> Any:
            def run(_: Any, bases: bytes) -> None:
                words = np.frombuffer(bases, np.int64)
                arenas.append(int(words[layout.arena(part.number)]))
                calls.append(f"run {part.number}")

            return SimpleNamespace(
                instance=lambda symbols: SimpleNamespace(arena_bytes=64, holes=()) if symbols == (0,) else None,
                backend=backends[part.device], empty=part.number == 1, waits=waits and part.device == 1, run=run,
                run_host_steps=lambda *_: calls.append(f"host {part.number}"),
            )  # fmt: skip

        parts = [SimpleNamespace(device=device, number=i) for i, device in enumerate((0, 0, 1))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                type(backends[1]), "synchronize", lambda self: calls.append("synchronize")
            )
            load_time_results._run_segments(
                compiled(once=parts, symbols=("n",), bases=layout), link
            )
    assert calls == ["run 0", "host 0", "host 1", "run 2", "host 2"] + ["synchronize"] * waits
    assert len(set(arenas)) == 2 and all(arenas)
