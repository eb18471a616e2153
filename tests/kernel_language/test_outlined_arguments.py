"""A body of `@k.outlined` that is used again fits all arguments of the call, not only their kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from max import kernel as k
from max._config import flags
from max.kernel.frontend import outlining
from tests.kernel_language.harness import compiled, interpreted, spec_of


@pytest.fixture(autouse=True)
def accesses_that_are_not_compared() -> Iterator[None]:
    """No function is outlined if accesses are checked."""
    with flags.override(MAX_KERNEL_CHECK=0):
        yield


X = np.arange(1, 13, dtype=np.float32)


class Scale(NamedTuple):
    """A factor and what is added."""

    factor: Any
    shift: Any


@k.inline
def double(v):
    return v + v


@k.inline
def negative(v):
    return -v


@k.outlined
def scale(out, x, by, function, kind) -> None:
    for i in range(x.shape[0]):
        y = function(x[i]) * by[0]
        if len(by) > 1:
            y = y + by[1]
        out[i] = k.cast(k.cast(y, kind), out.dtype)


@k.outlined
def shift(out, x, a, b) -> None:
    for i in range(x.shape[0]):
        out[i] = x[i] + k.cast(a - b, out.dtype) * 3.0


@k.outlined
def by_workers(out, x, ctx) -> None:
    for i in range(x.shape[0]):
        out[i] = x[i] * k.cast(ctx.num_workers, out.dtype)


@k.kernel
def one_factor(out: k.Output, x: k.Input, n: k.i64, m: k.i64):  # pyright: ignore
    scale(out, x, (k.f32(2.0),), double, k.f32)


@k.kernel
def another_factor(out: k.Output, x: k.Input, n: k.i64, m: k.i64):  # pyright: ignore
    scale(out, x, (k.f32(3.0),), double, k.f32)


@k.kernel
def factor_and_shift(out: k.Output, x: k.Input, n: k.i64, m: k.i64):  # pyright: ignore
    scale(out, x, (k.f32(2.0), k.f32(1.0)), double, k.f32)


@k.kernel
def named_factor_and_shift(out: k.Output, x: k.Input, n: k.i64, m: k.i64):  # pyright: ignore
    scale(out, x, Scale(k.f32(2.0), k.f32(1.0)), double, k.f32)


@k.kernel
def another_function(out: k.Output, x: k.Input, n: k.i64, m: k.i64):  # pyright: ignore
    scale(out, x, (k.f32(2.0),), negative, k.f32)


@k.kernel
def another_dtype(out: k.Output, x: k.Input, n: k.i64, m: k.i64):  # pyright: ignore
    scale(out, x, (k.f32(2.5),), double, k.i32)


@k.kernel
def plain_numbers(out: k.Output, x: k.Input, n: k.i64, m: k.i64):  # pyright: ignore
    scale(out, x, (2.5, 0.5), double, k.f32)


@k.kernel
def other_numbers(out: k.Output, x: k.Input, n: k.i64, m: k.i64):  # pyright: ignore
    scale(out, x, (2.5, 1.5), double, k.f32)


@k.kernel
def numbers_of_a_run(out: k.Output, x: k.Input, n: k.i64, m: k.i64):  # pyright: ignore
    scale(out, x, (k.cast(n, k.f32), k.cast(m, k.f32)), double, k.f32)


@k.kernel
def two_numbers(out: k.Output, x: k.Input, n: k.i64, m: k.i64):  # pyright: ignore
    shift(out, x, n, m)


@k.kernel
def one_number_twice(out: k.Output, x: k.Input, n: k.i64, m: k.i64):  # pyright: ignore
    shift(out, x, n, n)


@k.kernel
def a_size_and_a_number(out: k.Output, x: k.Input, n: k.i64, m: k.i64):  # pyright: ignore
    shift(out, x, x.shape[0], m)


@k.kernel
def a_size_twice(out: k.Output, x: k.Input, n: k.i64, m: k.i64):  # pyright: ignore
    shift(out, x, x.shape[0], out.shape[0])


@k.kernel
def of_a_context(out: k.Output, x: k.Input, n: k.i64, m: k.i64, ctx: k.Context):  # pyright: ignore
    by_workers(out, x, ctx)


N, M = 5, 3
KERNELS: dict[k.Kernel, np.ndarray] = {
    one_factor: X * 4,
    another_factor: X * 6,
    factor_and_shift: X * 4 + 1,
    named_factor_and_shift: X * 4 + 1,
    another_function: X * -2,
    another_dtype: X * 5,
    plain_numbers: X * 5 + 0.5,
    other_numbers: X * 5 + 1.5,
    numbers_of_a_run: X * 2 * N + M,
    two_numbers: X + 3 * (N - M),
    one_number_twice: X,
    a_size_and_a_number: X + 3 * (12 - M),
    a_size_twice: X,
    of_a_context: X,
}
"""The kernels and their results."""


def arguments() -> list[Any]:
    return [np.zeros_like(X), X, np.int64(N), np.int64(M)]


def printed(kernel: k.Kernel) -> str:
    return k.specialize(kernel, [spec_of(a) for a in arguments()], None, k.host_target()).text


def test_each_kernel_has_its_own_arguments(bodies: list[str]) -> None:
    for kernel, expected in (*KERNELS.items(), *reversed(KERNELS.items())):
        out, plain = arguments(), arguments()
        compiled(kernel, out)
        interpreted(kernel, plain)
        assert out[0].tolist() == plain[0].tolist() == expected.tolist(), kernel.name


def test_the_code_is_that_of_bodies_of_their_own(
    bodies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as alone:
        alone.setattr(outlining, "_is_fixed", lambda function: False)
        expected = [printed(kernel) for kernel in KERNELS]
    bodies.clear()
    assert [printed(kernel) for kernel in KERNELS] == expected
    assert bodies, "each is compiled once"
    bodies.clear()
    assert [printed(kernel) for kernel in KERNELS] == expected
    assert not bodies
    assert [printed(kernel) for kernel in reversed(KERNELS)] == expected[::-1]
    assert not bodies


def test_a_function_that_may_change_is_no_part_of_a_body(
    bodies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlining, "_is_fixed", lambda function: function.name != "double")
    for _ in range(2):
        printed(one_factor)
        printed(another_function)
    assert bodies == ["scale"] * 3, "that of `negative` is used again"


def test_the_least_recently_used_body_is_dropped(
    bodies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlining, "_MAX_BODIES", 2)
    for kernel in (one_factor, another_factor, one_factor, another_function):
        printed(kernel)
    assert len(bodies) == 3 and len(outlining._bodies) == 2
    printed(one_factor)
    assert len(bodies) == 3, "it was used after the other one"
    printed(another_factor)
    assert len(bodies) == 4


# calls whose arguments, places or bodies do not fit a body that is kept


@k.outlined
def fill(to, first, other) -> None:
    for i in range(first, to.shape[0]):
        to[i] = other[0]


@k.outlined
def by_name(out, x, by) -> None:
    for i in range(x.shape[0]):
        out[i] = x[i] * by.factor + by.shift


@k.outlined
def quotients(out, x, divisor) -> None:
    for i in range(x.shape[0]):
        out[i] = out[i] + x[i] // divisor


@k.outlined
def sum_of_rows(out, x, at) -> None:
    total = k.f32(0)
    for i in range(x.shape[0]):
        largest = x[i]
        if largest < 0.0:
            largest = k.f32(0)
        total += largest
    out[at] = total


@k.outlined
def sum_twice(out, x, at) -> None:
    sum_of_rows(out, x, at)
    # not in place: all workers run this
    out[at + 2] = out[at] * 2.0


@k.kernel
def fill_result(out: k.Output, x: k.Input):
    fill(out, 1, x)


@k.kernel
def fill_operand(out: k.Output, x: k.Input):
    fill(x, 1, out)


@k.kernel
def factor_by_name(out: k.Output, x: k.Input):
    by_name(out, x, Scale(k.f32(2.0), k.f32(1.0)))


@k.kernel
def factor_without_name(out: k.Output, x: k.Input):
    by_name(out, x, (k.f32(2.0), k.f32(1.0)))


@k.kernel
def nonzero_quotients(out: k.Output, x: k.Input, divisor: k.i64):  # pyright: ignore
    if divisor != 0:
        quotients(out, x, divisor)


@k.kernel
def conditional_quotients(out: k.Output, x: k.Input, divisor: k.i64):  # pyright: ignore
    if x.shape[0] != 3:
        quotients(out, x, divisor)


@k.kernel
def sums_at_several_depths(out: k.Output, x: k.Input, n: k.i64, ctx: k.Context):  # pyright: ignore
    sum_of_rows(out, x, 0)
    if n > 1:
        sum_of_rows(out, x, 1)
    for i in range(2, 4):
        sum_of_rows(out, x, i)
        if n > 2:
            for j in range(1):
                sum_of_rows(out, x, 2 + i + j)
    for i in ctx.parallel(2):
        sum_of_rows(out, x, 6 + i)
    sum_twice(out, x, 8)
    sum_twice(out, x, 9)


@k.kernel
def sums_of_scratch(out: k.Output, x: k.Input, ctx: k.Context):
    memory = ctx.scratch(k.f32, (16,))
    for i in range(x.shape[0]):
        memory[i] = x[i]
    sum_of_rows(out, memory[: x.shape[0]], 0)
    tile = k.tile(k.f32, 4, fill=2.0)
    sum_of_rows(tile, x, 1)
    out[1] = tile[1]


def test_a_view_that_is_only_read_is_not_written_through_a_kept_body(bodies: list[str]) -> None:
    out, x = np.zeros(3, np.float32), np.ones(3, np.float32)
    compiled(fill_result, [out, x])
    assert out.tolist() == [0, 1, 1]
    with pytest.raises(k.KernelError, match="read-only|Input"):
        compiled(fill_operand, [out, x])
    assert bodies == ["fill", "fill"]


def test_a_tuple_without_names_has_none_of_a_kept_body(bodies: list[str]) -> None:
    out = np.zeros_like(X)
    compiled(factor_by_name, [out, X])
    assert out.tolist() == (X * 2 + 1).tolist()
    with pytest.raises(k.KernelError, match="factor"):
        compiled(factor_without_name, [out, X])


def test_a_body_without_a_check_is_kept_for_divisors_that_are_not_zero(bodies: list[str]) -> None:
    x = np.arange(-6, 6)
    out = np.zeros(12, np.int64)
    compiled(nonzero_quotients, [out, x, np.int64(4)])
    assert out.tolist() == (x // 4).tolist()
    with pytest.raises(ZeroDivisionError):
        compiled(conditional_quotients, [out, x, np.int64(0)])


@pytest.mark.parametrize("n", [0, 5])
def test_one_body_serves_calls_at_all_depths(
    n: int, bodies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.arange(-5, 9, dtype=np.float32)
    total = x[x > 0].sum()
    expected = [total if n > 2 or at not in (1, 4, 5) else 0 for at in range(8)]
    expected += [total, total, 2 * total, 2 * total]
    for _ in range(2):
        out, plain = np.zeros(12, np.float32), np.zeros(12, np.float32)
        compiled(sums_at_several_depths, [out, x, np.int64(n)], num_workers=2)
        interpreted(sums_at_several_depths, [plain, x, np.int64(n)], num_workers=2)
        assert out.tolist() == plain.tolist() == expected
    given = [spec_of(a) for a in (out, x, np.int64(n))]
    kept = k.specialize(sums_at_several_depths, given, None, k.host_target()).text
    monkeypatch.setattr(outlining, "_is_fixed", lambda function: False)
    assert kept == k.specialize(sums_at_several_depths, given, None, k.host_target()).text


def test_the_body_of_a_tile_is_not_kept(bodies: list[str]) -> None:
    x = np.arange(-5, 9, dtype=np.float32)
    total = x[x > 0].sum()
    for count in (2, 3):
        out = np.zeros(2, np.float32)
        compiled(sums_of_scratch, [out, x])
        assert out.tolist() == [total, total]
        assert len(bodies) == count and len(outlining._bodies) == 1, "that of the scratch memory"
