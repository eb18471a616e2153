"""The platform module against made-up systems, and its primitives compiled for other platforms."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from max._abi import PoolState
from max._backends.cpu.runtime import native, platform
from max._backends.cpu.runtime.jit import Compiler, Machine
from max._config import flags
from max._host import host_memory
from max._host.machine import LINUX
from max._host.threads import DaemonThread


def test_number_of_threads(monkeypatch):
    monkeypatch.setattr(platform, "usable_cpus", lambda: 3)
    with flags.override(MAX_NUM_THREADS=0):
        assert platform.default_num_threads() == 3
    with flags.override(MAX_NUM_THREADS=9):
        assert platform.default_num_threads() == 9


@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("size", [0, 1, 63, 100_000, 9 << 20])
def test_memory_is_aligned(size, alignment):
    memory = host_memory.allocate(size, alignment)
    assert memory.size == size
    assert size == 0 or memory.ctypes.data % alignment == 0
    memory[:] = 255


def test_huge_pages_are_advice_for_whole_pages():
    memory = host_memory.allocate(8 << 20)
    assert host_memory.advise_huge_pages(memory.ctypes.data, 100) is False
    assert host_memory.advise_huge_pages(memory.ctypes.data, memory.size) in (True, False)


def test_parking_modes():
    assert platform.parking_mode("portable") in ("pthread", "address")
    assert platform.parking_mode("auto") in ("futex", "pthread", "address")


def test_futex_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(platform, "LINUX", False)
    with pytest.raises(ValueError, match="auto or portable would fit"):
        platform.parking_mode("futex")
    assert platform.parking_mode("auto") in ("pthread", "address")


def test_amx_is_asked_for_once_and_answers():
    assert platform.request_amx() is platform.request_amx()
    if not llvm.get_host_cpu_features().get("amx-tile", False):
        assert platform.request_amx() is False


PLATFORMS = [
    ("linux", "x86_64", "x86_64-unknown-linux-gnu", "futex"),
    ("linux", "x86_64", "x86_64-unknown-linux-gnu", "pthread"),
    ("linux", "aarch64", "aarch64-unknown-linux-gnu", "futex"),
    ("linux", "riscv64", "riscv64-unknown-linux-gnu", "pthread"),
    ("darwin", "aarch64", "arm64-apple-darwin23.0.0", "pthread"),
    ("darwin", "x86_64", "x86_64-apple-darwin23.0.0", "pthread"),
    ("win32", "x86_64", "x86_64-pc-windows-msvc", "address"),
    ("win32", "aarch64", "aarch64-pc-windows-msvc", "address"),
]


@pytest.mark.parametrize(("system", "machine", "triple", "mode"), PLATFORMS)
def test_the_pool_compiles_for_each_platform(system, machine, triple, mode):
    ir = platform.primitives_ir(system, machine, mode, PoolState.PARKING.offset)
    primitives = platform.Primitives(mode, ir, {}, 1)
    generic = "generic-rv64" if machine == "riscv64" else "generic"
    features = "+a" if machine == "riscv64" else ""
    compiler = Compiler(Machine(triple, generic, features))
    text = native.native_ir(primitives, triple)
    assert len(compiler.compile("pool", text)) > 1000
    pause = {"x86_64": "pause", "aarch64": "yield"}.get(machine)
    assert pause is None or pause in compiler.assembly(text)


def test_code_models_are_those_that_link():
    assert platform.code_model("x86_64-unknown-linux-gnu") == platform.CodeModel(
        "small", "pic", True
    )
    assert platform.code_model("arm64-apple-darwin23") == platform.CodeModel("small", "pic", True)
    assert platform.code_model("x86_64-pc-windows-msvc").jitlink is False


@pytest.mark.skipif(not LINUX, reason="threads have names on Linux")
def test_threads_have_names() -> None:
    began, goes = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        goes.wait(60)

    thread = DaemonThread(wait, name="ünï max worker 12")
    thread.start()
    assert began.wait(60)
    names = [path.read_bytes().strip() for path in Path("/proc/self/task").glob("*/comm")]
    goes.set()
    assert "ünï max worker 12".encode()[:15] in names


def test_all_threads_are_given_names() -> None:
    """By whoever starts one: a profile or a stack of a process tells what each does."""
    starts = {
        "Thread": (None, "name"),
        "DaemonThread": (None, "name"),
        "ThreadPoolExecutor": (2, "thread_name_prefix"),
    }
    unnamed: list[str] = []
    for path in (Path(__file__).parents[2] / "src").rglob("*.py"):
        text = path.read_text()
        if not any(name in text for name in starts):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            if called not in starts:
                continue
            place, keyword = starts[called]
            given = place is not None and len(node.args) >= place
            if not given and keyword not in {each.arg for each in node.keywords}:
                unnamed.append(f"{path}:{node.lineno}")
    assert unnamed == []
