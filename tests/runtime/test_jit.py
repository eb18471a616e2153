"""The JIT: results, counts of compilations, the cache behind it, errors."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from max import kernel
from max._backends.cpu.runtime import jit, kernel_code, native_compiler, platform
from max._config import flags
from max._host.disk_cache import Cache
from max._host.machine import usable_cpus

CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


def store(name, value):
    """A kernel that stores a constant."""
    return f"""
define void @k_{name}(ptr %args, ptr %ctx) {{
  %p = load ptr, ptr %args
  store i64 {value}, ptr %p
  ret void
}}
"""


def call(address):
    out = np.zeros(1, np.int64)
    args = np.array([out.ctypes.data], np.int64)
    CALL(address)(args.ctypes.data, None)
    return int(out[0])


@pytest.fixture
def machine_jit():
    """A JIT with nothing loaded."""
    return jit.Jit(jit.Machine.host())


@pytest.fixture
def counts():
    before = dataclasses.asdict(jit.stats)
    return lambda *names: tuple(getattr(jit.stats, n) - before[n] for n in names)


def unit(name, value, calls=None):
    def text():
        if calls is not None:
            calls.append(name)
        return store(name, value)

    return jit.Unit(f"{name}-{value}", (f"k_{name}",), text)


def test_code_runs_and_is_compiled_once(counts):
    texts = {f"once{i}": store(f"once{i}", i) for i in range(5)}
    for _ in range(3):
        found = jit.compile_llvm(texts, jit.Machine.host())
        assert [call(found[f"once{i}"]) for i in range(5)] == list(range(5))
    assert counts("compiled", "cached", "linked", "reused") == (5, 0, 5, 10)


def test_equal_names_with_other_texts_do_not_mix():
    first = jit.compile_llvm({"same": store("same", 1)}, jit.Machine.host())
    second = jit.compile_llvm({"same": store("same", 2)}, jit.Machine.host())
    assert (call(first["same"]), call(second["same"])) == (1, 2)


def test_the_disk_serves_a_second_jit_without_the_text(tmp_path, counts):
    cache, calls = Cache(tmp_path), []
    units = [unit(f"disk{i}", 10 + i, calls) for i in range(3)]
    for turn in range(2):
        loaded = jit.Jit(jit.Machine.host()).load(units, cache=cache)
        assert [call(loaded[u.key][u.exports[0]]) for u in units] == [10, 11, 12]
        assert counts("compiled", "cached") == (3, 3 * turn)
    assert sorted(calls) == ["disk0", "disk1", "disk2"]


NINE = "max_function_" + "9" * 40


def caller(name, calls=None):
    """A kernel that calls a function, which stores 9."""

    def modules():
        if calls is not None:
            calls.append(name)
        return kernel.Modules(
            f"define void @k_{name}(ptr %args, ptr %ctx) {{\n  %p = load ptr, ptr %args\n"
            f"  call void @{NINE}(ptr %p)\n  ret void\n}}\ndeclare void @{NINE}(ptr)\n",
            {NINE: f"define void @{NINE}(ptr %p) {{\n  store i64 9, ptr %p\n  ret void\n}}\n"},
        )

    return jit.Unit(f"{name}-caller", (f"k_{name}",), modules)


def run_all(units, cache):
    loaded = jit.Jit(jit.Machine.host()).load(units, cache=cache)
    return [call(loaded[u.key][u.exports[0]]) for u in units]


def test_kernels_share_a_function(tmp_path, machine_jit, counts):
    cache, calls = Cache(tmp_path), []
    units = [caller(f"shares{i}", calls) for i in range(3)]
    # one link, a link that finds the function loaded, and another JIT that finds all on the disk
    for part in (units[:1], units[1:]):
        loaded = machine_jit.load(part, cache=cache)
        assert [call(loaded[u.key][u.exports[0]]) for u in part] == [9] * len(part)
    assert counts("compiled", "functions", "cached") == (3, 1, 0)
    assert run_all(units, cache) == [9, 9, 9]
    assert counts("compiled", "functions", "cached") == (3, 1, 3)
    assert len(calls) == 3
    # a new kernel finds the function on the disk
    assert run_all([caller("shares3")], cache) == [9]
    assert counts("compiled", "functions") == (4, 1)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_function_that_the_disk_lost_is_compiled_anew(tmp_path, counts, damaged):
    cache, calls = Cache(tmp_path), []
    units = [caller(f"lost{i}", calls) for i in range(2)]
    assert run_all(units, cache) == [9, 9]
    key = jit.Jit(jit.Machine.host()).object_key(f"{NINE} True")
    if damaged:
        cache.put("object", key, b"not an object file" * 20)
    else:
        (path,) = tmp_path.rglob(key)
        path.unlink()
    assert run_all(units, cache) == [9, 9]
    assert counts("compiled", "functions", "cached") == (4, 2, 0)
    assert run_all(units, cache) == [9, 9] and len(calls) == 4


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_object_is_compiled_anew(tmp_path, machine_jit, counts, damage):
    cache, it = Cache(tmp_path), unit("damaged", 5)
    machine_jit.load([it], cache=cache)
    (path,) = (p for p in tmp_path.rglob("*") if p.is_file())
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-40] ^= 16
    path.write_bytes(
        b"" if damage == "empty" else data[: len(data) // 2] if damage == "cut" else data
    )
    loaded = jit.Jit(jit.Machine.host()).load([it], cache=cache)
    assert call(loaded[it.key][it.exports[0]]) == 5
    assert counts("compiled", "cached") == (2, 0)
    jit.Jit(jit.Machine.host()).load([it], cache=cache)
    assert counts("compiled", "cached") == (2, 1), "the damaged entry was not rewritten"


def test_a_sound_entry_that_is_no_object_is_compiled_anew(tmp_path, counts):
    cache, it, other = Cache(tmp_path), unit("foreign", 6), unit("fine", 7)
    for payload in (b"", b"not an object file at all" * 20):
        host = jit.Jit(jit.Machine.host())
        host.load([it, other], cache=cache)
        cache.put("object", host.object_key(f"{it.key} True"), payload)
        loaded = jit.Jit(jit.Machine.host()).load([it, other], cache=cache)
        assert [call(loaded[u.key][u.exports[0]]) for u in (it, other)] == [6, 7]
    assert counts("cached") == (2,), "the second turn found the entries rewritten"


def test_the_cache_serves_a_second_process(tmp_path):
    code = (
        "from max._backends.cpu.runtime import jit; from tests.runtime.test_jit import store, call;"
        "f = jit.compile_llvm({'p': store('p', 77)}, jit.Machine.host());"
        "print(call(f['p']), jit.stats.compiled, jit.stats.cached)"
    )
    env = os.environ | {"MAX_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(["src", "."])}
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
        ).stdout
        for _ in range(2)
    ]
    assert runs == ["77 1 0\n", "77 0 1\n"]


def test_keys_depend_on_all_that_decides_the_code():
    host = jit.Machine.host()
    arm64 = platform.MACHINE == "aarch64"
    machines = [
        host,
        host._replace(cpu="cortex-a53" if arm64 else "x86-64"),
        host._replace(feature_string=host.feature_string + (",-rdm" if arm64 else ",-avx2")),
        host._replace(triple="aarch64-unknown-linux-gnu", cpu="cortex-a57", feature_string=""),
    ]
    keys = [jit.jit_for(m).object_key("k") for m in machines] + [jit.jit_for(host).object_key("l")]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("define void @k_bad() { not ir }", "refuses the module of bad"),
        ("define i64 @k_bad() { ret void }", "refuses the module of bad"),
        (
            "define void @k_bad() {\na:\n br label %b\nb:\n %x = add i64 %y, 1\n %y = add i64 %x, 1\n ret void }",
            "refuses the module of bad",
        ),
        (
            "declare void @nowhere()\ndefine void @k_bad() { call void @nowhere() ret void }",
            "cannot link bad",
        ),
    ],
)
def test_bad_modules_raise(text, message, machine_jit):
    with pytest.raises(jit.CompileError, match=message):
        jit.compile_llvm({"bad": text}, jit.Machine.host())
    # and the JIT is sound afterwards
    assert call(jit.compile_llvm({"good": store("good", 3)}, jit.Machine.host())["good"]) == 3


REFUSED = {
    "parse": "define void @k_bad( {",
    "verify": "define i64 @k_bad(i64 %a) {\n  %b = add i64 %c, 1\n  %c = add i64 %b, 1\n  ret i64 %b\n}",
}
SOUND = """
declare i64 @other(i64)
define internal i64 @twice(i64 %a) alwaysinline {
  %b = shl i64 %a, 1
  ret i64 %b
}
define i64 @k_one(i64 %a) {
  %b = call i64 @twice(i64 %a)
  %c = call i64 @twice(i64 %b)
  ret i64 %c
}
define i64 @k_two(i64 %a) {
  %b = call i64 @other(i64 %a)
  ret i64 %b
}
"""


@pytest.fixture
def compilers(machine_jit):
    """A compiler that calls LLVM function by function, and one that compiles a module in one native call."""
    machine_jit._prepare_threads()
    assert machine_jit._native is not None
    return jit.Compiler(machine_jit.machine), machine_jit._compiler()


LOADS = """
define i64 @k_loads(ptr %from, i64 %count) {
entry:
  br label %body
body:
  %i = phi i64 [ 0, %entry ], [ %next, %body ]
  %sum = phi i64 [ 0, %entry ], [ %more, %body ]
  %x = load i64, ptr %from
  %more = add i64 %sum, %x
  %next = add i64 %i, 1
  %again = icmp slt i64 %next, %count
  br i1 %again, label %body, label %end
end:
  ret i64 %more
}
"""


@pytest.mark.parametrize("loops", [True, False])
def test_one_native_call_compiles_as_many_calls_do(compilers, loops, monkeypatch):
    plain, native = compilers
    texts = {"sound": SOUND, "loads": LOADS}
    expected = {name: plain.compile(name, text, loops=loops) for name, text in texts.items()}
    ran = []
    monkeypatch.setattr(jit.Compiler, "_optimize", lambda self, *args: ran.append(args))
    for name, text in texts.items():
        assert native.compile(name, text, loops=loops) == expected[name] and not ran
    sound = expected["sound"]
    assert b"k_one" in sound and b"twice" not in sound, "the helper is inlined"


def test_loops_are_optimized_where_that_is_asked_for(compilers):
    for compiler in compilers:
        with_loops = compiler.compile("loads", LOADS)
        assert compiler.compile("loads", LOADS, loops=True) == with_loops
        # the sum of equal numbers is a product once loops are looked at
        assert compiler.compile("loads", LOADS, loops=False) != with_loops


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_the_native_call_leaves_errors_to_the_other_calls(text, compilers):
    _, native = compilers
    made = []
    call = native.native
    native.native = lambda *args: made.append(call(*args))
    with pytest.raises(jit.CompileError, match="refuses the module of bad"):
        native.compile("bad", text)
    assert made == [None]
    native.native = call
    assert native.compile("sound", SOUND)


def test_the_native_call_does_not_need_pythons_lock(compilers):
    """A thread that compiles advances to its end while another one keeps the lock."""
    plain, native = compilers
    lines = "".join(f"  %x{i + 1} = mul i64 %x{i}, %x{i // 2}\n" for i in range(3000))
    text = f"define i64 @k_long(i64 %x0) {{\n{lines}  ret i64 %x3000\n}}\n"
    start = time.thread_time()
    expected = plain.compile("long", text)
    whole = time.thread_time() - start
    interval, done = sys.getswitchinterval(), []
    thread = threading.Thread(target=lambda: done.append(native.compile("long", text)))

    def by_others():
        return time.process_time() - time.thread_time()

    before, deadline = by_others(), time.monotonic() + 60
    sys.setswitchinterval(600.0)  # the lock is released by calls of the system only
    try:
        thread.start()
        while by_others() - before < whole / 2 and time.monotonic() < deadline:
            pass
        used = by_others() - before
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert used >= whole / 2 and done == [expected]


def test_another_release_of_llvmlite_compiles_without_the_native_call(machine_jit, monkeypatch):
    def gone(address, library):
        raise AttributeError("LLVMPY_ContextCreate")

    monkeypatch.setattr(native_compiler, "NativeCompile", gone)
    machine_jit._prepare_threads()
    assert machine_jit._native is None
    assert machine_jit._compiler().compile("sound", SOUND)


def test_many_kernels_compile_on_several_threads(counts, tmp_path, monkeypatch):
    units = [unit(f"many{i}", i) for i in range(40)]
    monkeypatch.setattr(jit, "_cores", lambda: 4)
    monkeypatch.setattr(
        jit, "_compile_threads", jit._CompileThreads()
    )  # which has a thread per core
    loaded = jit.Jit(jit.Machine.host()).load(units, cache=Cache(tmp_path))
    assert [call(loaded[u.key][u.exports[0]]) for u in units] == list(range(40))
    monkeypatch.setattr(jit, "lock_free", lambda: False)
    serial = jit.Jit(jit.Machine.host()).load(units, cache=Cache(tmp_path / "other"))
    assert [call(serial[u.key][u.exports[0]]) for u in units] == list(range(40))
    objects = [
        sorted(p.read_bytes()[-500:] for p in d.rglob("*") if p.is_file())
        for d in (tmp_path / "object", tmp_path / "other")
    ]
    assert objects[0] == objects[1], "threads make other code"
    assert counts("compiled") == (80,)


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(jit, "_cores", lambda: 2)
    monkeypatch.setattr(jit, "_compile_threads", jit._CompileThreads())


def compilations(monkeypatch):
    """The keys of the units that LLVM compiles, with their threads."""
    done = []
    compile = jit.Compiler.compile

    def counted(self, name, *rest, **named):
        if name != native_compiler.EXPORT:
            done.append((name, threading.get_ident()))
        return compile(self, name, *rest, **named)

    monkeypatch.setattr(jit.Compiler, "compile", counted)
    return done


def test_started_units_are_compiled_once_on_another_thread(
    machine_jit, monkeypatch, tmp_path, two_cores
):
    monkeypatch.setenv("MAX_CACHE_DIR", str(tmp_path))
    done = compilations(monkeypatch)
    units = [unit(f"started{i}", i) for i in range(3)]
    for one in (units[0], units[1], units[0]):
        machine_jit.start(one)
    machine_jit.wait_for_started()
    assert sorted(name for name, _ in done) == ["started0-0", "started1-1"]
    assert threading.get_ident() not in {thread for _, thread in done}
    loaded = machine_jit.load(units)
    assert [call(loaded[f"started{i}-{i}"][f"k_started{i}"]) for i in range(3)] == [0, 1, 2]
    assert sorted(name for name, _ in done) == [f"started{i}-{i}" for i in range(3)]
    # what is loaded, or on the disk, is not started
    machine_jit.start(units[0])
    jit.Jit(jit.Machine.host()).start(units[1])
    machine_jit.wait_for_started()
    assert len(done) == 3


def test_the_native_call_is_linked_with_the_second_started_unit(
    machine_jit, monkeypatch, tmp_path, two_cores
):
    """It takes LLVM 5 ms, which a program of one kernel does not get back."""
    monkeypatch.setenv("MAX_CACHE_DIR", str(tmp_path))
    machine_jit.start(unit("alone", 1))
    assert machine_jit._native is None
    machine_jit.start(unit("second", 2))
    assert machine_jit._native is not None
    loaded = machine_jit.load([unit("alone", 1), unit("second", 2)])
    assert call(loaded["alone-1"]["k_alone"]) == 1 and call(loaded["second-2"]["k_second"]) == 2


def test_code_for_other_processors_follows_code_for_this_one():
    """LLVM is initialized for the host first, and for all targets when another one is asked for."""
    host = jit.Machine.host()
    other = "aarch64-unknown-linux-gnu" if "x86" in host.triple else "x86_64-unknown-linux-gnu"
    for triple in (host.triple, other):
        machine = jit.Machine(triple, "", "")
        assert b"k_one" in jit.Compiler(machine).compile("sound", SOUND)


def test_errors_of_started_units_are_raised_by_load(machine_jit, monkeypatch, tmp_path, two_cores):
    monkeypatch.setenv("MAX_CACHE_DIR", str(tmp_path))
    bad = jit.Unit("bad-ahead", ("k_bad",), lambda: "define void @k_bad( {")
    machine_jit.start(bad)
    with pytest.raises(jit.CompileError, match="refuses the module of bad-ahead"):
        machine_jit.load([bad])


def test_cancelled_units_can_still_be_loaded(machine_jit, monkeypatch, tmp_path, two_cores):
    monkeypatch.setenv("MAX_CACHE_DIR", str(tmp_path))
    machine_jit._prepare_threads()
    go, done = threading.Event(), compilations(monkeypatch)
    counted = jit.Compiler.compile

    def waiting(self, *arguments):
        assert go.wait(60)
        return counted(self, *arguments)

    monkeypatch.setattr(jit.Compiler, "compile", waiting)
    units = [unit(f"cancelled{i}", i) for i in range(8)]
    for one in units:
        machine_jit.start(one)
    machine_jit.cancel_started()
    go.set()
    machine_jit.wait_for_started()
    assert len(done) <= usable_cpus() + 1 < len(units)
    loaded = machine_jit.load(units)
    assert call(loaded["cancelled7-7"]["k_cancelled7"]) == 7
    assert sorted(name for name, _ in done) == [f"cancelled{i}-{i}" for i in range(8)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_starts_units_with_threads_of_its_own(monkeypatch, tmp_path, two_cores):
    monkeypatch.setenv("MAX_CACHE_DIR", str(tmp_path))
    shared = jit.jit_for(jit.Machine.host())
    shared.start(unit("parent", 1))
    child = os.fork()
    if child == 0:
        right = False
        with contextlib.suppress(BaseException):
            shared.start(unit("child", 5))
            loaded = shared.load([unit("child", 5), unit("parent", 1)])
            right = call(loaded["child-5"]["k_child"]) == 5
            right = right and call(loaded["parent-1"]["k_parent"]) == 1
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert call(shared.load([unit("parent", 1)])["parent-1"]["k_parent"]) == 1


def test_callers_in_several_threads_get_the_same_code(counts):
    texts, found = {f"race{i}": store(f"race{i}", i) for i in range(8)}, []
    threads = [
        threading.Thread(target=lambda: found.append(jit.compile_llvm(texts, jit.Machine.host())))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(f == found[0] for f in found)
    assert counts("compiled", "linked") == (8, 8)


VECTOR = """
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
define internal <16 x float> @times(<16 x float> %a, <16 x float> %b, <16 x float> %c) alwaysinline {
  %slot = alloca <16 x float>, align 64
  store <16 x float> %a, ptr %slot
  %x = load <16 x float>, ptr %slot
  %r = call <16 x float> @llvm.fma.v16f32(<16 x float> %x, <16 x float> %b, <16 x float> %c)
  ret <16 x float> %r
}
define void @k_vec(ptr %args, ptr %ctx) {
entry:
  %i = alloca i64
  %acc = alloca [2 x <16 x float>], align 64
  %x = load ptr, ptr %args
  %n.p = getelementptr i64, ptr %args, i64 1
  %n = load i64, ptr %n.p
  %a1 = getelementptr [2 x <16 x float>], ptr %acc, i64 0, i64 1
  store <16 x float> zeroinitializer, ptr %a1
  store i64 0, ptr %i
  br label %head
head:
  %iv = load i64, ptr %i
  %more = icmp slt i64 %iv, %n
  br i1 %more, label %body, label %end
body:
  %at = getelementptr <16 x float>, ptr %x, i64 %iv
  %v = load <16 x float>, ptr %at, align 4
  %old = load <16 x float>, ptr %a1
  %new = call <16 x float> @times(<16 x float> %v, <16 x float> %v, <16 x float> %old)
  store <16 x float> %new, ptr %a1
  %in = add i64 %iv, 1
  store i64 %in, ptr %i
  br label %head
end:
  %final = load <16 x float>, ptr %a1
  store <16 x float> %final, ptr %x, align 4
  ret void
}
"""


def test_locals_and_tiles_end_in_registers():
    """Gate on the pass pipeline: no local variable of a kernel is left on the stack."""
    machine = jit.Machine("x86_64-unknown-linux-gnu", "x86-64-v4", "+avx512f,-prefer-256-bit")
    assembly = jit.Compiler(machine).assembly(VECTOR)
    assert "rsp" not in assembly and "vfmadd" in assembly and "zmm" in assembly
    x = np.random.default_rng(0).standard_normal((9, 16), np.float32)
    expected = (x.astype(np.float64) ** 2).sum(0)
    args = np.array([x.ctypes.data, 9], np.int64)
    CALL(jit.compile_llvm({"vec": VECTOR}, jit.Machine.host())["vec"])(args.ctypes.data, None)
    np.testing.assert_allclose(x[0], expected, rtol=1e-5)


@kernel.kernel
def squares(out: kernel.Output[kernel.f32, 1], ctx: kernel.Context):
    for i in ctx.parallel(out.shape[0]):
        out[i] = kernel.f32(i) * kernel.f32(i) + 1


def test_optimized_code_and_plain_code_of_a_kernel_are_apart(counts, monkeypatch):
    target = kernel.host_target()
    ir = kernel.specialize(squares, [kernel.TensorSpec(kernel.f32, (None,))], {}, target)
    monkeypatch.setattr(kernel_code, "_optimizes", lambda: True)
    optimized = kernel_code.compile_kernels([ir], target)[ir.key]
    monkeypatch.setattr(kernel_code, "_optimizes", lambda: False)
    plain = kernel_code.compile_kernels([ir], target)[ir.key]
    assert plain != optimized and counts("compiled", "reused") == (2, 0)
    assert kernel_code.load_kernels([ir.key], target) == {ir.key: plain}
    monkeypatch.setattr(kernel_code, "_optimizes", lambda: True)
    assert kernel_code.load_kernels([ir.key], target) == {ir.key: optimized}
    assert counts("compiled", "reused") == (2, 2)


def test_dumps_go_to_the_log(caplog):
    with flags.override(MAX_DUMP="llvm,asm"), caplog.at_level(logging.INFO, "max.dump"):
        jit.compile_llvm({"dumped": store("dumped", 4242)}, jit.Machine.host())
    assert "define void @k_dumped" in caplog.text and "k_dumped:" in caplog.text
