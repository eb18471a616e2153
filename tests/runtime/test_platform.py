"""The platform module against made-up systems, and its primitives compiled for other platforms."""

from __future__ import annotations

import math
import os

import llvmlite.binding as llvm
import pytest

from max._abi import PoolState
from max._config import flags
from max._runtime import native, platform
from max._runtime.jit import Compiler, Machine


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, math.inf),
        ({"proc/self/cgroup": "0::/\n", "cg/cpu.max": "max 100000\n"}, math.inf),
        ({"proc/self/cgroup": "0::/\n", "cg/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "cg/a/b/cpu.max": "max 100000\n",
                "cg/a/cpu.max": "200000 100000",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "cg/a/b/cpu.max": "50000 100000",
                "cg/a/cpu.max": "200000 100000",
            },
            0.5,
        ),
        # in a container: the group's path is that of the host, the mount is the group
        ({"proc/self/cgroup": "0::/../x\n", "cg/cpu.max": "300000 100000"}, 3.0),
        (
            {
                "proc/self/cgroup": "4:memory:/q\n3:cpu,cpuacct:/q\n",
                "cg/cpu/q/cpu.cfs_quota_us": "250000\n",
                "cg/cpu/q/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/q\n",
                "cg/cpu,cpuacct/q/cpu.cfs_quota_us": "-1\n",
                "cg/cpu,cpuacct/q/cpu.cfs_period_us": "100000\n",
            },
            math.inf,
        ),
        ({"proc/self/cgroup": "rubbish\n0::/\n", "cg/cpu.max": "rubbish"}, math.inf),
    ],
)
def test_control_groups_limit_the_cpus(tmp_path, files, limit):
    write(tmp_path, files)
    assert platform.cgroup_cpu_limit(tmp_path / "cg", tmp_path / "proc") == limit


MEMINFO = "MemTotal:    8000 kB\nMemFree:   10 kB\nMemAvailable:   5000 kB\nHugePages_Total:  0\n"


@pytest.mark.skipif(not platform.LINUX, reason="reads procfs")
@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, math.inf, math.inf),
        ({"proc/meminfo": "rubbish"}, math.inf, math.inf),
        ({"proc/meminfo": MEMINFO}, 8000 * 1024, 5000 * 1024),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/a/b\n",
                "cg/a/b/memory.max": "max\n",
                "cg/a/b/memory.current": "70\n",
                "cg/a/memory.max": "100000\n",
                "cg/a/memory.current": "70000\n",
                "cg/a/memory.stat": "anon 1\ninactive_file 5000\n",
            },
            100_000,
            35_000,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "4:memory:/q\n3:cpu:/q\n",
                "cg/memory/q/memory.limit_in_bytes": "3000\n",
                "cg/memory/q/memory.usage_in_bytes": "3500\n",
                "cg/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cg/memory/memory.usage_in_bytes": "3500\n",
            },
            3000,
            0,
        ),
    ],
)
def test_memory_of_machine_and_control_groups(tmp_path, files, total, available):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = platform.system_memory(tmp_path / "cg", tmp_path / "proc")
    assert (found.total, found.available) == (total, available)


def test_siblings_count_as_one_core(tmp_path):
    write(
        tmp_path,
        {f"cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}\n" for i in range(8)},
    )
    assert platform._physical(set(range(8)), tmp_path) == 4
    assert platform._physical({0, 4}, tmp_path) == 1
    assert platform._physical({0, 1}, tmp_path) == 2
    assert platform._physical({0, 1}, tmp_path / "nothing") == 2


def test_usable_cpus_respects_affinity_and_groups(monkeypatch):
    assert 1 <= platform.usable_cpus() <= (os.cpu_count() or 1)
    monkeypatch.setattr(platform, "_affinity", lambda: set(range(64)))
    monkeypatch.setattr(platform, "_physical", len)
    monkeypatch.setattr(platform, "cgroup_cpu_limit", lambda: 2.5)
    monkeypatch.setattr(platform, "LINUX", True)
    assert platform.usable_cpus() == 3
    with flags.override(MAX_NUM_THREADS=0):
        assert platform.default_num_threads() == 3
    with flags.override(MAX_NUM_THREADS=9):
        assert platform.default_num_threads() == 9


@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("size", [0, 1, 63, 100_000, 9 << 20])
def test_memory_is_aligned(size, alignment):
    memory = platform.allocate(size, alignment)
    assert memory.size == size
    assert size == 0 or memory.ctypes.data % alignment == 0
    memory[:] = 255


def test_huge_pages_are_advice_for_whole_pages():
    memory = platform.allocate(8 << 20)
    assert platform.advise_huge_pages(memory.ctypes.data, 100) is False
    assert platform.advise_huge_pages(memory.ctypes.data, memory.size) in (True, False)


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
