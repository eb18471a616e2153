"""Later compilations of a process reuse specialized kernel_tables, unless these may have changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from max import kernel as k
from max._backends.cpu.backend import cpu_backends
from max._backends.cpu.runtime import kernel_code
from max._backends.cpu.runtime.executor import Executor
from max._backends.cpu.runtime.pool import Pool
from max._backends.program import KernelRunError, Launch, Program
from max._backends.regions import ArgView
from max._compiler.lowering import kernel_tables, specializations
from max._compiler.lowering.kernel_tables import Argument, KernelTable, KernelTables
from max._compiler.lowering.lowered_graph import BufferBound, LimitSlot, Number, Pointer
from max._compiler.lowering.specializations import Specializations
from max._config import flags
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from max.mlir.dims import DimExpr

DEVICE = DeviceRef.CPU()


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts the specializations of the test, which starts with an empty cache."""
    monkeypatch.setattr("max._compiler.lowering.kernel_tables.specializations", Specializations())
    names: list[str] = []
    specialize = k.specialize

    def counted(fn: k.Kernel, *args: object, **options: object) -> k.KernelIR:
        names.append(fn.name)
        return specialize(fn, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(k, "specialize", counted)
    return lambda: len(names)


def softmax_of_products(factor: float = 2.0) -> Graph:
    types = [TensorType(DType.float32, shape, DEVICE) for shape in (("m", 24), (24, 40))]
    with Graph("g", input_types=types) as graph:
        x, w = (value.tensor for value in graph.inputs)
        graph.output(ops.softmax(x @ w), ops.tanh(x) * factor)
    return graph


def run(graph: Graph, rng: np.random.Generator, factor: float = 2.0) -> None:
    model = InferenceSession(devices=[CPU()]).load(graph)
    x, w = rng.standard_normal((3, 24), np.float32), rng.standard_normal((24, 40), np.float32)
    probabilities, doubled = (out.to_numpy() for out in model.execute(x, w))
    powers = np.exp(x @ w)
    np.testing.assert_allclose(probabilities, powers / powers.sum(1, keepdims=True), 1e-4)
    np.testing.assert_allclose(doubled, np.tanh(x) * factor, 1e-5)


def test_a_second_compilation_specializes_nothing(count: Callable[[], int], rng) -> None:
    run(softmax_of_products(), rng)
    first = count()
    assert first >= 3
    run(softmax_of_products(), rng)
    assert count() == first
    run(softmax_of_products(3.0), rng, 3.0)
    assert count() == first + 1


@pytest.mark.parametrize("flag", ["MAX_KERNEL_CHECK", "MAX_KERNEL_INTERPRET"])
def test_flags_are_part_of_the_key(flag: str, count: Callable[[], int], rng) -> None:
    run(softmax_of_products(), rng)
    first = count()
    with flags.override(**{flag: 1}):
        run(softmax_of_products(), rng)
        assert count() == 2 * first
    run(softmax_of_products(), rng)
    assert count() == 2 * first


FACTOR = 2.0


@k.register("test_specializations_scale")
def scale(y: k.Output[k.f32, 1], x: k.Input[k.f32, 1]):
    for i in range(x.shape[0]):
        y[i] = x[i] * FACTOR


def test_custom_kernels_see_current_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = TensorType(DType.float32, ["n"], DEVICE)
    with Graph("g", input_types=[kind]) as graph:
        x = graph.inputs[0].tensor
        graph.output(ops.custom("test_specializations_scale", DEVICE, [x], [kind])[0])
    session = InferenceSession(devices=[CPU()])
    ones = np.ones(3, np.float32)
    assert session.load(graph).execute(ones)[0].to_numpy().tolist() == [2, 2, 2]
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert session.load(graph).execute(ones)[0].to_numpy().tolist() == [5, 5, 5]


@k.kernel
def flagged(y: k.Output[k.f32, 1], *, on: bool):
    y[0] = 1.0 if on is True else 2.0


def test_parameters_of_equal_value_and_other_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """True equals 1, but the kernels differ."""
    monkeypatch.setattr(kernel_tables, "_is_fixed", lambda kernel: True)
    monkeypatch.setattr(kernel_tables, "specializations", Specializations())
    (backend,) = cpu_backends()
    pointer = Pointer(0, 0)
    argument = Argument(pointer, ArgView(DType.float32, (1,), None))
    keys = [
        KernelTable(backend).library(flagged, [argument], {"on": on}, None)[0]
        for on in (True, 1, True)
    ]
    assert keys[0] == keys[2] != keys[1]


def ir(name: str, length: int) -> k.KernelIR:
    return k.KernelIR(name, (), 1, 0, (), (), "x" * length)


def test_the_least_recently_used_is_dropped() -> None:
    kept = Specializations(limit=100)
    made: list[str] = []

    def get(name: str, length: int = 40) -> k.KernelIR:
        def make() -> k.KernelIR:
            made.append(name)
            return ir(name, length)

        return kept.get(name, make)

    first = get("a")
    get("b")
    assert get("a") is first and made == ["a", "b"]
    get("c")  # drops b, the least recently used
    assert get("a") is first and get("c") is get("c") and made == ["a", "b", "c"]
    get("b")
    assert made == ["a", "b", "c", "b"]
    large = get("large", 1000)  # larger than the limit: the only entry
    assert get("large", 1000) is large and made[-1] == "large"
    get("c")
    assert made[-1] == "c"
    get("b")
    assert made[-1] == "b", "nothing is left beside what is larger than the limit"


def test_the_limit_itself_is_not_too_much() -> None:
    kept, made = Specializations(limit=100), list[str]()

    def get(name: str) -> k.KernelIR:
        return kept.get(name, lambda: made.append(name) or ir(name, 50))

    for name in ("a", "b", "a", "b", "c", "b", "a"):
        get(name)
    assert made == ["a", "b", "c", "a"]


def test_the_limit_without_a_choice() -> None:
    """Four million characters, of all kernels together."""
    kept, made = Specializations(), list[str]()
    million = 1 << 20
    for name, length in (
        ("a", 3 * million),
        ("b", million),
        ("a", 0),
        ("b", 0),
        ("c", 1),
        ("a", 0),
    ):
        kept.get(name, lambda name=name, length=length: made.append(name) or ir(name, length))
    assert made == ["a", "b", "c", "a"]


def test_verified_kernels_are_others() -> None:
    kept, made = Specializations(), list[int]()
    for level in (0, 1, 2, 3, 1, 2):
        with flags.override(MAX_CHECK=level):
            kept.get("a", lambda level=level: made.append(level) or ir("a", 1))
    assert made == [0, 2]


def test_nothing_is_reused_while_kernels_are_dumped(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Specializations()
    kept.get("a", lambda: ir("a", 1))
    monkeypatch.setattr(specializations, "dump_log", lambda what: what == "kernels")
    other = ir("a", 1)
    assert kept.get("a", lambda: other) is other


def table_of(**options: bool) -> tuple[KernelTable, list[str]]:
    """A table of this machine's CPU, and the keys of what its device starts to compile."""
    (cpu,) = cpu_backends()
    started = list[str]()
    backend = cast(Any, SimpleNamespace(target=cpu.target, start=lambda ir: started.append(ir.key)))
    return KernelTable(backend, **options), started


def argument(*shape: Any, strides: Any = None, buffer: int = 0) -> Argument:
    return Argument(Pointer(buffer), ArgView(DType.float32, shape, strides))


@k.kernel
def with_epilogue(
    y: k.Output, x: k.Input, *, epilogue: Any = None, power: int = 1, more: float = 0.0
):
    for i in range(x.shape[0]):
        value = x[i] ** power + more
        if epilogue is None:
            y[i] = value
        else:
            y[i] = epilogue(value)


def run_ir(ir: k.KernelIR, *arguments: Any) -> None:
    """Runs a kernel on arrays, which it writes, and numbers."""
    entry = kernel_code.compile_kernels([ir], k.host_target())[ir.key]
    slots = [(0, word) for word in ir.words(arguments)]
    launch = Launch(entry, slots, phases=ir.phases, serial=True, messages=ir.messages)
    Executor(Pool(1), Program([launch], 1, ir.scratch_bytes)).run(np.zeros(1, np.int64))


def test_a_table_has_each_kernel_once(count: Callable[[], int]) -> None:
    """Whatever the order of its parameters; with and without an epilogue, the text of which tells them apart."""
    table, started = table_of()
    arguments = [argument(DimExpr.symbol("n")), argument(DimExpr.symbol("n"))]
    texts = [f"def epilogue(v):\n    return v * {factor}\n" for factor in ("2.0", "3.0")]

    def key(text: str | None = None, **params: Any) -> str:
        return table.library(with_epilogue, arguments, params, text)[0]

    plain = key(power=2, more=1.0)
    assert key(more=1.0, power=2) == plain and count() == 1
    assert key(more=2.0, power=2) != plain
    doubled, tripled = (key(text, power=2) for text in texts)
    assert [key(text, power=2) for text in texts] == [doubled, tripled] and count() == 4
    assert len({plain, doubled, tripled}) == 3 and {plain, doubled, tripled} < {*table.irs}
    assert {*table.irs} == {*table.infos} and not started
    x = np.arange(5, dtype=np.float32)
    for name, expected in ((plain, x**2 + 1), (doubled, 2 * x**2), (tripled, 3 * x**2)):
        y = np.zeros_like(x)
        run_ir(table.irs[name], y, x)
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("ahead", [False, True])
def test_kernels_that_are_compiled_ahead(ahead: bool) -> None:
    """Each as soon as the table has it, and once."""
    table, started = table_of(ahead=ahead)
    first = table.library(with_epilogue, [argument(4), argument(4)], {}, None)[0]
    assert started == [first] * ahead
    table.library(with_epilogue, [argument(4), argument(4)], {}, None)
    second = table.library(with_epilogue, [argument(5), argument(5)], {}, None)[0]
    assert started == [first, second] * ahead
    tables = KernelTables(cast(Any, [table.backend]), **({"ahead": True} if ahead else {}))
    assert [each.backend for each in tables] == [table.backend]
    third = tables[0].library(with_epilogue, [argument(6), argument(6)], {}, None)[0]
    assert started == [first, second, third] * ahead


@k.kernel
def summed(total: k.InOut, x: k.Input, y: k.Output, n: k.i64, ctx: k.Context):
    y[0] = total[0]
    total[0] = total[0] + x[n]


def test_what_a_kernel_writes() -> None:
    """The positions of its arguments; numbers and the context are none of them."""
    table, _ = table_of()
    assert table.writes(with_epilogue) == {0} and table.writes(summed) == {0, 2}
    assert table.writes(summed) is table.writes(summed)


@pytest.mark.parametrize("exact", [False, True])
def test_checks_of_numbers(exact: bool) -> None:
    table, _ = table_of()
    ir = table.irs[table.check(exact)]
    assert table.check(exact) == ir.key != table.check(not exact)
    for actual, required in ((3, 3), (4, 3), (2, 3), (-5, 3), (1 << 40, 3)):
        fails = actual != required if exact else actual < required
        error = pytest.raises(KernelRunError, match=f"{actual} where 3 is required")
        with error if fails else nullcontext():
            run_ir(ir, np.int64(actual), np.int64(required))


def test_slots_of_arguments() -> None:
    """Addresses, ends of buffers, sizes and strides of views; numbers and limits as they are, then a region's sizes."""
    n = DimExpr.symbol("n")
    limit, number = LimitSlot("rows", 4, 9, n), Number(7)
    view = argument(n, 3, strides=(n * 5, 2), buffer=6)
    kinds = [
        (0, "pointer", 0), (0, "begin", 0), (0, "end", 0), (0, "dim", 0), (0, "dim", 1), (0, "stride", 0),
        (0, "stride", 1), (1, "scalar", 0), (2, "scalar", 0), (3, "scalar", 0), (4, "scalar", 0),
    ]  # fmt: skip
    ir = cast(
        Any,
        SimpleNamespace(
            slots=[SimpleNamespace(arg=arg, kind=kind, axis=axis) for arg, kind, axis in kinds]
        ),
    )
    assert KernelTable.slots(ir, [view, limit, number], [n, 8]) == (
        Pointer(6), BufferBound(6, False), BufferBound(6, True), Number(n), Number(3), Number(n * 5), Number(2),
        limit, number, Number(n), Number(8),
    )  # fmt: skip


def test_checked_kernels_know_the_ends_of_their_buffers() -> None:
    with flags.override(MAX_KERNEL_CHECK=2):
        table, _ = table_of()
        arguments = [argument(DimExpr.symbol("n"), buffer=buffer) for buffer in (3, 4)]
        _, slots = table.library(with_epilogue, arguments, {}, None)
    assert {BufferBound(buffer, end) for buffer in (3, 4) for end in (False, True)} <= {*slots}


def spec(shape: Any, strides: Any, static: Any = None, static_strides: Any = None) -> k.TensorSpec:
    view = ArgView(DType.bfloat16, shape, strides)
    return Argument(Pointer(0), view, static, static_strides).spec()


def test_which_sizes_are_part_of_the_code() -> None:
    """Static ones but 0, by which dead code may divide, and those that a launch does not except."""
    n = DimExpr.symbol("n")
    found = spec((n, 0, 1, 5), None)
    assert found == k.TensorSpec(k.bf16, (None, None, 1, 5), None)
    assert spec((n, 3, 4), (12, 4, 1)).strides == (12, 4, 1)
    assert spec((n, 3, 4), (n, 0, 1)).strides == (None, 0, 1)
    chosen = spec((2, 3, 4), (12, 4, 1), (True, False, True), (False, True, False))
    assert (chosen.shape, chosen.strides) == ((2, None, 4), (None, 4, None))
    assert spec((2, n), (n, n), (True, True), (True, True)) == spec((2, n), (n, n))


@pytest.mark.parametrize(("first", "second", "count"), [(50, 50, 2), (50, 51, 3), (40, 1000, 3)])
def test_one_more_than_the_limit_drops_the_older(first: int, second: int, count: int) -> None:
    kept, made = Specializations(limit=100), list[str]()
    for name, length in (("a", first), ("b", second), ("a", first)):
        kept.get(name, lambda name=name, length=length: made.append(name) or ir(name, length))
    assert len(made) == count
