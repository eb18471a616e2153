"""Copies of weights that eager programs keep: results are those of the elements now, however they were written."""

# the memory and the copies of tensors are read directly
# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from max import driver
from max import kernel as k
from max._config import flags
from max.driver import CPU
from max.dtype import DType
from max.experimental import Tensor, random
from max.experimental import functional as F
from max.experimental.programs import packed_weights as _packing
from max.experimental.programs import programs
from max.experimental.programs.ownership import owned_cells
from max.experimental.programs.packed_weights import packed_bytes, packed_programs
from max.experimental.programs.programs import compiled_programs
from max.experimental.record import recorder
from max.graph import BufferType, DeviceRef
from max.nn.module_v3 import Linear, Module, Sequential

RNG = np.random.default_rng(11)
WRITES: list[str] = []
"""The rules of the state machine that wrote a tensor of which there was a copy."""


@k.register("packing.first1")
def first1(x: k.InOut[k.f32, 1], ctx: k.Context, *, value: float):
    for _ in ctx.parallel(1):
        x[0] = value


@k.register("packing.first2")
def first2(x: k.InOut[k.f32, 2], ctx: k.Context, *, value: float):
    for i in ctx.parallel(x.shape[1]):
        x[0, i] = value


def array(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Small weights are packed after two runs."""
    _small_and_soon(monkeypatch)
    yield
    for packed in list(_packing.COPIES_OF_ALL.alive):
        packed.drop_copies()


def _small_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packing, "COST", 0)
    monkeypatch.setattr(_packing, "RUNS", 2)
    monkeypatch.setattr(_packing, "BACKOFF", 1)
    monkeypatch.setattr(_packing, "LEAST_BYTES", 256)
    monkeypatch.setattr(_packing, "under_pressure", lambda _: False)
    monkeypatch.setattr(programs, "PROGRAMS", programs.ProgramTable())
    # traces refer to programs
    monkeypatch.setattr(recorder, "_sites", {})


def own(*shape: int) -> Tensor:
    return Tensor.constant(array(*shape))


def elements(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The elements, copied by a program: no array on the memory is made."""
    return (tensor + 0).to_numpy()


def same(got: Tensor, want: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(got.to_numpy(), want, rtol=0, atol=1e-5 * max(1, abs(want).max()))


class Net(Module):
    """Products large enough to be packed; one weight is in two of them."""

    def __init__(self) -> None:
        self.a, self.bias = own(64, 96), own(96)
        self.b = own(64, 96)
        self.tied = own(64, 64)

    def __call__(self, x: Tensor) -> Tensor:
        y = F.tanh(x @ self.a + self.bias) @ self.b.T
        return (y @ self.tied) @ self.tied.T


def expected(x: np.ndarray[Any, Any], p: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    y = np.tanh(x @ p["a"] + p["bias"]) @ p["b"].T
    return (y @ p["tied"]) @ p["tied"].T


PATHS = [
    "setitem",
    "store",
    "custom",
    "array",
    "capsule",
    "torch",
    "driver",
    "view",
    "storage",
    "model",
]
NAMES = st.sampled_from(["a", "bias", "b", "tied"])


class Writes(RuleBasedStateMachine):
    """Writes by each path, with runs between; views stay and write later."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.values = {name: elements(p) for name, p in self.net.parameters}
        # tensors, and functions that set their first row or element
        self.views: list[tuple[str, Tensor, Callable[[float], None]]] = []

    def _wrote(self, name: str, tensor: Tensor, value: float) -> None:
        if getattr(self.net, name) is tensor:
            self.values[name][0] = value

    def _copied(self, name: str) -> bool:
        cell: Any = getattr(self.net, name)._cell
        return any(packed.holds(cell.storage) for packed in list(_packing.COPIES_OF_ALL.alive))

    @rule(times=st.integers(1, 9), rows=st.sampled_from([1, 3]))
    def run(self, times: int, rows: int) -> None:
        for _ in range(times):
            x = array(rows, 64)
            same(self.net(Tensor.constant(x)), expected(x, self.values))

    @rule(name=NAMES, how=st.sampled_from(PATHS),
          value=st.floats(-2, 2, width=32), keep=st.integers(0, 2))  # fmt: skip
    def write(self, name: str, how: str, value: float, keep: int) -> None:
        tensor: Tensor = getattr(self.net, name)
        if tensor._materialize()._read_only:
            return
        self.run(4, 1)  # packs what nothing else refers to
        if self._copied(name):
            WRITES.append(how)
        writer: Callable[[float], None] = _writer(tensor, how)
        writer(value)
        self._wrote(name, tensor, value)
        self.run(1, 1)
        if keep == 2:
            self.views.append((name, tensor, writer))

    @precondition(lambda self: self.views)
    @rule(data=st.data(), value=st.floats(-2, 2, width=32))
    def write_later(self, data: st.DataObject, value: float) -> None:
        name, tensor, writer = data.draw(st.sampled_from(self.views))
        writer(value)
        self._wrote(name, tensor, value)
        self.run(1, 1)

    @rule()
    def forget(self) -> None:
        self.views.clear()

    @rule(how=st.sampled_from(["numpy", "torch", "bytes", "map", "copy", "to", "one"]))
    def replace(self, how: str) -> None:
        values = {name: array(*value.shape) for name, value in self.values.items()}
        match how:
            case "numpy":
                self.net.load_state_dict({n: v.copy() for n, v in values.items()})
            case "torch":
                self.net.load_state_dict({n: torch.from_numpy(v.copy()) for n, v in values.items()})
            case "bytes":
                state = {n: np.frombuffer(v.tobytes(), np.float32) for n, v in values.items()}
                state = {n: v.reshape(values[n].shape) for n, v in state.items()}
                self.net.load_state_dict(state)
            case "map":
                self.net = self.net.map_parameters(lambda name, _: Tensor.constant(values[name]))
            case "copy":
                self.net, values = copy.deepcopy(self.net), self.values
            case "to":
                self.net.to(CPU())
                values = self.values
            case _:
                values = {**self.values, "tied": values["tied"]}
                self.net.tied = Tensor.constant(values["tied"])
        self.values = values
        # arrays whose owner goes on to write
        if how in ("numpy", "torch"):
            self.values = {n: v.copy() for n, v in values.items()}

    @rule(name=NAMES, value=st.floats(-2, 2, width=32), torch_owner=st.booleans())
    def share(self, name: str, value: float, torch_owner: bool) -> None:
        memory = self.values[name].copy()
        producer: Any = torch.from_numpy(memory) if torch_owner else memory
        tensor = Tensor.from_dlpack(producer)
        setattr(self.net, name, tensor)

        def writer(value: float) -> None:
            producer[0] = value

        self.views.append((name, tensor, writer))


def _writer(tensor: Tensor, how: str) -> Callable[[float], None]:
    """Writes a tensor's first row, or element, by one path; holds on to what gives access."""
    target: Any = None

    def write(value: float) -> None:
        match how:
            case "setitem":
                tensor[0] = value
            case "store":
                new = elements(tensor)
                new[0] = value
                F.buffer_store(tensor, Tensor.constant(new))
            case "custom":
                F.inplace_custom(
                    f"packing.first{tensor.rank}", CPU(), [tensor], parameters={"value": value}
                )
            case "model":
                _first_row(target, value)
            case "driver":
                target[0] = (
                    np.full(target.shape[1:], value, np.float32) if target.rank > 1 else value
                )
            case _:
                target[0] = value

    match how:
        case "array":
            target = tensor.to_numpy()
        case "capsule":
            target = np.from_dlpack(tensor)
        case "torch":
            target = torch.from_dlpack(tensor)  # pyright: ignore[reportPrivateImportUsage]
        case "driver" | "model":
            target = tensor.driver_tensor
        case "view":
            target = tensor.driver_tensor[:].to_numpy()
        case "storage":
            storage = tensor.storage
            assert storage is not None
            target = storage.view(DType.float32, (storage.num_elements,)).view(
                DType.float32, storage.shape
            ).to_numpy()  # fmt: skip
        case _:
            pass
    return write


class _Setting(Module):
    def __call__(self, target: Any, value: Tensor) -> Tensor:
        F.buffer_store_slice(target, value, [0])
        return value


def _first_row(memory: driver.Tensor, value: float) -> None:
    """A model writes to its input buffer."""
    device = DeviceRef.CPU()
    row = Tensor.full(memory.shape[1:], value)
    run = _Setting().compile(BufferType(DType.float32, memory.shape, device), row.type)
    run(memory, row)


class TestWrites(Writes.TestCase):
    settings = settings(
        max_examples=8,
        stateful_step_count=20,
        derandomize=True,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )

    def runTest(self) -> None:
        WRITES.clear()
        super().runTest()
        assert len(WRITES) >= 5, WRITES


@pytest.mark.parametrize("how", PATHS)
def test_a_write_by_each_path(how: str) -> None:
    net = Net()
    values = {name: elements(p) for name, p in net.parameters}

    def run(times: int) -> None:
        for _ in range(times):
            x = array(2, 64)
            same(net(Tensor.constant(x)), expected(x, values))

    run(8)
    size = packed_bytes()
    assert size == sum(value.nbytes for value in values.values())
    writer = _writer(net.a, how)
    for value in (1.5, -0.5):
        writer(value)
        values["a"][0] = value
        run(6)  # one reads the new elements, others might pack
    has_access = how not in ("setitem", "store", "custom")
    assert packed_bytes() == size - has_access * values["a"].nbytes
    writer(2.0)
    values["a"][0] = 2.0
    run(1)
    del writer
    for packed in list(_packing.COPIES_OF_ALL.alive):
        packed.drop_copies()
    run(8)
    assert packed_bytes() == size


def test_repeated_runs_pack_once() -> None:
    net = Net()
    values = {name: elements(p) for name, p in net.parameters}
    before, compiled = packed_programs(), compiled_programs()
    for _ in range(30):
        x = array(2, 64)
        same(net(Tensor.constant(x)), expected(x, values))
    assert packed_programs() - before == 1
    (model,) = [
        packed.model for packed in list(_packing.COPIES_OF_ALL.alive) if packed.model is not None
    ]
    assert sum(name.startswith("packed_matmul") for name in model.kernel_summaries) == 4
    assert compiled_programs() - compiled == 1
    assert packed_bytes() == sum(value.nbytes for value in values.values())
    # these only read
    assert repr(net.a), str(net.b)
    assert float(net.bias[0].item()) == values["bias"][0]
    copy.deepcopy(net.tied)
    assert packed_bytes() == sum(value.nbytes for value in values.values())


def run_often(net: Module, times: int = 12) -> None:
    for _ in range(times):
        _ = net(Tensor.constant(array(2, 64))).realize


def test_copies_are_freed_with_the_tensors() -> None:
    net = Net()
    run_often(net)
    (packed,) = [
        weakref.ref(each.model) for each in list(_packing.COPIES_OF_ALL.alive) if each.model
    ]
    tensor = weakref.ref(net.a)
    storage = net.a._cell.storage  # pyright: ignore[reportOptionalMemberAccess]
    memory = weakref.ref(storage)
    del net, storage
    assert tensor() is None
    assert packed() is None
    assert memory() is None
    assert packed_bytes() == 0


def test_results_are_freed_without_the_garbage_collector() -> None:
    net = Net()
    gc.collect()
    gc.disable()
    try:
        for _ in range(12):
            result = net(Tensor.constant(array(2, 64)))
            memory = weakref.ref(result.realize._cell.storage)  # pyright: ignore[reportOptionalMemberAccess]
            del result
            assert memory() is None
    finally:
        gc.enable()


def test_the_size_is_limited() -> None:
    size = sum(p.num_elements() * 4 for _, p in Net().parameters)
    nets = [Net() for _ in range(3)]
    for net in nets:
        run_often(net, 60)
    assert packed_bytes() == _packing.COPIES * size  # of one program
    assert [bool(net.a._cell.users and net.a._cell.references()[0]) for net in nets] == [
        False,
        True,
        True,
    ]  # pyright: ignore[reportOptionalMemberAccess]


def test_nothing_is_packed_where_the_setting_is_zero() -> None:
    with flags.override(MAX_EAGER_PACKED_SIZE=0):
        run_often(Net())
        assert packed_bytes() == 0


def test_the_least_recently_used_copies_go() -> None:
    first, second = Linear(64, 512), Linear(96, 512)

    def run(linear: Module, inputs: int) -> None:
        for _ in range(12):
            _ = F.relu(linear(Tensor.constant(array(2, inputs)) * 2)).realize

    run(first, 64)
    first_bytes = packed_bytes()
    assert first_bytes
    run(second, 96)
    assert packed_bytes() > first_bytes
    limited = Linear(200, 1300)  # 1.045 MB, of 1 MiB for all
    with flags.override(MAX_EAGER_PACKED_SIZE=1):
        for _ in range(12):
            _ = limited(Tensor.constant(array(2, 200))).realize
    assert packed_bytes() == 4 * (200 * 1300 + 1300)


def test_memory_of_others_is_not_packed() -> None:
    memory = array(64, 96)
    shared = Tensor.from_dlpack(memory)
    of_torch = Tensor.from_dlpack(torch.zeros(64, 96))
    view = Tensor.from_dlpack(array(128, 96)[:64])
    fixed = Tensor.from_dlpack(np.frombuffer(memory.tobytes(), np.float32).reshape(64, 96))
    result = (random.normal([64, 96]) * 2).realize
    alias = Tensor(storage=(twice := own(64, 96)).driver_tensor)
    cells: Any = [t._cell for t in (shared, of_torch, view, fixed, result, twice, alias)]
    assert owned_cells(cells) == [False, False, False, True, True, False, False]
    del memory, alias
    assert owned_cells(cells[:1]) == [True]  # the array was the last reference
    assert owned_cells(cells[5:6]) == [False]  # `cells` has the alias
    del cells[6]
    assert owned_cells(cells[5:6]) == [True]
    for export in (
        result.to_numpy(),
        np.from_dlpack(result),
        result.driver_tensor,
        torch.from_dlpack(result),
    ):
        assert owned_cells(cells[4:5]) == [False], export
        del export
    assert owned_cells(cells[4:5]) == [True]


def test_a_compiled_module_reads_the_same_weights() -> None:
    net = Net()
    values = {name: elements(p) for name, p in net.parameters}
    compiled = net.compile(Tensor.constant(array(2, 64)).type)
    run_often(net)
    assert packed_bytes()
    x = array(2, 64)
    same(compiled(Tensor.constant(x)), expected(x, values))


def test_two_programs_pack_the_same_weights() -> None:
    net = Net()
    run_often(net)
    size = packed_bytes()
    assert size
    for _ in range(12):
        _ = F.relu(net(Tensor.constant(array(3, 64)))).realize
    assert packed_bytes() == 2 * size


def test_a_cache_that_grows() -> None:
    w, v = own(64, 96), own(96, 64)
    a, b = elements(w), elements(v)
    before = packed_programs()
    cache, want = own(2, 64), None
    want = elements(cache)
    for _ in range(24):
        row = F.tanh(cache[-1:] @ w) @ v * 0.01
        cache = F.concat([cache, row], axis=0)
        want = np.concatenate([want, np.tanh(want[-1:] @ a) @ b * np.float32(0.01)])
        np.testing.assert_allclose(elements(cache), want, rtol=1e-3, atol=1e-4)
    assert packed_programs() > before


def test_constant_programs_are_not_folded() -> None:
    """A loop that computes the same product again runs it each time."""
    x, w = own(8, 64), own(64, 96)
    a, b = elements(x), elements(w)
    for _ in range(12):
        same(F.relu(x @ w), np.maximum(a @ b, 0))
    (model,) = [
        packed.model for packed in list(_packing.COPIES_OF_ALL.alive) if packed.model is not None
    ]
    assert any("matmul" in name for name in model.kernel_summaries)
    assert packed_bytes() == b.nbytes


def test_errors_name_the_line_of_the_op() -> None:
    table, w = own(8, 64), own(64, 96)
    a, b = elements(table), elements(w)
    for turn in range(20):
        index = Tensor.constant([turn % 8 if turn < 19 else 9], dtype=DType.int64)
        row = F.gather(table, index, axis=0)  # THE LINE
        y = row @ w
        if turn < 19:
            same(y, a[[turn % 8]] @ b)
            continue
        assert packed_bytes()
        with pytest.raises(Exception, match="test_packing.py") as info:
            y.to_numpy()
        with open(__file__) as file:
            line = next(n for n, text in enumerate(file, 1) if text.rstrip().endswith("# THE LINE"))
        assert f"test_packing.py:{line})" in str(info.value)
        del row, y, info  # else they are computed again


def test_a_thread_that_writes() -> None:
    """Elements of a result are not older than the last write before the run, nor newer than the first one after it."""
    w = own(64, 64)
    w[...] = 0.0
    wrote = [0]
    stop = threading.Event()

    def write() -> None:
        for number in range(1, 120):
            w[...] = float(number)
            wrote[0] = number
            stop.wait(0.002)
        stop.set()

    thread = threading.Thread(target=write)
    ones = np.ones((1, 64), np.float32)
    copies = 0
    thread.start()
    while not stop.is_set():
        least = wrote[0]
        result = (Tensor.constant(ones) @ w).to_numpy() / 64
        most = wrote[0] + 1
        copies += bool(packed_bytes())
        assert least <= result.min()
        assert result.max() <= most
    thread.join()
    for _ in range(12):
        same(Tensor.constant(ones) @ w, np.full((1, 64), 119 * 64, np.float32))


def test_threads_that_run_the_same_module() -> None:
    net = Sequential(Linear(64, 96), Linear(96, 64))
    values = {name: elements(p) for name, p in net.parameters}
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(25):
                x = rng.standard_normal((2, 64)).astype(np.float32)
                y = x @ values["0.weight"].T + values["0.bias"]
                same(net(Tensor.constant(x)), y @ values["1.weight"].T + values["1.bias"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert packed_bytes()
