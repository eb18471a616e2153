"""A kept body of `@k.outlined` is copied to any place of a kernel, and is not used where it would not compile."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from max import kernel as k
from max._config import flags
from max.kernel.frontend import outlining
from max.kernel.frontend.outlining import _rounded_bound
from tests.kernel_language.harness import compiled, interpreted, spec_of

X = np.arange(-5, 9, dtype=np.float32)
TOTAL = float(X[X > 0].sum())


@k.outlined
def add_positive(out, x, at, ctx) -> None:
    """With all that a body may hold, except what belongs to one kernel."""
    total = k.f32(0)
    i = k.i64(0)
    while i < x.shape[0]:
        k.brief()
        k.assume(i >= 0)
        if x[i] > 0.0:
            total += x[i]
        i += 1
    for j in range(3):
        if j == ctx.worker + 10:
            return
    out[at] = total


@k.outlined
def add_twice(out, x, at, ctx) -> None:
    add_positive(out, x, at, ctx)
    out[at + 8] = out[at] * 2.0


@k.kernel
def many_depths(out: k.Output, x: k.Input, n: k.i64, ctx: k.Context):  # pyright: ignore
    add_positive(out, x, k.run_time(0), ctx)
    add_positive(out, x, k.run_time(1), ctx)
    if n > 1:
        add_positive(out, x, k.run_time(2), ctx)
    for i in range(3, 5):
        add_positive(out, x, k.run_time(i), ctx)
        if n > 2:
            for j in range(1):
                add_positive(out, x, k.run_time(2 + i + j), ctx)
    add_twice(out, x, k.run_time(0), ctx)
    add_twice(out, x, k.run_time(1), ctx)
    add_positive(out, x, k.run_time(7), ctx)


@k.kernel
def deep_first(out: k.Output, x: k.Input, n: k.i64, ctx: k.Context):  # pyright: ignore
    for i in range(2):
        if n > 7:
            add_twice(out, x, k.run_time(i), ctx)
    add_twice(out, x, k.run_time(1), ctx)
    add_twice(out, x, k.run_time(3), ctx)


def expected(kernel: k.Kernel, n: int) -> list[float]:
    out = np.zeros(16)
    if kernel is many_depths:
        out[[0, 1, 3, 4, 7]] = TOTAL
        out[[8, 9]] = 2 * TOTAL
        out[2] = TOTAL * (n > 1)
        out[[5, 6]] = TOTAL * (n > 2)
    else:
        out[[1, 3]] = TOTAL
        out[[9, 11]] = 2 * TOTAL
        out[0], out[8] = TOTAL * (n > 7), 2 * TOTAL * (n > 7)
    return out.tolist()


@pytest.mark.parametrize("first", [many_depths, deep_first])
def test_a_copy_is_the_code_of_a_body_of_its_own(
    first: k.Kernel, bodies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [np.zeros(16, np.float32), X, np.int64(0)]
    kernels = [first, many_depths, deep_first, first]
    texts: list[str] = []
    for kernel in kernels:
        for n in (0, 2, 9):
            out, plain = np.zeros(16, np.float32), np.zeros(16, np.float32)
            ir = compiled(kernel, [out, X, np.int64(n)], num_workers=2)
            interpreted(kernel, [plain, X, np.int64(n)], num_workers=2)
            assert out.tolist() == plain.tolist() == expected(kernel, n)
        texts.append(ir.text)
    # of the functions without an outlined one in them each is kept, by the places of its calls
    kept: list[Any] = list(outlining._bodies)
    assert {function.name for function, *_ in kept} == {"add_positive"}
    assert len(outlining._bodies) <= 4
    monkeypatch.setattr(outlining, "_is_fixed", lambda function: False)
    alone = {
        kernel: k.specialize(kernel, [spec_of(a) for a in given], None, k.host_target()).text
        for kernel in (many_depths, deep_first)
    }
    assert texts == [alone[kernel] for kernel in kernels]


@k.outlined
def doubled_by_workers(out, x, ctx) -> None:
    for i in ctx.parallel(x.shape[0]):
        out[i] = x[i] * 2.0
    ctx.barrier()
    for i in ctx.parallel(x.shape[0]):
        out[i] = out[i] + x[x.shape[0] - 1 - i]


@k.kernel
def in_phases(out: k.Output, x: k.Input, ctx: k.Context):
    doubled_by_workers(out, x, ctx)


def test_phases_of_workers_belong_to_a_kernel(bodies: list[str]) -> None:
    for _ in range(2):
        out = np.zeros_like(X)
        compiled(in_phases, [out, X], num_workers=2)
        assert out.tolist() == (X * 2 + X[::-1]).tolist()
    assert bodies == ["doubled_by_workers"] * 2


# ***** kept bodies that do not fit a place *****


@k.outlined
def wait(ctx) -> None:
    ctx.barrier()


@k.outlined
def end_soon(out) -> None:
    k.brief()
    out[0] = 1.0


@k.outlined
def at_index(out, x, at) -> None:
    out[0] = x[at]


@k.outlined
def by(out, x, a, b) -> None:
    out[0] = x[0] * k.cast(a.num_workers, out.dtype) * k.cast(b, out.dtype)


@k.kernel
def waits(out: k.Output, x: k.Input, ctx: k.Context):
    wait(ctx)
    out[0] = x[0]


@k.kernel
def waits_in_a_loop(out: k.Output, x: k.Input, ctx: k.Context):
    for _ in range(x.shape[0]):
        wait(ctx)
    out[0] = x[0]


@k.kernel
def waits_in_parallel(out: k.Output, x: k.Input, ctx: k.Context):
    for i in ctx.parallel(out.shape[0]):
        wait(ctx)
        out[i] = x[i]


@k.kernel
def ends_soon_in_a_loop(out: k.Output, x: k.Input, ctx: k.Context):
    for _ in range(x.shape[0]):
        end_soon(out)


@k.kernel
def ends_soon(out: k.Output, x: k.Input, ctx: k.Context):
    end_soon(out)


@k.kernel
def context_and_number(out: k.Output, x: k.Input, ctx: k.Context):
    by(out, x, ctx, 3)


@k.kernel
def number_and_context(out: k.Output, x: k.Input, ctx: k.Context):
    by(out, x, 3, ctx)


@pytest.mark.parametrize(
    ("fits", "does_not"),
    [
        (waits, waits_in_parallel),
        (waits_in_a_loop, waits_in_parallel),
        (ends_soon_in_a_loop, ends_soon),
        (context_and_number, number_and_context),
    ],
)
def test_errors_of_a_place_do_not_depend_on_kept_bodies(
    fits: k.Kernel, does_not: k.Kernel, bodies: list[str]
) -> None:
    out, x = np.zeros(3, np.float32), np.ones(3, np.float32)
    compiled(fits, [out, x])
    with pytest.raises(k.KernelError):
        compiled(does_not, [out, x])
    compiled(fits, [out, x])
    assert len(outlining._bodies) == 1


@k.kernel
def one_element(out: k.Output, x: k.Input, at: k.i64):  # pyright: ignore
    at_index(out, x, at)


def test_a_body_without_checks_is_not_used_by_a_kernel_with_checks(bodies: list[str]) -> None:
    out = np.zeros(1, np.float32)
    compiled(one_element, [out, X, np.int64(3)])
    assert out[0] == X[3]
    for _ in range(2):
        with flags.override(MAX_KERNEL_CHECK=1), pytest.raises(IndexError, match="out of range"):
            compiled(one_element, [out, X, np.int64(14)])


@k.outlined
def remainders(out, a, b) -> None:
    for i in range(out.shape[0]):
        out[i] = i * 3 + (a - b) % 7


@k.kernel
def of_two(out: k.Output, n: k.i64, m: k.i64):  # pyright: ignore
    remainders(out, k.run_time(n), k.run_time(m))


@k.kernel
def of_one(out: k.Output, n: k.i64, m: k.i64):  # pyright: ignore
    both = k.run_time(n)
    remainders(out, both, both)


@k.outlined
def first_of(a, b, out) -> None:
    out[0] = a * 10 + b


@k.kernel
def same_first(out: k.Output, n: k.i64, m: k.i64):  # pyright: ignore
    first_of(n, n, out)


@k.kernel
def same_first_of_more(out: k.Output, n: k.i64, m: k.i64):  # pyright: ignore
    remainders(out, m, n)
    first_of(n, n, out)


def test_an_argument_given_twice_is_one(bodies: list[str]) -> None:
    for kernel, value in ((of_two, 5), (of_one, 0)):
        out = np.zeros(2, np.int64)
        compiled(kernel, [out, np.int64(8), np.int64(3)])
        assert out.tolist() == [value, 3 + value]
    assert bodies == ["remainders"] * 2
    bodies.clear()
    for kernel in (same_first, same_first_of_more):
        out = np.zeros(1, np.int64)
        compiled(kernel, [out, np.int64(8), np.int64(3)])
        assert out.tolist() == [88]
    assert bodies == ["first_of"], "wherever the numbers of formals begin"


FACTORS = {"two": 2.0, "three": 3.0}


@k.outlined
def by_table(out, x, factors) -> None:
    for i in range(x.shape[0]):
        out[i] = x[i] * factors["two"] * factors["three"]


@k.kernel
def six_times(out: k.Output, x: k.Input):
    by_table(out, x, FACTORS)


def test_a_body_with_a_value_that_may_change_is_not_kept(bodies: list[str]) -> None:
    for _ in range(2):
        out = np.zeros_like(X)
        compiled(six_times, [out, X])
        assert out.tolist() == (X * 6).tolist()
    assert not outlining._bodies


@k.outlined
def add_to(out, x, product) -> None:
    out[0] = x[0] + product


@k.kernel
def products_of_the_caller(out: k.Output, x: k.Input, n: k.i64):  # pyright: ignore
    early, late, last = x[0] * x[1], x[0] * x[2], x[1] * x[2]
    for i in range(n):
        add_to(k.run_time(out[i:]), k.run_time(x), x[i] * x[1])
        add_to(k.run_time(out[i + n * 3 :]), k.run_time(x[i:]), early)
        for j in range(1, 2):
            add_to(k.run_time(out[i + n * j :]), k.run_time(x[i:]), x[i] * x[j])
            add_to(k.run_time(out[i + n * 4 :]), k.run_time(x[i:]), late)
            for m in range(2, 3):
                add_to(k.run_time(out[i + n * m :]), k.run_time(x[j:]), x[i] * x[m])
                add_to(k.run_time(out[i + n * 5 :]), k.run_time(x[i:]), last)


@k.kernel
def products_of_the_caller_deep_first(out: k.Output, x: k.Input, n: k.i64):  # pyright: ignore
    early, late, last = x[0] * x[1], x[0] * x[2], x[1] * x[2]
    for i in range(n):
        for j in range(1, 2):
            for m in range(2, 3):
                add_to(k.run_time(out[i + n * m :]), k.run_time(x[j:]), x[i] * x[m])
                add_to(k.run_time(out[i + n * 5 :]), k.run_time(x[i:]), last)
            add_to(k.run_time(out[i + n * j :]), k.run_time(x[i:]), x[i] * x[j])
            add_to(k.run_time(out[i + n * 4 :]), k.run_time(x[i:]), late)
        add_to(k.run_time(out[i:]), k.run_time(x), x[i] * x[1])
        add_to(k.run_time(out[i + n * 3 :]), k.run_time(x[i:]), early)


@pytest.mark.parametrize("first", [0, 1])
def test_a_product_of_the_caller_is_not_fused_with_a_sum_of_a_body(
    first: int, bodies: list[str]
) -> None:
    """The body is a function of its own, which gets the product as an argument."""
    x = np.random.default_rng(2).uniform(-2, 2, 33).astype(np.float32)
    rows = [x[0] + x * x[1], x + x * x[1], x[1] + x * x[2]]
    want = np.stack([*rows, x + x[0] * x[1], x + x[0] * x[2], x + x[1] * x[2]])
    kernels = (products_of_the_caller, products_of_the_caller_deep_first)
    for kernel in (kernels[first], *kernels):
        out = np.zeros_like(want)
        compiled(kernel, [out.reshape(-1), x, np.int64(len(x))])
        assert out.tolist() == want.tolist()
    assert bodies == ["add_to"]
    # one function for all calls
    target, specs = k.host_target(), [spec_of(x), spec_of(x), k.i64]
    irs = [k.specialize(kernel, specs, None, target) for kernel in kernels]
    names = [set(k.emit_modules(ir, target).functions) for ir in irs]
    assert names[0] == names[1] and len(names[0]) == 1


# ***** a raise after a jump *****


@k.outlined
def at_most_four(out, n) -> None:
    if n > 4:
        raise ValueError("above 4")
    out[0] = k.f32(n)


@k.outlined
def raises_in_a_nested_call(out, n) -> None:
    at_most_four(out, n)


@k.outlined
def never(memory) -> None:
    memory[0] = 1.0
    raise ValueError("never")


@k.inline
def three_or_never(x, memory):
    if x[0] > 0.0:
        return k.f32(3.0)
    never(memory)


@k.kernel
def raises_on_all_paths(out: k.Output, x: k.Input):
    out[0] = three_or_never(x, out)


@k.kernel
def raises_on_all_paths_with_a_tile(out: k.Output, x: k.Input):
    out[0] = three_or_never(x, k.tile(k.f32, 2, fill=0.0))


@k.outlined
def store_five(out, x) -> None:
    out[0] = 5.0


@k.kernel
def raises_unless_positive(out: k.Output, x: k.Input):
    if x[0] > 0.0:
        return
    at_most_four(out, 5)


@k.kernel
def raises_deeper_unless_positive(out: k.Output, x: k.Input):
    if x[0] > 0.0:
        return
    raises_in_a_nested_call(out, 5)


@k.kernel
def raises_after_a_body_unless_positive(out: k.Output, x: k.Input):
    if x[0] > 0.0:
        return
    store_five(out, x)
    at_most_four(out, 5)


@k.kernel
def raises_always(out: k.Output, x: k.Input):
    at_most_four(out, 5)


@pytest.mark.parametrize(
    "kernel",
    [
        raises_unless_positive,
        raises_deeper_unless_positive,
        raises_after_a_body_unless_positive,
        raises_on_all_paths,
        raises_on_all_paths_with_a_tile,
    ],
)
def test_a_raise_that_a_return_skips_is_one_of_the_run(kernel: k.Kernel, bodies: list[str]) -> None:
    out = np.zeros(1, np.float32)
    for _ in range(2):
        compiled(kernel, [out, np.ones(1, np.float32)])
        with pytest.raises(ValueError, match=r"^\w+: (above 4|never)"):
            compiled(kernel, [out, -np.ones(1, np.float32)])
    with pytest.raises(k.KernelError, match="above 4"):
        k.specialize(raises_always, [spec_of(out), spec_of(X)], None, k.host_target())


# ***** which functions are fixed *****


def scaled(out, x, kind, table) -> None:
    for i in range(x.shape[0]):
        out[i] = k.cast(k.cast(x[i], kind), out.dtype) * table[0]


def test_functions_of_the_package_are_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[str] = []
    compile_body = outlining._compile_body

    def counted(fe, function, *rest):
        counts.append(function.name)
        return compile_body(fe, function, *rest)

    monkeypatch.setattr(outlining, "_compile_body", counted)
    monkeypatch.setattr(outlining, "_bodies", type(outlining._bodies)())
    for name, expected_count in (("max.kernels", 1), ("maximum", 3), ("tests.max.", 3)):
        there = FunctionType(scaled.__code__, {"k": k, "__name__": name, "range": range}, "scaled")
        function = k.outlined(there)

        def call(out: k.Output, x: k.Input):
            function(out, x, k.i32, (3.0,))  # noqa: B023

        counts.clear()
        for _ in range(3):
            out = np.zeros_like(X)
            compiled(k.kernel(call), [out, X])
            assert out.tolist() == (X * 3).tolist()
        assert len(counts) == expected_count, name


@example((1 << 40) + 1)
@example((1 << 39) + 1)
@example((1 << 63) - 1)
@example(-(1 << 63))
@given(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-(1 << 42), 1 << 42))
def test_bounds_of_intervals_are_rounded_outwards(bound: int) -> None:
    rounded = _rounded_bound(bound)
    if abs(bound) <= 1 << 40:
        assert rounded == bound
        return
    power = 1 << 41
    while power < abs(bound):
        power *= 2
    assert rounded == (min(power, (1 << 63) - 1) if bound > 0 else -power)
