"""`Model.trim` returns a model's memory to the system; it also happens when free memory is low."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

psutil = pytest.importorskip("psutil")

PRELUDE = """
import os, sys
import numpy as np
import psutil
from max._host.machine import SystemMemory
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.run import output_memory
from max.graph import DeviceRef, Graph, TensorType, ops

MB = 1 << 20
WIDTH = 1 << 18  # floats: 1 MB a row

def load(build, name="model"):
    type_ = TensorType(DType.float32, ["rows", WIDTH], DeviceRef.CPU())
    with Graph(name, input_types=[type_]) as graph:
        graph.output(*build(graph.inputs[0].tensor))
    return InferenceSession(devices=[CPU()], num_threads=2).load(graph)

def rss():
    return psutil.Process().memory_info().rss / MB

plus = load(lambda x: [x + 1])
x = np.zeros((100, WIDTH), np.float32)

def run(model=plus):
    model.execute(x)
"""


def run_script(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PRELUDE + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(["src", "."])},
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.split("\n")


def test_trim_gives_back_outputs_and_arena():
    lines = run_script(
        """
        # an arena: the sorted rows need places for all of them
        sort = load(lambda x: [ops.argsort(x[0]), ops.cumsum(ops.cumsum(x, 0), 1)], "sort")
        plus.execute(x[:1]); sort.execute(x[:1])
        before = rss()
        run(); run(sort); run()
        kept = rss()
        held = plus.execute(x)[0]
        plus.trim(); sort.trim()
        trimmed = rss()
        assert (held.to_numpy() == 1).all()
        del held
        freed = rss()
        run(); run(sort)
        print(kept - before, trimmed - before, freed - before, rss() - before)
        """
    )
    kept, trimmed, freed, again = (float(word) for word in lines[0].split())
    assert kept > 280  # two outputs, and an arena
    assert (
        trimmed < 130 and freed < 30
    )  # referenced outputs keep their memory until they are released
    assert again > 280


def test_trim_while_another_thread_executes():
    lines = run_script(
        """
        import threading
        stop, wrong = threading.Event(), []
        def work():
            while not stop.is_set():
                y = plus.execute(x[:9])[0]
                wrong.append(not (y.to_numpy() == 1).all())
        threads = [threading.Thread(target=work) for _ in range(3)]
        [t.start() for t in threads]
        for _ in range(200):
            plus.trim()
        stop.set()
        [t.join() for t in threads]
        print(len(wrong) > 0, any(wrong))
        """
    )
    assert lines[0] == "True False"


def test_nothing_is_kept_when_little_memory_is_left():
    lines = run_script(
        """
        plus.execute(x[:1])
        other = load(lambda x: [x * 2], "other")  # what a compilation takes is no output
        before = rss()
        run()
        kept = rss() - before
        output_memory.system_memory = lambda: SystemMemory(16 << 30, 1 << 30)
        output_memory.FRESH_SECONDS = 0
        run(other)
        print(kept, rss() - before)
        # enough again, but the blocks of all models would be more than a quarter of it
        output_memory.system_memory = lambda: SystemMemory(600 << 20, 600 << 20)
        run(plus); run(other)
        print(rss() - before, plus._output_memory.kept_bytes() + other._output_memory.kept_bytes())
        """
    )
    kept, left = (float(word) for word in lines[0].split())
    assert kept > 95 and left < 30
    left, size = (float(word) for word in lines[1].split())
    assert left < 130 and size <= 150 * (1 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the address space")
def test_what_is_kept_makes_room_for_what_is_needed():
    lines = run_script(
        """
        import resource
        others = [load(lambda x, i=i: [x + float(i)], f"other{i}") for i in range(6)]
        run()
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + 250 * MB,) * 2)
        for i, other in enumerate(others):
            assert other.execute(x)[0].to_numpy()[3, 3] == i
        try:
            held = [other.execute(x) for other in others]
        except MemoryError as error:
            print(str(error)[:16])
        """
    )
    assert lines[0].startswith("Tensor: no memor")
