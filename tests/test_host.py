"""The CPUs and memory that a process may use, on made-up systems."""

from __future__ import annotations

import math
import os

import pytest

from max._host import machine


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
    assert machine.cgroup_cpu_limit(tmp_path / "cg", tmp_path / "proc") == limit


MEMINFO = "MemTotal:    8000 kB\nMemFree:   10 kB\nMemAvailable:   5000 kB\nHugePages_Total:  0\n"


@pytest.mark.skipif(not machine.LINUX, reason="reads procfs")
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
    found = machine.system_memory(tmp_path / "cg", tmp_path / "proc")
    assert (found.total, found.available) == (total, available)


def test_siblings_count_as_one_core(tmp_path):
    write(
        tmp_path,
        {f"cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}\n" for i in range(8)},
    )
    assert machine._physical(set(range(8)), tmp_path) == 4
    assert machine._physical({0, 4}, tmp_path) == 1
    assert machine._physical({0, 1}, tmp_path) == 2
    assert machine._physical({0, 1}, tmp_path / "nothing") == 2


def test_usable_cpus_respects_affinity_and_groups(monkeypatch):
    assert 1 <= machine.usable_cpus() <= (os.cpu_count() or 1)
    monkeypatch.setattr(machine, "logical_cpus", lambda: set(range(64)))
    monkeypatch.setattr(machine, "_physical", len)
    monkeypatch.setattr(machine, "cgroup_cpu_limit", lambda: 2.5)
    monkeypatch.setattr(machine, "LINUX", True)
    assert machine.usable_cpus() == 3


@pytest.mark.skipif(not machine.LINUX, reason="reads procfs")
def test_available_memory_follows_the_limit_of_the_control_group(tmp_path):
    group, proc = tmp_path / "cgroup", tmp_path / "proc"
    assert machine.available_memory(group, proc) is None
    for folder in (group, proc / "self"):
        folder.mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   8 kB\n")
    assert machine.available_memory(group, proc) == 8192
    for limit, current, expected in (("max", 1, 8192), ("6000", 5000, 1700), ("6000", 9000, 0)):
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text(f"{current}\n")
        (group / "memory.stat").write_text("anon 3\ninactive_file 700\n")
        assert machine.available_memory(group, proc) == expected
