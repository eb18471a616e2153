"""A server without requests sleeps: its processes are not woken, whatever else the machine does."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serve.conftest import TINY, RunningServer

SECONDS = 4.0
MOST_WAKES = 1.0
"""A second, of a process."""


def wakes(process: psutil.Process) -> dict[str, int]:
    """How often each thread of a process went to sleep since it began: each time something had woken it."""
    counts: dict[str, int] = {}
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        (line,) = (
            line
            for line in (task / "status").read_text().splitlines()
            if line.startswith("voluntary_ctxt_switches")
        )
        counts[f"{name} {task.name}"] = int(line.split()[-1])
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="counts of /proc")
def test_an_idle_server_is_not_woken(start_server) -> None:
    server: RunningServer = start_server("--model", str(TINY), "--max-length", "256").wait_ready()
    body = {"prompt": "import os", "max_tokens": 4}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).status_code == 200
    processes = {"server": psutil.Process(server.process.pid), "worker": server.worker}
    rates: dict[str, dict[str, float]] = {}
    # the executor looks for interrupts for a second after a run, longer on a busy machine; the connection is closed
    for _ in range(9):
        time.sleep(1.5)
        before = {name: wakes(process) for name, process in processes.items()}
        time.sleep(SECONDS)
        rates = {
            name: {
                thread: (count - before[name].get(thread, 0)) / SECONDS
                for thread, count in wakes(process).items()
            }
            for name, process in processes.items()
        }
        if all(sum(of_threads.values()) <= MOST_WAKES for of_threads in rates.values()):
            break
    server.stop()
    for name, of_threads in rates.items():
        assert sum(of_threads.values()) <= MOST_WAKES, (name, of_threads)
