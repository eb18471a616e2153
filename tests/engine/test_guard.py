"""``MAX_GUARD=1``: each allocation of a model ends at a guard page, and initially contains a pattern."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from max import kernel as k
from max._config import flags
from max._host import guard
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.loop import ModelLoop
from max.graph import DeviceRef, Graph, Weight, ops
from tests.engine.conftest import buffer, tensor

DEVICE = DeviceRef.CPU()


@k.register("test_guard_reach")
def reach(
    y: k.Output[k.f32, 1],
    x: k.Input[k.f32, 1],
    n: k.Input[k.i64, 1],
    ctx: k.Context,
    *,
    write: bool,
):
    """Accesses one element at an index from an input; only MAX_KERNEL_CHECK would check it."""
    if ctx.worker == 0:
        at = n[0]
        if write:
            y[at] = 1.0
        else:
            y[0] = x[at]


def reaching(where, write):
    """A model that reads or writes an element of an output, a temporary, a weight or a constant, of five elements."""
    types = [tensor("n"), tensor(1, dtype=DType.int64)]
    with Graph("reach", input_types=types) as graph:
        x, n = (v.tensor for v in graph.inputs)
        if where == "weight":
            x = Weight("w", DType.float32, (5,), DEVICE)
        elif where == "constant":
            x = ops.constant(np.arange(5, dtype=np.float32), DType.float32, DEVICE)
        elif where == "arena":
            x = ops.cumsum(x, axis=0)
        (y,) = ops.custom("test_guard_reach", DEVICE, [x, n], [tensor("n")], {"write": write})
        graph.output(ops.cumsum(y, axis=0) if where == "arena" else y)
    weights = {"w": np.zeros(5, np.float32)} if where == "weight" else {}
    return InferenceSession(devices=[CPU()], num_threads=1).load(graph, weights_registry=weights)


@pytest.fixture(autouse=True)
def _guarded():
    with flags.override(MAX_GUARD=True):
        yield


def layers(x):
    """Outputs, blocks of the arena, weights, constants, and values that are computed at load."""
    w = Weight("w", DType.float32, (24, 24), DEVICE)
    b = Weight("b", DType.float32, (24,), DEVICE)
    y = ops.softmax(x @ ops.transpose(w, 0, 1) + b * 2.0)
    z = ops.cumsum(y * ops.constant(np.arange(24, dtype=np.float32), DType.float32, DEVICE), axis=0)
    return z, ops.concat([ops.argsort(z[0]), ops.argsort(z[0])]), ops.sum(z, axis=0)


WEIGHTS = {
    "w": np.random.default_rng(0).standard_normal((24, 24)).astype(np.float32),
    "b": np.ones(24, np.float32),
}


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_results_are_as_without(load, rows):
    x = np.random.default_rng(rows).standard_normal((rows, 24)).astype(np.float32)
    model = load([tensor("n", 24)], layers, WEIGHTS, "layers")
    assert model._compiled.guarded
    found = [out.to_numpy().copy() for _ in range(2) for out in model.execute(x)]
    with flags.override(MAX_GUARD=False):
        plain = load([tensor("n", 24)], layers, WEIGHTS, "layers")
        assert not plain._compiled.guarded
        for have, want in zip(found, [*plain.execute(x), *plain.execute(x)], strict=True):
            np.testing.assert_array_equal(have, want.to_numpy())


def test_every_temporary_has_its_own_place(load):
    model = load([tensor("n", 24)], layers, WEIGHTS)
    instance = model._linked.main.instance((5,))
    blocks = model._linked.main.code.blocks
    assert len(blocks) > 1 and len(instance.holes) == len(blocks) + 1
    assert all(len(sizes) == 1 for _, sizes in blocks)
    assert all(hole % guard.PAGE == 0 for hole in instance.holes)


def test_outputs_end_at_a_page_and_are_fresh(load):
    model = load([tensor("n")], lambda x: x + 1)
    for size in (1, 3, 1000, 5000, 100_000):
        held = [model.execute(np.zeros(size, np.float32))[0] for _ in range(3)]
        assert len({out._ptr for out in held}) == 3
        assert all((out._ptr + 4 * size) % guard.PAGE == 0 for out in held)


def test_sizes_told_by_a_run_loops_and_captures(load):
    def build(x):
        found = ops.nonzero(x, "found")
        return found * 2, ops.cumsum(x, axis=0)

    x = np.array([0, 3, 0, 4, 5], np.float32)
    places, sums = load([tensor("n")], build).execute(x)
    np.testing.assert_array_equal(places.to_numpy(), np.argwhere(x) * 2)
    np.testing.assert_array_equal(sums.to_numpy(), np.cumsum(x))

    halved = load(
        [tensor("n")],
        lambda x: ops.while_loop([x], lambda y: y[1] > 1.0, lambda y: [ops.cumsum(y, 0) * 0.1]),
    )
    with flags.override(MAX_GUARD=False):
        plain = load(
            [tensor("n")],
            lambda x: ops.while_loop([x], lambda y: y[1] > 1.0, lambda y: [ops.cumsum(y, 0) * 0.1]),
        )
    np.testing.assert_array_equal(
        halved.execute(x * 9)[0].to_numpy(), plain.execute(x * 9)[0].to_numpy()
    )

    model = load([tensor("n")], lambda x: ops.cumsum(ops.argsort(x), axis=0))
    given = Tensor.from_numpy(x)
    (out,) = model.capture(1, given)
    model.replay(1, given)
    np.testing.assert_array_equal(out.to_numpy(), np.cumsum(np.argsort(x, kind="stable")))

    again = Tensor.zeros((1,), DType.uint8)
    after = load(
        [buffer(1, dtype=DType.uint8)], lambda b: ops.buffer_store(b, ops.buffer_load(b) * 0)
    )
    (out,) = ModelLoop(model, after).run([given], lambda _: [again], again)
    np.testing.assert_array_equal(out.to_numpy(), np.cumsum(np.argsort(x, kind="stable")))


SCRIPT = """
import numpy as np
from tests.engine.test_guard import reaching
model = reaching({where!r}, {write})
print(model.execute(np.zeros(5, np.float32), np.array([{at}]))[0].to_numpy()[:2].tolist())
"""


def ends(where, write, at):
    """Returns the exit status of a process that makes the access."""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(where=where, write=write, at=at)],
        capture_output=True,
        timeout=60,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(["src", "."]), "MAX_GUARD": "1", "MAX_KERNEL_CHECK": "0"},
    ).returncode


@pytest.mark.skipif(sys.platform == "win32", reason="needs pages that nothing may touch")
@pytest.mark.parametrize(
    ("where", "write"),
    [("output", True), ("arena", True), ("arena", False), ("weight", False), ("constant", False)],
)
def test_the_first_element_behind_the_end_cannot_be_touched(where, write):
    with flags.override(MAX_KERNEL_CHECK=0):
        (y,) = reaching(where, write).execute(np.zeros(5, np.float32), np.array([4]))
    assert ends(where, write, 5) < 0  # ended by a signal
    if where == "output":  # its other elements still contain the pattern
        never = np.array([0xFBFBFBFB], np.uint32).view(np.float32)[0]
        np.testing.assert_array_equal(y.to_numpy(), [never] * 4 + [1])


@pytest.mark.parametrize("num_bytes", [0, 1, guard.PAGE, guard.PAGE + 1])
def test_memory_ends_at_a_page(num_bytes: int) -> None:
    copy = guard.guarded_copy(np.zeros(num_bytes, np.uint8))
    assert not copy.flags.writeable
    for block in (guard.allocate(num_bytes), copy):
        assert block.size == num_bytes and (block.ctypes.data + num_bytes) % guard.PAGE == 0
    pages = guard.between_pages(num_bytes)
    assert num_bytes <= pages.size < num_bytes + guard.PAGE and pages.size % guard.PAGE == 0
    assert set(pages.tolist()) <= {guard.PATTERN}


@pytest.mark.skipif(not guard.CAN_PROTECT, reason="memory is not protected")
def test_holes_are_whole_pages() -> None:
    with pytest.raises(OSError, match="mprotect of") as raised:
        guard.with_holes(3 * guard.PAGE, [1])
    assert raised.value.errno == errno.EINVAL


def access_of(address: int) -> str:
    """How this process may access the memory at an address, such as ``rw-``; as the system lists its mappings."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access = line.split()[:2]
        first, end = (int(number, 16) for number in span.split("-"))
        if first <= address < end:
            return access[:3]
    raise LookupError(hex(address))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="lists mappings as Linux does")
@pytest.mark.parametrize("size", [1, 4000, guard.PAGE, 2 * guard.PAGE + 7])
def test_access_to_pages(size: int) -> None:
    block = guard.allocate(size)
    address, whole = block.ctypes.data, -(-size // guard.PAGE) * guard.PAGE
    assert block.size == size and (address + size) % guard.PAGE == 0
    assert access_of(address) == access_of(address + size - 1) == "rw-"
    assert access_of(address + size) == access_of(address + size - whole - 1) == "---"
    assert (block == guard.PATTERN).all()
    copy = guard.guarded_copy(block)
    assert access_of(copy.ctypes.data) == "r--" and (copy == block).all()
    assert access_of(copy.ctypes.data + size) == "---"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="lists mappings as Linux does")
def test_access_to_holes() -> None:
    assert guard.with_holes(0, ()).size == guard.PAGE
    arena = guard.with_holes(3 * guard.PAGE, [guard.PAGE])
    accesses = [access_of(arena.ctypes.data + page * guard.PAGE) for page in range(3)]
    assert accesses == ["rw-", "---", "rw-"]
    assert (arena[: guard.PAGE] == guard.PATTERN).all()
