"""Programs that repeat themselves follow traces: the values, errors and lines have to be those of a first time."""

from __future__ import annotations

import _thread
import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from max._config import flags
from max.dtype import DType
from max.experimental import Tensor, array_api
from max.experimental import functional as F
from max.experimental.programs.number_patterns import Pattern, Symbol
from max.experimental.programs.programs import compiled_programs
from max.experimental.record import dispatch
from max.experimental.record.recorder import PENDING_CALLS
from max.experimental.replay import replays, traces
from max.nn.module_v3 import LayerNorm, Linear, Module, Sequential

RNG = np.random.default_rng(5)


def array(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The ops that are recorded, and not followed."""
    (Tensor.constant(array(1)) + 1).to_numpy()  # ends the stretch that an earlier test began
    ops: list[Any] = []
    record = dispatch.record

    def counting(op: Any, args: Any, kwargs: Any) -> Any:
        ops.append(op)
        return record(op, args, kwargs)

    monkeypatch.setattr(dispatch, "record", counting)
    yield ops


def same(got: Tensor, want: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(got.to_numpy(), want, rtol=2e-5, atol=2e-5)


def test_what_repeats_is_followed_and_not_recorded(records: list[Any]) -> None:
    a, b = array(3, 4), array(4, 2)
    x, w = Tensor.constant(a), Tensor.constant(b)

    def step(x: Tensor) -> Tensor:
        left, right = F.split(F.tanh(x @ w + 0.5), [1, 1], axis=1)
        y = F.concat([right, left * 2], axis=1)[:, :1]
        return y.reshape((3, 1)).cast(y.dtype)

    def expected(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.tanh(a @ b + 0.5)[:, 1:]

    before = compiled_programs()
    for turn in range(12):
        if turn == 2:
            records.clear()
        a = array(3, 4)
        same(step(Tensor.constant(a) if turn else x), expected(a if turn else x.to_numpy()))
    assert not records
    assert compiled_programs() - before == 1


def test_a_first_call_that_leaves_its_trace_begins_the_next_one(records: list[Any]) -> None:
    """The operands before the one that differs are in memory; the capture counts them once."""
    condition, a = np.arange(4) % 2 == 0, array(4)
    recorded: list[int] = []
    for turn in range(10):
        b = array(4) if turn < 5 else array(3, 4)
        records.clear()
        z = F.where(Tensor.constant(condition), Tensor.constant(a), Tensor.constant(b)) * 2
        same(z, np.where(condition, a, b) * 2)
        recorded.append(len(records))
    assert recorded == [2, 2, 0, 0, 0, 2, 0, 0, 0, 0]


def test_lines_that_call_one_function_with_other_keywords_have_traces_of_their_own(
    records: list[Any],
) -> None:
    condition = np.arange(4) % 2 == 0
    recorded: list[int] = []
    for _ in range(5):
        a, b = array(4), array(3, 4)
        records.clear()
        y = F.where(Tensor.constant(condition), Tensor.constant(a), Tensor.constant(a + 1)) * 2
        same(y, np.where(condition, a, a + 1) * 2)
        z = F.where(Tensor.constant(condition), Tensor.constant(b), Tensor.constant(b - 1)) - 1
        same(z, np.where(condition, b, b - 1) - 1)
        recorded.append(len(records))
    assert recorded == [4, 4, 0, 0, 0]


def test_parameters_that_change_between_steps() -> None:
    module = Sequential(Linear(5, 4), LayerNorm(4), Linear(4, 3))
    memory = {name: array(*[int(d) for d in p.shape]) for name, p in module.parameters}
    module.load_state_dict(memory)

    def expected(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        h = a @ memory["0.weight"].T + memory["0.bias"]
        h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5)
        h = h * memory["1.weight"] + memory["1.bias"]
        return h @ memory["2.weight"].T + memory["2.bias"]

    for turn in range(24):
        a = array(2, 5)
        same(module(Tensor.constant(a)), expected(a))
        name = list(memory)[turn % len(memory)]
        match turn % 4:
            case 0:  # through the array that shares the memory
                memory[name] *= 1.5
            case 1:  # through the tensor
                parameter = dict(module.parameters)[name]
                parameter[...] = parameter.to_numpy() + 0.25
            case 2:  # another array
                memory = {name: value + 0.5 for name, value in memory.items()}
                module.load_state_dict(memory)
            case _:
                pass


def test_a_write_in_the_middle_comes_after_the_reads_before_it() -> None:
    a = array(4)
    for turn in range(10):
        x = Tensor.constant(a)
        dead = x * 3  # noqa: F841
        y = x * 2
        z = y + x
        if turn > 5:
            x[0] = 100.0
        end = z + x
        want = 3 * a + a
        if turn > 5:
            want[0] = 3 * a[0] + 100.0
        same(end, want)


def test_control_flow_that_changes() -> None:
    choices = RNG.integers(0, 3, 60)
    w = array(3, 3)
    weight = Tensor.constant(w)
    for turn, choice in enumerate([0] * 6 + list(choices) + [1] * 6):
        a = array(2, 3)
        x = Tensor.constant(a)
        y, want = x @ weight, a @ w
        if choice == 1:
            y, want = F.tanh(y), np.tanh(want)
        elif choice == 2 and float(F.sum(F.sum(y), 0)) > 0:
            y, want = -y, -want
        elif choice == 2:
            y, want = y * 0.5, want * 0.5
        z, want_z = y + x, want + a
        if turn % 3 == 0:
            same(y, want)
        same(z, want_z)


def test_shapes_and_dtypes_that_change() -> None:
    for rows in [3, 3, 3, 3, 5, 3, 7, 8, 9, 10, 11, 3]:
        for dtype in (np.float32, np.float64):
            a = array(rows, 2).astype(dtype)
            x = Tensor.constant(a)
            y = F.concat([x, x * 2], axis=0)
            assert y.shape == [2 * rows, 2]
            same(y.reshape((-1,)) + 1, np.concatenate([a, a * 2]).reshape(-1) + 1)


def test_a_sequence_that_grows_is_followed(records: list[Any]) -> None:
    w = array(4, 4)
    weight = Tensor.constant(w)
    past, want_past = Tensor.constant(array(1, 4)), None
    want_past = past.to_numpy()
    for turn in range(40):
        if turn == 5:
            records.clear()
            before = compiled_programs()
        if turn == 20:  # another sequence
            past = Tensor.constant(array(3, 4))
            want_past = past.to_numpy()
        a = array(1, 4)
        row, want_row = Tensor.constant(a) @ weight, a @ w
        past, want_past = F.concat([past, row]), np.concatenate([want_past, want_row])
        scores = row @ past.T
        assert past.shape == want_past.shape and scores.shape == [1, len(want_past)]
        want = want_row @ want_past.T
        mixed = F.softmax(scores) @ past.reshape((past.shape[0] * 2, 2)).reshape((-1, 4))
        weights = np.exp(want - want.max())
        same(mixed, weights / weights.sum() @ want_past)
    assert not records
    assert compiled_programs() == before


def test_numbers_that_vary_are_followed(records: list[Any]) -> None:
    a = array(40, 3)
    x = Tensor.constant(a)
    for turn, stop in enumerate([3, 7, 5, 20, 1, 39, 2, 0, 40, 9, -3, 8]):
        if turn == 5:
            records.clear()
        rate = 0.25 + stop
        y = x[:stop] * rate - 1.0
        assert int(y.shape[0]) == len(a[:stop])
        same(y + rate, a[:stop] * rate - 1.0 + rate)
        if turn == 6:
            assert not records
    for stop in (41, 50):
        with pytest.raises(IndexError, match="out of range"):
            x[:stop]


def test_a_bound_beyond_the_end_raises_where_bounds_vary() -> None:
    x = Tensor.constant(array(40, 3))
    for stop in [3, 7, 5, 20, 1, 39, 50, 9, 41, 8, 40]:
        y = x * 2
        if stop > 40:
            with pytest.raises(IndexError, match="out of range"):
                y[:stop]
            continue
        same(y[:stop] + 1, x.to_numpy()[:stop] * 2 + 1)


@pytest.mark.parametrize("seed", range(30))
def test_a_pattern_that_is_implied_matches_all_details(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def example(general: bool) -> tuple[int, ...]:
        n, m = (int(rng.integers(2, 50)) for _ in range(2))
        return (n, 3, n + 1 if general else 2 * n, m, n * 2, m + 4 if seed % 3 else 7)

    inner = Pattern.covering([example(seed % 2 == 0) for _ in range(3)])
    outer = Pattern.covering([example(seed % 4 == 0) for _ in range(3)])
    implied = inner.implied_by(outer.positions)
    accepted = True
    for _ in range(40):
        values = [int(rng.integers(1, 60)) for _ in range(outer.symbols)]

        def value(position: Any) -> Any:
            if not isinstance(position, Symbol):
                return position
            return values[position.number] * position.factor + position.offset  # noqa: B023

        details = tuple([value(position) for position in outer.positions])
        matched = inner.match(details)
        accepted = accepted and matched is not None
        if implied is not None:
            assert matched == [value(position) for position in implied]
    assert accepted == (implied is not None)


def test_sizes_that_do_not_fit_raise_at_the_call() -> None:
    other = Tensor.constant(array(8, 2))
    for rows in [1, 2, 3, 4, 5, 9, 6, 12, 3]:
        a = array(rows, 2)
        x = Tensor.constant(a)
        y = x * 2
        if rows > 8:
            with pytest.raises((ValueError, IndexError)):
                other.reshape((2, 8))[:, :].split([rows, 8 - rows], axis=1)
            with pytest.raises(ValueError):
                y + other
            same(y, a * 2)
            continue
        first, _ = other.split([rows, 8 - rows])
        same(y + first, a * 2 + other.to_numpy()[:rows])


def test_two_sizes_that_were_equal_differ() -> None:
    for rows, columns in [(2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (6, 7), (7, 6), (8, 8), (1, 3)]:
        a, b = array(rows, 3), array(columns, 3)
        x, y = Tensor.constant(a), Tensor.constant(b)
        z = x @ y.T
        assert z.shape == [rows, columns]
        same(z + 1, a @ b.T + 1)
        if rows == columns:
            same(x * y, a * b)
        elif 1 not in (rows, columns):
            with pytest.raises(ValueError):
                x * y


def test_a_tensor_kept_from_a_stretch_is_computed_before_a_write() -> None:
    for turn in range(12):
        a = array(4)
        x = Tensor.constant(a)
        y = x * 2
        z = F.tanh(y + 1)
        if turn % 4 != 3:
            del y
        _ = z.realize
        if turn % 4 == 3:
            x[...] = 0.0
            same(y, a * 2)


def test_one_memory_that_becomes_two() -> None:
    a, b = Tensor.constant(array(3)).realize, Tensor.constant(array(3)).realize
    for turn in range(10):
        second = a if turn % 5 < 4 else b
        x, y = Tensor(storage=a.driver_tensor), Tensor(storage=second.driver_tensor)
        same(x * 2 - y, a.to_numpy() * 2 - second.to_numpy())


def test_a_call_while_another_thread_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    a = array(3)
    x, other = Tensor.constant(a), Tensor.constant(array(3))
    frame, busy = replays._frame, [False]

    def interrupted(depth: int) -> Any:
        if busy[0]:
            busy[0] = False
            worker = threading.Thread(target=lambda: other.__setitem__(0, 1.0))
            worker.start()
            worker.join()
        return frame(depth + 1)

    monkeypatch.setattr(replays, "_frame", interrupted)
    for turn in range(6):
        y = x * 2
        busy[0] = turn == 5
        z = y + x
        if turn == 5:
            # the write waits for what was recorded before
            a = a.copy()
            x[0] = 50.0
        same(z, a * 3)


def test_constants_that_compare_equal_differ() -> None:
    x = Tensor.constant([-0.0, 2.0])
    for number in [0.0] * 4 + [-0.0] * 4:
        # -0.0 + 0.0 is 0.0, and -0.0 + -0.0 is -0.0
        got = (x + number).to_numpy()
        assert math.copysign(1, got[0]) == (1 if math.copysign(1, number) > 0 else -1)
    for axis in [0, 0, 0, False, 0, True]:
        if type(axis) is bool:
            with pytest.raises(TypeError):
                F.sum(x, axis)
        else:
            assert F.sum(x, axis).item() == 2.0


def test_lists_of_arguments_may_change_in_place() -> None:
    sizes = [1, 3]
    a = array(4, 2)
    for turn in range(8):
        sizes[:] = [1, 3] if turn % 4 else [2, 2]
        first, second = F.split(Tensor.constant(a), sizes, axis=0)
        same(first * 2, a[: sizes[0]] * 2)
        same(second * 2, a[sizes[0] :] * 2)


def test_operands_that_were_one_tensor_become_two() -> None:
    a, b = array(3), array(3)
    for turn in range(10):
        x = Tensor.from_dlpack(a)
        y = Tensor.from_dlpack(a if turn % 5 < 3 else b)
        z = x if turn % 2 else y
        other = z.to_numpy()
        same((x * 2 - y) * z, (a * 2 - y.to_numpy()) * other)


def test_errors_name_the_line_of_the_call_and_leave_the_record_usable() -> None:
    x = Tensor.constant(array(3, 2))
    for turn in range(8):
        y = x * 2
        if turn > 4:
            with pytest.raises(ValueError, match="shape|size|broadcast|dim"):
                y + Tensor.constant(array(7, 5))
        if turn == 6:
            with pytest.raises(ZeroDivisionError):
                _ = 1 / 0
        same(y + 1, x.to_numpy() * 2 + 1)


def _line_of_failure(run: Callable[[], object]) -> str:
    with pytest.raises(IndexError) as raised:
        run()
    return str(raised.value).rpartition("test_traces.py:")[2].rstrip(")")


def test_errors_of_a_run_name_the_line_that_was_followed() -> None:
    table = Tensor.constant(array(4, 2))

    def look_up(index: int, other: bool) -> Tensor:
        y = table * 2
        indices = Tensor.from_dlpack(np.int64([index]))
        if other:
            z = F.gather(y, indices, axis=0)
        else:
            z = F.gather(y, indices, axis=0)
        return z + 1

    start = look_up.__code__.co_firstlineno
    for _ in range(4):
        _ = look_up(1, other=False).realize
    for other, line in ((False, start + 6), (True, start + 4)):
        assert _line_of_failure(lambda: look_up(9, other=other).realize) == str(line)  # noqa: B023
        same(look_up(2, other=other), table.to_numpy()[2:3] * 2 + 1)


def test_errors_name_the_function_of_the_call_where_another_was_followed() -> None:
    """The calls are at the same place of two functions with the same code."""
    table = Tensor.constant(array(4, 2))

    def one(y: Tensor, indices: Tensor) -> Tensor:
        return F.gather(y, indices, axis=0)

    def two(y: Tensor, indices: Tensor) -> Tensor:
        return F.gather(y, indices, axis=0)

    def look_up(index: int, gather: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return gather(table * 2, Tensor.from_dlpack(np.int64([index]))) + 1

    assert one.__code__.co_code == two.__code__.co_code
    for _ in range(4):
        _ = look_up(1, one).realize
    for gather in (two, one):
        line = gather.__code__.co_firstlineno + 1
        assert _line_of_failure(lambda: look_up(9, gather).realize) == str(line)  # noqa: B023
        same(look_up(2, gather), table.to_numpy()[2:3] * 2 + 1)


def test_a_run_that_fails_leaves_values_that_can_be_computed() -> None:
    table = Tensor.constant(array(4, 2))
    indices = np.int64([1])
    for turn in range(8):
        indices[0] = 9 if turn == 6 else 1
        y = table * 2
        z = F.gather(y, Tensor.from_dlpack(indices), axis=0) + 1
        if turn == 6:
            with pytest.raises(IndexError):
                _ = z.realize
            indices[0] = 2
            same(y, table.to_numpy() * 2)
        same(z, table.to_numpy()[indices] * 2 + 1)


def test_values_that_are_used_early_or_late_or_kept() -> None:
    w = array(3, 3)
    weight = Tensor.constant(w)
    kept: list[tuple[Tensor, np.ndarray[Any, Any]]] = []
    for turn in range(30):
        a = array(2, 3)
        y, want_y = Tensor.constant(a) @ weight, a @ w
        if turn % 5 == 4:
            same(y, want_y)
        z, want_z = y * 2, want_y * 2
        side, want_side = y - 1, want_y - 1
        if turn % 7 == 6:
            kept.append((side, want_side))
        if turn % 4 == 3:
            kept.append((y, want_y))
        del side
        end = F.tanh(z)
        same(end, np.tanh(want_z))
        if turn % 3 == 2:
            same(z, want_z)
    for tensor, want in kept:
        same(tensor, want)


def test_values_beside_the_path_stay_pending() -> None:
    for turn in range(8):
        a = array(3)
        x = Tensor.constant(a)
        beside = x * 3
        _ = (x + 1).realize
        assert not beside.real
        same(beside + 1 if turn % 2 else beside, a * 3 + turn % 2)


def test_tensors_without_references_are_freed_and_not_computed() -> None:
    x = Tensor.constant(array(3))
    for _ in range(6):
        y = x * 2
        reference = weakref.ref(y)
        z = y + 1
        del y
        assert reference() is None
        _ = z.realize
    gc.collect()
    assert not replays._replays


def test_what_another_thread_recorded() -> None:
    a = array(4)
    x = Tensor.constant(a)
    for turn in range(8):
        box: list[Tensor] = []

        def produce() -> None:
            for _ in range(4):
                y = x * 2
                z = y + 1
                _ = z.realize if _ < 3 else box.append(z)  # noqa: B023

        worker = threading.Thread(target=produce)
        worker.start()
        worker.join()
        if turn % 2:
            x[0] = float(turn)  # what the thread recorded is computed before
        same(box[0] * 2, (a * 2 + 1) * 2)
        a = x.to_numpy().copy()
    gc.collect()
    assert len(replays._replays) < replays._MOST_REPLAYS


def test_threads_that_follow_the_same_trace_and_share_values() -> None:
    w = array(3, 3)
    weight = Tensor.constant(w)
    failures: list[BaseException] = []
    shared: list[tuple[Tensor, np.ndarray[Any, Any]]] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(60):
                a = rng.standard_normal((2, 3)).astype(np.float32)
                y = F.tanh(Tensor.constant(a) @ weight)
                want = np.tanh(a @ w)
                shared.append((y, want))
                z = y * 2 + 1
                if rng.integers(4) == 0:
                    other, want_other = shared[int(rng.integers(len(shared)))]
                    same(other + 1, want_other + 1)
                same(z, want * 2 + 1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    for tensor, want in shared:
        same(tensor, want)


def test_a_call_with_fewer_frames_than_that_of_the_trace() -> None:
    done, failures = threading.Event(), list[BaseException]()

    # its frame is the last of its stack
    def work() -> None:
        try:
            x = Tensor.constant([1.0, 2.0])
            for turn in range(12):
                z = x + 1
                y = array_api.square(z) if turn < 8 else z * z
                same(y, np.float32([4, 9]))
        except BaseException as error:
            failures.append(error)
        done.set()

    _thread.start_new_thread(work, ())
    assert done.wait(60) and not failures, failures


def test_errors_name_the_line_of_a_call_with_fewer_frames() -> None:
    """The trace's gather was called by a function, this one stands at the end of its stack."""
    table, lines = Tensor.constant(array(4, 2)), list[str]()
    done = threading.Event()

    def gather(y: Tensor, indices: Tensor) -> Tensor:
        return array_api.take(y, indices, axis=0)

    def work() -> None:
        for turn in range(8):
            indices = Tensor.from_dlpack(np.int64([9 if turn == 7 else 1]))
            y = table * 2
            z = gather(y, indices) if turn < 7 else F.gather(y, indices, axis=0)
            try:
                _ = z.realize
            except IndexError as error:
                lines.append(str(error).rpartition("test_traces.py:")[2].rstrip(")"))
        done.set()

    _thread.start_new_thread(work, ())
    assert done.wait(60) and lines == [str(work.__code__.co_firstlineno + 4)]


def test_a_replay_that_left_a_tensor_is_held_by_nothing() -> None:
    x = Tensor.constant(array(3))
    for _ in range(8):
        beside = x * 3
        _ = (x + 1).realize
        assert not beside.real and not replays._replays


def test_a_replay_that_another_value_interrupts_is_held_by_nothing() -> None:
    x = Tensor.constant(array(3))
    for turn in range(8):
        beside = x * 3
        _ = (x + 1).realize
        here = F.tanh(x)
        _ = (beside if turn == 7 else here + 1).realize
    assert beside.real and not here.real and not replays._replays


def test_a_replay_that_fails_is_held_by_nothing() -> None:
    table = Tensor.constant(array(4, 2))
    for turn in range(8):
        z = F.gather(table * 2, Tensor.from_dlpack(np.int64([9 if turn == 7 else 1])), axis=0)
        if turn == 7:
            with pytest.raises(IndexError):
                _ = z.realize
        else:
            _ = z.realize
    assert not replays._replays


def test_nans_are_looked_for_in_the_middle_of_a_trace() -> None:
    x = Tensor.constant([4.0, -1.0])
    for turn in range(6):
        y = x * 2
        with flags.override(MAX_DEBUG_NANS=turn == 5):
            if turn == 5:
                with pytest.raises(FloatingPointError, match="sqrt: 1 of"):
                    F.sqrt(y)
                continue
            z = F.sqrt(y)
        assert np.isnan(z.to_numpy()[1])


def test_stretches_that_end_by_their_length(records: list[Any]) -> None:
    x = Tensor.constant([1.0, 2.0])
    y, count = x, 0
    before = compiled_programs()
    while count < 6 * PENDING_CALLS:
        y = y * 0.5 + 1.0
        count += 2
    assert len(records) == 2 * PENDING_CALLS
    assert compiled_programs() - before <= 1  # 0 where another test has compiled it
    same(y, np.float32([2, 2]))
    # a value in the middle of the stretch
    for _ in range(100):
        y = y * 0.5 + 1.0
    same(y, np.float32([2, 2]))


def test_a_program_without_repetition_is_not_captured_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures: list[object] = []
    make = traces.Capture.__init__

    def counting(self: Any) -> None:
        captures.append(self)
        make(self)

    monkeypatch.setattr(traces.Capture, "__init__", counting)
    x = Tensor.constant(array(3))
    ops = [F.tanh, F.exp, F.sin, F.cos, F.abs]
    for turn in range(300):
        y = x * 0.5
        for bit in range(4):
            y = ops[(turn >> bit) % 5](y)
        _ = y.realize
    assert len(captures) < 30


class _Branching(Module):
    """A module whose result depends on an element."""

    def __init__(self) -> None:
        self.weight = Tensor.constant(array(3))

    def __call__(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return y * 2 if y[0].item() > 0 else y - 1


def test_elements_that_decide() -> None:
    module = _Branching()
    w = module.weight.to_numpy()
    for _ in range(30):
        a = array(3)
        want = a * w
        same(module(Tensor.constant(a)), want * 2 if want[0] > 0 else want - 1)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_numpy_scalars_that_compare_equal_differ(kind: type[Any]) -> None:
    x = Tensor.constant([-0.0, 2.0])
    for number in [0.0] * 4 + [-0.0] * 4 + [0.0]:
        got = (x + kind(number)).to_numpy()
        assert math.copysign(1, got[0]) == math.copysign(1, number)


def test_arrays_among_the_arguments_may_change_in_place() -> None:
    a, added, indices = array(3, 2), array(2), np.int64([0])
    x = Tensor.constant(a)
    for turn in range(8):
        added += 1
        indices[0] = turn % 3
        y = F.add(x, added)
        same(F.gather(y, indices, axis=0) * 2, (a + added)[indices] * 2)


def test_nan_among_the_arguments() -> None:
    x = Tensor.constant(array(2))
    for turn in range(8):
        got = (x * (math.nan if turn % 4 else 2.0) + float("nan" if turn % 2 else "1")).to_numpy()
        assert np.isnan(got).all() == (turn % 4 > 0 or turn % 2 > 0)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_dead_call_that_cannot_be_followed_is_left_out_later(earlier: bool) -> None:
    d = array(3)
    w = Tensor.constant(d)
    for turn in range(8):
        a, b, c = array(3), array(3), array(3)
        x, other, y = Tensor.constant(a), Tensor.constant(b), Tensor.constant(c)
        beside = x * 3
        _ = (x + 1).realize
        first = F.tanh(y)
        if turn < 3:
            # reads memory first, then what no trace has
            _ = F.add(other, beside if earlier else b)
        second = w * 2
        same(first - second, np.tanh(c) - d * 2)
        same(beside, a * 3)


@pytest.mark.parametrize("together", [False, True])
def test_a_value_of_an_earlier_stretch_is_computed_after_calls_of_this_one(together: bool) -> None:
    for _ in range(8):
        a = array(3)
        x = Tensor.constant(a)
        beside = x * 3
        _ = (x + 1).realize
        here = F.tanh(x)
        if together:
            x[0] = 50.0  # computes both
            assert beside.real and here.real
        same(beside, a * 3)
        same(here, np.tanh(a))


def test_a_tensor_beside_the_program_is_computed_before_its_operand_changes() -> None:
    """A replay ends, and the tensors that its program did not compute are pending like others."""
    for _ in range(8):
        a = array(3)
        x = Tensor.constant(a)
        beside = x * 3
        on_the_way = x + 1
        _ = (on_the_way * 2).realize
        assert on_the_way.real and not beside.real
        x[...] = 100.0
        same(beside, a * 3)
        same(on_the_way, a + 1)


def test_a_replay_is_recorded_only_for_tensors_that_it_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settled: list[Any] = []
    settle = replays.Replay.settle

    def counting(self: Any) -> None:
        settled.append(self)
        settle(self)

    monkeypatch.setattr(replays.Replay, "settle", counting)
    x = Tensor.constant(array(3))
    for turn in range(8):
        dead = x * 3
        kept = x + 1
        if turn != 6:
            del dead
        _ = F.tanh(kept).realize
    assert len(settled) == 1, "the trace with a dead value was left once"


def test_calls_that_the_program_computes_in_another_order() -> None:
    """The symbols of the program are other ones than those of the trace, which has its positions in another order."""
    a = array(63)
    x = Tensor.constant(a)
    for stop in [3, 7, 5, 20, 11, 2, 30, 9]:
        first, second = x[:stop] + 1, x[: 2 * stop + 3]
        same(F.concat([second, first]), np.concatenate([a[: 2 * stop + 3], a[:stop] + 1]))


def test_a_dead_call_that_cannot_be_followed_at_the_end_of_a_stretch() -> None:
    b = array(3)
    for turn in range(8):
        a = array(3)
        x = Tensor.from_dlpack(a)
        same_memory = Tensor(storage=x.driver_tensor)
        end = F.tanh(x)
        if turn < 2:
            _ = F.add(same_memory, b)
        same(end, np.tanh(a))


def test_a_tensor_where_a_list_had_numbers() -> None:
    a = array(4, 3)
    for turn in range(10):
        x = Tensor.constant(a)
        y = x * 2
        index = Tensor.constant(turn % 3, dtype=DType.int64) if turn > 5 else 1
        same(y[index, 1:] + 1, a[turn % 3 if turn > 5 else 1, 1:] * 2 + 1)


@pytest.mark.parametrize("early", [False, True])
def test_a_trace_that_varies_is_left_in_the_middle(records: list[Any], early: bool) -> None:
    """Its calls become records with the sizes and numbers that they have, and the next trace begins with them."""
    tails = [lambda z: z, np.tanh, np.abs, lambda z: z, np.exp]
    ops: list[Callable[[Tensor], Tensor]] = [lambda z: z, F.tanh, F.abs, lambda z: z, F.exp]
    for phase, (tail, op) in enumerate(zip(tails, ops, strict=True)):
        for step in range(14):
            if not phase or step % 4 == 0:
                rows, rate = int(RNG.integers(3, 30)), float(RNG.integers(1, 9)) / 4
            if step == 1:
                records.clear()
            a, b, c = array(rows, 6), array(4), RNG.integers(0, 9, 1).astype(np.float32)
            x, w, u = Tensor.constant(a), Tensor.constant(b), Tensor.constant(c)
            y = x[: rows - 1, 1:5] * rate * 0.5 + 0.0
            low, high = F.split(y * w, [1, rows - 2], axis=0)
            z = F.concat([high, low], axis=0).reshape((y.shape[1], y.shape[0]))
            # another dtype than before: the call reads a tensor of the trace, and leaves it
            v = u.cast(DType.int32 if phase % 2 else DType.float64).cast(DType.float32)
            scaled = a[: rows - 1, 1:5] * np.float32(rate / 2)
            want = scaled * b
            want = np.concatenate([want[1:], want[:1]]).reshape(4, rows - 1)
            if early and step == 5:
                same(high, (scaled * b)[1:])
            same(op(z) - w.reshape((4, 1)) + v, tail(want) - b[:, None] + c)
            same(y, scaled)
            if step == 1 and phase and not early:
                assert not records, "the calls before and after the change are followed"
