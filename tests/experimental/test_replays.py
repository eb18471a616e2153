"""Calls that leave a trace late: at the same lines, with the same arguments, they are other calls or ask for others."""

from __future__ import annotations

import _thread
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from max.experimental import Tensor, array_api
from max.experimental import functional as F
from max.experimental.replay import replays

RNG = np.random.default_rng(8)


def array(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def same(got: Tensor, want: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(got.to_numpy(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_another_op_on_the_same_operands(position: int) -> None:
    for turn in range(12):
        a = array(3, 4)
        ops: list[tuple[Any, Any]] = [(F.tanh, np.tanh)] * 3
        if turn in (7, 8, 11):
            ops[position] = (F.sin, np.sin)
        x, want = Tensor.constant(a), a
        for ours, numpys in ops:
            x, want = ours(x), numpys(want)
        same(x, want)


SOURCES = ("number", "real", "z", "w", "none")


@pytest.mark.parametrize(("usual", "other"), [(u, o) for u in SOURCES for o in SOURCES if u != o])
def test_a_write_asks_for_its_target_and_its_source(usual: str, other: str) -> None:
    """At one point of a program that has computed nothing yet: those two, one of them, or another value."""
    real = Tensor.constant(np.array([7, 8, 9, 6], np.float32)).realize
    for turn in range(9):
        a = array(4)
        x = Tensor.constant(a)
        y, z, w = x + 1, x * 2, x - 3
        want = {"y": a + 1, "z": a * 2, "w": a - 3, "real": real.to_numpy(), "number": 4.0}
        source = other if turn in (5, 6) else usual
        if source != "none":
            y[...] = {"number": 4.0, "real": real, "z": z, "w": w}[source]
            want["y"] = np.broadcast_to(want[source], 4)
        same(w, want["w"])
        same(z, want["z"])
        same(y, want["y"])
        del y, z, w
    assert not replays._replays


def test_a_call_that_was_made_elsewhere_first_is_recorded_at_its_own_line() -> None:
    """A stretch whose end was followed from another line is recorded with that line."""
    table = Tensor.constant(array(4, 2))

    def picked(rows: Any, turn: int) -> Tensor:
        if turn % 2:
            return F.gather(table, rows, axis=0) + 1
        return F.gather(table, rows, axis=0) + 1

    lines: set[str] = set()
    for turn in range(12):
        z = picked(Tensor.from_dlpack(np.array([1 if turn < 8 else 9])), turn)
        if turn < 8:
            same(z, table.to_numpy()[1:2] + 1)
            continue
        with pytest.raises(IndexError) as error:
            _ = z.realize
        lines.add(str(error.value))
        # no later test computes it
        del z, error
        gc.collect()
    first = picked.__code__.co_firstlineno
    assert len(lines) == 2
    assert all(any(f"{__file__}:{first + n}" in text for text in lines) for n in (2, 3)), lines


def test_a_call_of_a_stack_with_fewer_frames_is_recorded_at_its_own_line() -> None:
    """The user's function is a thread's outermost frame; on the trace a function of ours calls the op for it."""
    table = Tensor.constant(array(4, 2))
    lines: list[str] = []
    ended = _thread.allocate_lock()

    def body() -> None:
        try:
            for turn in range(12):
                rows = Tensor.from_dlpack(np.array([1 if turn < 11 else 9])) + 0
                if turn < 11:
                    z = array_api.take(table, rows, axis=0)
                else:
                    z = F.gather(table, rows, axis=0)
                _ = z.realize
        except IndexError as error:
            lines.append(str(error))
        finally:
            ended.release()

    ended.acquire()
    _thread.start_new_thread(body, ())
    assert ended.acquire(timeout=60)
    gc.collect()  # no later test computes the tensor that failed
    (line,) = lines
    assert f"{__file__}:{body.__code__.co_firstlineno + 7}" in line


def test_a_value_that_another_thread_has_computed_keeps_its_memory() -> None:
    with ThreadPoolExecutor(1) as other:
        for turn in range(9):
            a = array(4)
            y = Tensor.constant(a) + 1
            z = y * 2
            view = other.submit(y.to_numpy).result() if turn in (5, 7) else None
            same(z, (a + 1) * 2)
            y[...] = 5.0
            if view is not None:
                np.testing.assert_array_equal(view, np.full(4, 5, np.float32))


def test_a_stretch_goes_on_after_another_thread_computed_a_value() -> None:
    """It is the next trace: an error in a stretch that follows it names the line of its call."""
    table = Tensor.constant(array(4, 2))
    with ThreadPoolExecutor(1) as other:
        for turn in range(8):
            x = Tensor.constant(array(4)) + 1
            y = F.gather(table, Tensor.from_dlpack(np.array([9 if turn == 7 else 1])), axis=0)
            if turn == 6:
                other.submit(x.to_numpy).result()
            if turn >= 6:
                del x
            z = y * 2
            if turn < 7:
                same(z, table.to_numpy()[1:2] * 2)
    with pytest.raises(IndexError, match="gather: index 9") as error:
        _ = z.realize
    message = str(error.value)
    del y, z, error
    gc.collect()  # no later test computes the tensor that failed
    first = test_a_stretch_goes_on_after_another_thread_computed_a_value.__code__.co_firstlineno
    assert f"{__file__}:{first + 6}" in message
