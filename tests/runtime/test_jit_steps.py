"""The steps of a JIT one by one: what is started ahead, which thread compiles, forks, and what a module may call."""

from __future__ import annotations

import ctypes
import dataclasses
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from max import kernel
from max._backends.cpu.runtime import jit
from max._backends.cpu.runtime.llvm_compiler import CompileError
from max._config import flags
from max._host.disk_cache import Cache

NUMBER = ctypes.CFUNCTYPE(ctypes.c_int64)


def constant(name: str, value: int) -> str:
    return f"define i64 @k_{name}() {{\n  ret i64 {value}\n}}\n"


def unit(name: str, value: int, text: str = "") -> jit.Unit:
    return jit.Unit(f"{name}-{value}", (f"k_{name}",), lambda: text or constant(name, value))


def number(address: int) -> int:
    return NUMBER(address)()


@pytest.fixture
def new() -> jit.Jit:
    return jit.Jit(jit.Machine.host())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    cache = Cache(tmp_path)
    monkeypatch.setattr(jit, "default_cache", lambda: cache)
    return cache


def test_what_is_started_ahead(
    new: jit.Jit, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what is loaded, started, or on the disk, and nothing where one thread compiles."""
    submitted, prepared = list[str](), list[int]()
    monkeypatch.setattr(
        new, "_submit", lambda each, text: submitted.append(each.key) or Future[bytes]()
    )
    monkeypatch.setattr(new, "_prepare_threads", lambda: prepared.append(1))
    monkeypatch.setattr(jit, "_compiles_ahead", lambda: False)
    first, second, third, loaded = (unit(f"ahead{i}", i) for i in range(4))
    new.start(first)
    assert not submitted
    new.load([loaded])
    monkeypatch.setattr(jit, "_compiles_ahead", lambda: True)
    with monkeypatch.context() as later:
        later.setattr(jit, "default_cache", lambda: Cache(tmp_path / "empty"))
        new.start(loaded)
    cache.put("object", new._object_key_of(third), b"data")
    new.start(third)
    assert not submitted
    new.start(first)
    assert submitted == ["ahead0-0"] and not prepared, "a single one"
    new.start(first)
    new.start(second)
    assert submitted == ["ahead0-0", "ahead1-1"] and prepared == [1]
    done, waits = new._started["ahead1-1"], new._started["ahead0-0"]
    done.set_running_or_notify_cancel()
    new.cancel_started()
    assert waits.cancelled() and list(new._started) == ["ahead1-1"]
    done.set_result(b"")
    new.wait_for_started()


def test_whose_loops_are_optimized(
    new: jit.Jit, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of short kernels, and of outlined functions of any length."""
    found: dict[str, bool] = {}
    compile_module = jit.Compiler.compile

    def recorded(
        self: jit.Compiler, name: str, text: str, optimize: bool = True, loops: bool = True
    ) -> bytes:
        found[name] = loops
        return compile_module(self, name, text, optimize, loops)

    monkeypatch.setattr(jit.Compiler, "compile", recorded)

    def of_length(name: str, length: int) -> jit.Unit:
        text = constant(name, 1)
        return unit(name, 1, text + " " * (length - len(text)))

    limit = jit.LONG_TEXT
    units = [of_length("short", limit), of_length("long", limit + 1)]
    units.append(of_length("outlined", limit + 1)._replace(outlined=True))
    new.load(units, cache=cache)
    assert {name: found[name] for name in ("short-1", "long-1", "outlined-1")} == {
        "short-1": True,
        "long-1": False,
        "outlined-1": True,
    }


def test_starts_are_waited_for(new: jit.Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(jit, "wait", waited.append)
    new._started["a"] = future = Future[bytes]()
    new.wait_for_started()
    assert waited == [[future]]


@pytest.mark.parametrize("ahead", [False, True])
def test_which_thread_compiles(
    ahead: bool, new: jit.Jit, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one a single module, or where one thread compiles; the steps of a load are told."""
    submitted, prepared, told = list[str](), list[int](), list[tuple[object, ...]]()
    submit = new._submit
    monkeypatch.setattr(
        new, "_submit", lambda each, text: submitted.append(each.key) or submit(each, text)
    )
    monkeypatch.setattr(new, "_prepare_threads", lambda: prepared.append(1))
    monkeypatch.setattr(jit, "_compiles_ahead", lambda: ahead)
    monkeypatch.setattr(jit.STEPS, "at", lambda *step: told.append(step))
    found = new.load([unit("alone", 4)])
    assert number(found["alone-4"]["k_alone"]) == 4 and not submitted and not prepared
    assert told == [("compiling kernels", 0, 1)]
    for count in (2, 3):
        for notes in (submitted, prepared, told):
            notes.clear()
        units = [unit(f"several{count}{i}", i) for i in range(count)]
        found = new.load(units)
        assert [number(found[each.key][each.exports[0]]) for each in units] == [*range(count)]
        assert len(submitted) == count * ahead and len(prepared) == ahead
        assert told == [("compiling kernels", i, count) for i in range(count)]


def test_the_function_of_the_threads_is_on_the_disk(
    new: jit.Jit, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    new._prepare_threads()
    assert new._native is not None
    native = new._native
    new._prepare_threads()
    assert new._native is native
    other = jit.Jit(jit.Machine.host())
    monkeypatch.setattr(other, "_compiler", lambda: pytest.fail("it is compiled again"))
    other._prepare_threads()
    assert other._native is not None


def test_a_process_that_was_forked_amid_a_compilation(
    new: jit.Jit, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way to LLVM is an error."""

    def check() -> None:
        raise RuntimeError("forked")

    monkeypatch.setattr(jit._forks, "check", check)
    monkeypatch.setattr(jit, "_compiles_ahead", lambda: True)
    with pytest.raises(RuntimeError, match="forked"):
        jit.Jit(jit.Machine.host())
    with pytest.raises(RuntimeError, match="forked"):
        new.start(unit("forked", 1))
    with pytest.raises(RuntimeError, match="forked"):
        new.load([unit("forked", 1)])


class Slow(Future[bytes]):
    """Gives its result at the third look."""

    looks = 0

    def result(self, timeout: float | None = None) -> bytes:
        assert timeout is not None and timeout <= 2
        self.looks += 1
        if self.looks < 3:
            raise TimeoutError
        return b"of the thread"


def test_a_thread_that_is_gone_is_not_waited_for(
    new: jit.Jit, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks, pending = list[int](), set[Future[bytes]]()
    monkeypatch.setattr(jit._forks, "check", lambda: checks.append(1))
    monkeypatch.setattr(jit._compile_threads, "pending", lambda: pending)
    monkeypatch.setattr(new, "_work", lambda each, text: b"of this one")
    slow, each = Slow(), unit("slow", 1)
    pending.add(slow)
    assert new._result(each, slow) == b"of the thread" and len(checks) == 2
    # it is done, but not looked at yet
    pending.clear()
    done = Slow()
    done.set_result(b"")
    assert new._result(each, done) == b"of the thread"
    checks.clear()
    assert new._result(each, Slow()) == b"of this one" and len(checks) == 1


def test_what_a_module_may_call(new: jit.Jit, cache: Cache) -> None:
    """Functions of the process, and those whose addresses are given; others are an error that names the module."""
    text = "define i64 @k_calls() {{\n  %x = call i64 @{0}(i64 -5)\n  ret i64 %x\n}}\ndeclare i64 @{0}(i64)\n"
    process = unit("calls", 1, text.format("labs"))
    assert number(new.load([process])[process.key]["k_calls"]) == 5
    negated = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(lambda x: 3 * x)
    address = ctypes.cast(negated, ctypes.c_void_p).value
    assert address is not None
    own = unit("calls", 2, text.format("own_function"))
    with pytest.raises(CompileError, match="calls-2"):
        new.load([own])
    other = jit.Jit(jit.Machine.host())
    assert number(other.load([own], {"own_function": address})[own.key]["k_calls"]) == -15


def test_the_address_of_a_unit_is_that_of_its_first_function(new: jit.Jit, cache: Cache) -> None:
    text = constant("one", 1) + constant("two", 2)
    each = jit.Unit("two functions", ("k_one", "k_two"), lambda: text)
    assert number(new.addresses({"x": each})["x"]) == 1
    assert number(new.load([each])[each.key]["k_two"]) == 2


def test_functions_of_a_module_are_started_once(
    new: jit.Jit, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their texts are kept until they are linked."""
    started: list[str] = []
    monkeypatch.setattr(new, "start", lambda each: started.append(each.key))
    name = "max_function_" + "7" * 40

    def modules(caller: str) -> kernel.Modules:
        return kernel.Modules(
            f"define i64 @k_{caller}() {{\n  %x = call i64 @{name}()\n  ret i64 %x\n}}\n"
            f"declare i64 @{name}()\n",
            {name: f"define i64 @{name}() {{\n  ret i64 7\n}}\n"},
        )

    callers = [
        jit.Unit(f"{each}-7", (f"k_{each}",), lambda each=each: modules(each)) for each in "abc"
    ]
    for _ in range(2):
        assert "call i64" in new._text(callers[0])
    assert started == [name] and set(new._functions) == {name}
    found = new.load(callers[:2])
    assert [number(found[each.key][each.exports[0]]) for each in callers[:2]] == [7, 7]
    assert not new._functions and started == [name]
    assert number(new.load(callers)["c-7"]["k_c"]) == 7
    assert started == [name] and not new._functions
    assert new._lljit in jit._immortal


@pytest.mark.parametrize(
    ("cores", "free", "dump", "ahead"),
    [
        (2, True, "", True),
        (2, True, "kernels", True),
        (1, True, "", False),
        (2, False, "", False),
        (2, True, "llvm", False),
        (2, True, "asm", False),
        (1, False, "llvm", False),
    ],
)
def test_when_several_threads_compile(
    cores: int, free: bool, dump: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "_cores", lambda: cores)
    monkeypatch.setattr(jit, "lock_free", lambda: free)
    with flags.override(MAX_DUMP=dump):
        assert bool(jit._compiles_ahead()) == ahead


def test_the_end_of_the_process_waits_for_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no thread has begun is cancelled."""
    begun, waits, waited = Future[bytes](), Future[bytes](), list[set[Future[bytes]]]()
    begun.set_running_or_notify_cancel()
    monkeypatch.setattr(jit._compile_threads, "pending", lambda: {begun, waits})
    monkeypatch.setattr(jit, "wait", lambda futures: waited.append(set(futures)))
    jit._end_compilations()
    assert waits.cancelled() and not begun.cancelled()
    (left,) = waited
    assert begun in left


def test_a_child_process_has_threads_of_its_own() -> None:
    threads = jit._CompileThreads()
    assert threads.pending() == set()
    first = threads.threads()
    assert threads.threads() is first and threads.pending() is first.unfinished
    threads.forget()
    assert threads.pending() == set() and threads.threads() is not first


def test_a_text_that_is_not_known() -> None:
    with pytest.raises(jit.AbsentError):
        jit.absent_text()


def test_counts_begin_at_zero() -> None:
    assert set(dataclasses.asdict(jit.JitStats()).values()) == {0}
