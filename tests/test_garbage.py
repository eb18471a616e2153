"""Rare garbage collections: thresholds in and after blocks, and what stays as the program set it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from max._host.garbage import MOST_NEW, rare_collections

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def own_thresholds() -> Iterator[None]:
    """Thresholds that differ from Python's own, and those of before afterwards."""
    before = gc.get_threshold()
    gc.set_threshold(701, 11, 12)
    yield
    gc.set_threshold(*before)


def test_thresholds_are_higher_in_a_block_and_restored_after_it() -> None:
    with rare_collections():
        assert gc.get_threshold() == (MOST_NEW, 11, 12)
        assert gc.isenabled()
        with rare_collections():
            assert gc.get_threshold()[0] == MOST_NEW
        assert gc.get_threshold()[0] == MOST_NEW
    assert gc.get_threshold() == (701, 11, 12)


def test_an_error_restores_them() -> None:
    @rare_collections()
    def fail() -> None:
        assert gc.get_threshold()[0] == MOST_NEW
        raise KeyError("x")

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
        assert gc.get_threshold() == (701, 11, 12)


def test_the_last_of_several_threads_restores_them() -> None:
    entered, end = threading.Event(), threading.Event()

    def other() -> None:
        with rare_collections():
            entered.set()
            end.wait(60)

    thread = threading.Thread(target=other)
    with rare_collections():
        thread.start()
        assert entered.wait(60)
    assert gc.get_threshold()[0] == MOST_NEW
    end.set()
    thread.join(60)
    assert gc.get_threshold() == (701, 11, 12)


@pytest.mark.parametrize("threshold", [0, MOST_NEW, MOST_NEW + 1])
def test_higher_thresholds_and_none_stay(threshold: int) -> None:
    gc.set_threshold(threshold, 11, 12)
    with rare_collections():
        assert gc.get_threshold() == (threshold, 11, 12)
    assert gc.get_threshold() == (threshold, 11, 12)


def test_thresholds_that_the_program_sets_meanwhile_stay() -> None:
    with rare_collections():
        gc.set_threshold(900, 5, 5)
        with rare_collections():
            assert gc.get_threshold() == (900, 5, 5)
    assert gc.get_threshold() == (900, 5, 5)


@pytest.mark.parametrize("check", ["keep_objects", "keep_frozen_objects", "keep_none"])
def test_kept_objects(check: str) -> None:
    """In a process of its own: the objects of this one are frozen, and millions."""
    code = f"from tests.test_garbage import {check} as check; check()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def keep_objects() -> None:
    """Kept objects are old, and still collected."""

    class Node:
        def __init__(self) -> None:
            self.own = self

    gc.collect()
    alive: list[int] = []
    with rare_collections():
        plain = Node()
        assert _generation(plain) == 0
    with rare_collections(keep=True):
        kept = Node()
        Node.__del__ = lambda self: alive.append(1)  # pyright: ignore[reportAttributeAccessIssue]
    assert _generation(kept) == 2
    assert gc.get_freeze_count() == 0
    del kept
    assert not alive
    gc.collect()
    assert alive == [1]


def keep_none() -> None:
    """A collector that is off stays off."""
    gc.disable()
    new: list[object] = []
    with rare_collections(keep=True):
        new.append(new)
    assert not gc.isenabled()
    assert _generation(new) == 0


def keep_frozen_objects() -> None:
    """Objects that the program froze stay frozen."""
    gc.freeze()
    frozen = gc.get_freeze_count()
    assert frozen
    with mock.patch.object(gc, "get_freeze_count", wraps=gc.get_freeze_count) as count:
        for _ in range(5):
            with rare_collections(keep=True):
                pass
        # it visits all of them
        assert count.call_count == 1
    assert gc.get_freeze_count() >= frozen // 2


def _generation(value: object) -> int:
    """The generation of an object, 0 to 2."""
    return next(n for n in range(3) if any(other is value for other in gc.get_objects(n)))


def test_the_first_compilation_of_a_process_leaves_no_young_objects() -> None:
    """The compiler's modules live as long as the process: a collection right after a load would visit them all."""
    code = (
        "import gc\n"
        "from max.dtype import DType\n"
        "from max.engine import InferenceSession\n"
        "from max.graph import DeviceRef, Graph, TensorType, ops\n"
        "session = InferenceSession(num_threads=1)\n"
        "graph = Graph('g', ops.relu, [TensorType(DType.float32, [4], DeviceRef.CPU())])\n"
        "visits = []\n"
        "gc.callbacks.append(lambda phase, info: visits.append(phase))\n"
        "session.load(graph)\n"
        "print(len(visits), gc.get_count()[0] < 5_000)\n"
    )
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "MAX_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    assert done.stdout.split() == ["0", "True"]
