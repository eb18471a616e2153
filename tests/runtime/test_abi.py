"""The shared layouts of `max._abi`: as documented, as kernels and the native part use them, and used by name only."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from max import _abi
from max import kernel as k
from max._abi import BaseLayout, ErrorRecord, Words
from max._backends.cpu.runtime import native, native_waiting, native_walk
from max._backends.cpu.runtime.executor import Executor
from max._backends.cpu.runtime.kernel_code import compile_kernels
from max._backends.cpu.runtime.pool import Pool
from max._backends.program import Launch, Program

ROOT = Path(__file__).parents[2]
ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
BARRIER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class ContextStruct(ctypes.Structure):
    """The context of docs/contracts.md, written down a second time."""

    _fields_ = [
        ("worker", ctypes.c_int64),
        ("workers", ctypes.c_int64),
        ("counters", ctypes.c_void_p),
        ("barrier", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("launch", ctypes.c_int64),
        ("args", ctypes.c_void_p),
        ("alert", ctypes.c_int64),
        ("poll", ctypes.c_void_p),
    ]


class ErrorStruct(ctypes.Structure):
    _fields_ = [
        ("state", ctypes.c_int64),
        ("launch", ctypes.c_int64),
        ("raise", ctypes.c_int64),
        ("values", ctypes.c_int64 * 5),
    ]


@pytest.mark.parametrize(
    ("words", "struct"), [(_abi.Context, ContextStruct), (ErrorRecord, ErrorStruct)]
)
def test_words_are_where_the_struct_has_them(words: type[Words], struct: type[ctypes.Structure]):
    fields = {name: getattr(struct, name).offset for name, _ in struct._fields_}
    assert {m.name.lower(): m.offset for m in words if m.name != "END"} == fields
    if "END" in words.__members__:
        assert words["END"].offset == ctypes.sizeof(struct)
    else:
        assert ctypes.sizeof(struct) <= _abi.CONTEXT_BYTES


def test_the_documented_numbers_are_those_of_the_context():
    text = " ".join((ROOT / "docs" / "contracts.md").read_text().split())
    paragraph = text[text.index("`ctx` points to") : text.index("The barrier function returns")]
    numbers = {int(n): rest for n, rest in re.findall(r"`(\d+)` ([a-z' ]+)", paragraph)}
    words = {
        "WORKER": "worker", "WORKERS": "number of workers", "COUNTERS": "counters", "BARRIER": "barrier",
        "POOL": "pool", "ERROR": "error record", "SCRATCH": "scratch", "SCRATCH_BYTES": "size",
        "LAUNCH": "launch", "ALERT": "alert word", "POLL": "function",
    }  # fmt: skip
    for name, word in words.items():
        assert word in numbers[_abi.Context[name]], name
    assert set(numbers) == {_abi.Context[name] for name in words}


@k.kernel
def probe(
    out: k.Output[k.i64, 1], partial: k.Output[k.i64, 1], limit: k.i64, ctx: k.Context
) -> None:
    """Each worker records the values that it reads; the middle phase is chunked; a total over the limit raises."""
    scratch = ctx.scratch(k.i64, 4)
    scratch[1] = ctx.worker + 10
    out[2 * ctx.worker] = ctx.num_workers
    out[2 * ctx.worker + 1] = scratch[1]
    for i in ctx.parallel(partial.shape[0], 1):
        partial[i] = i + 1
    ctx.barrier()
    total = k.i64(0)
    for i in range(partial.shape[0]):
        total += partial[i]
    if total > limit:
        raise ValueError("{} is more than {}", total, limit)


def test_a_kernel_uses_a_context_that_ctypes_laid_out():
    target = k.host_target()
    ir = k.specialize(
        probe, [k.TensorSpec(k.i64, (None,)), k.TensorSpec(k.i64, (None,)), k.i64], {}, target
    )
    entry = ENTRY(compile_kernels([ir], target)[ir.key])
    calls = list[str]()
    barrier = BARRIER(lambda ctx: calls.append("barrier"))
    out, partial = np.zeros(6, np.int64), np.zeros(5, np.int64)
    counters = np.zeros(ir.phases * 8, np.int64)
    scratch, error = np.full(8, -1, np.int64), ErrorStruct()
    context = ContextStruct(
        worker=2, workers=3, counters=counters.ctypes.data, error=ctypes.addressof(error),
        barrier=ctypes.cast(barrier, ctypes.c_void_p), scratch=scratch.ctypes.data, scratch_bytes=64, launch=7,
    )  # fmt: skip
    args = np.array(ir.words([out, partial, np.int64(14)]), np.int64)
    entry(args.ctypes.data, ctypes.addressof(context))
    assert out.tolist() == [0, 0, 0, 0, 3, 12]
    assert partial.tolist() == [1, 2, 3, 4, 5]
    assert scratch.tolist() == [-1, 12, *[-1] * 6]
    # two chunks of a share, one of the last, each with the look at its end
    assert counters.tolist() == [3, 3, 2, 0, 0, 0, 0, 0]
    assert calls == ["barrier"]
    assert (error.state, error.launch) == (1, 7)
    assert ir.messages[getattr(error, "raise")].text == "{} is more than {}"
    assert list(error.values)[:2] == [15, 14]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_pool_hands_a_kernel_the_struct_that_ctypes_reads(workers: int):
    seen = dict[int, tuple[int, ...]]()

    def look(args: int, ctx: int) -> None:
        c = ContextStruct.from_address(ctx)
        words = (ctypes.c_int64 * 3).from_address(args)
        counters = (ctypes.c_int64 * 16).from_address(c.counters)
        state = ErrorStruct.from_address(c.error).state
        seen[c.worker] = (c.workers, c.launch, c.scratch_bytes, c.scratch % 64, state, *counters, *words)  # fmt: skip
        assert c.pool
        assert c.barrier
        assert c.poll
        assert c.args == args
        assert not c.alert

    entry = ENTRY(look)
    address = ctypes.cast(entry, ctypes.c_void_p).value or 0
    slots = [(1, 5), (0, 7), (2, -1)]
    launches = [Launch(address, [], phases=1), Launch(address, slots, phases=2)]
    pool = Pool(workers)
    Executor(pool, Program(launches, 3, 100)).run(np.array([0, 100, 200]))
    rest = (1, 100, 0, 0, *[0] * 16, 105, 7, 199)
    assert seen == {worker: (workers, *rest) for worker in range(workers)}
    pool.close()


def test_the_native_part_names_every_offset():
    """No number stands in an address computation of the text but through a name."""
    text = native._TEXT + native_waiting.WAITING + native_walk.WALK
    steps = re.findall(r"getelementptr [^\n]*", text)
    assert len(steps) > 50
    assert not [step for step in steps if re.search(r"i64 \d|i8, .*\{", step)]


@pytest.mark.parametrize(("inputs", "outputs"), [(0, 0), (0, 2), (3, 1)])
def test_bases_fill_their_vector(inputs: int, outputs: int):
    layout = BaseLayout(inputs, outputs)
    places = [layout.NOTHING, *(layout.arena(segment) for segment in range(3))]
    places += range(inputs + outputs + 4)[layout.inputs]
    places += range(inputs + outputs + 4)[layout.outputs]
    assert sorted(places) == list(range(layout.count(3)))
    assert list(range(9)[layout.inputs]) == [layout.input(i) for i in range(inputs)]
    assert list(range(9)[layout.outputs]) == [layout.output(i) for i in range(outputs)]
    vector = BaseLayout.addresses(7, range(10, 10 + inputs), range(20, 20 + outputs))
    assert len(vector) == layout.count()
    assert vector[layout.arena()] == 7
    assert vector[layout.inputs] == list(range(10, 10 + inputs))
    assert vector[layout.outputs] == list(range(20, 20 + outputs))


def test_nobody_has_a_number_of_its_own(tmp_path: Path):
    """Kernels, pool, executor, compiler and engine work with all layouts changed: each number is used by its name."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "runtime" / "moved_layouts.py"], cwd=ROOT, capture_output=True, text=True,
        timeout=200,
        env={"MAX_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout.endswith("sound\n"), done.stderr[-3000:]
