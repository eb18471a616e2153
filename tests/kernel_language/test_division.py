"""Integer division and remainder: against NumPy and Python's integers, by zero, and at the ends of the types."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import kernel as k
from max._backends.program import KernelRunError
from max.kernel.frontend.builder import Builder
from max.kernel.frontend.division import interval, note_condition, note_positive
from max.kernel.ir.nodes import Atom, Ref
from max.kernel.types import BOOL, INDEX
from tests.kernel_language.harness import both, compiled, interpreted

DTYPES = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@k.kernel
def elements(out: k.Output, x: k.Input, y: k.Input):
    for i in range(x.shape[0]):
        out[0, i] = x[i] // y[i]
        out[1, i] = x[i] % y[i]
        q, r = x[i], x[i]
        q //= y[i]
        r %= y[i]
        out[2, i] = q
        out[3, i] = r


@k.kernel
def lanes(out: k.Output, x: k.Input, y: k.Input, *, W=8):
    for j, mask in k.vectors(x.shape[0], W):
        a, b = x.load(j, width=W, mask=mask), y.load(j, width=W, mask=mask)
        out.store(0, j, value=a // b, mask=mask)
        out.store(1, j, value=a % b, mask=mask)
        out.store(2, j, value=k.splat(x[0], W) // b, mask=mask)
        out.store(3, j, value=a % y[0], mask=mask)


def numbers(dtype: np.dtype, seed: int, zero: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of numbers at the ends of the type and around 0, and random ones."""
    info, rng = np.iinfo(dtype), np.random.default_rng(seed)
    ends = {info.min, info.min + 1, info.max, info.max - 1, info.max // 2, *range(-3, 4)}
    ends = sorted(n for n in ends if info.min <= n <= info.max)
    x, y = (list(side) for side in zip(*itertools.product(ends, ends), strict=True))
    x += rng.integers(info.min, info.max, 37, dtype=dtype, endpoint=True).tolist()
    y += rng.integers(max(info.min, -9), 9, 37, dtype=dtype).tolist()
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if b or zero]
    return np.array([a for a, _ in pairs], dtype), np.array([b for _, b in pairs], dtype)


def wrapped(value: int, dtype: np.dtype) -> int:
    return int(np.array(value % (1 << 8 * dtype.itemsize), np.uint64).astype(dtype))


@EACH_DTYPE
def test_elements_as_pythons_integers(dtype):
    x, y = numbers(dtype, 1)
    out, *_ = both(elements, [np.zeros((4, len(x)), dtype), x, y])
    quotients = [wrapped(int(a) // int(b), dtype) for a, b in zip(x, y, strict=True)]
    remainders = [int(a) % int(b) for a, b in zip(x, y, strict=True)]
    assert out[0].tolist() == out[2].tolist() == quotients
    assert out[1].tolist() == out[3].tolist() == remainders


@EACH_DTYPE
@pytest.mark.parametrize("width", [1, 3, 8, 64])
def test_lanes_as_numpy(dtype, width):
    x, y = numbers(dtype, 2)
    out, *_ = both(lanes, [np.zeros((4, len(x)), dtype), x, y], {"W": width})
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out, [x // y, x % y, x[0] // y, x % y[0]])


@k.kernel
def with_literals(out: k.Output, x: k.Input, *, divisors=()):
    for i in range(x.shape[0]):
        for n, d in enumerate(divisors):
            out[i, 2 * n] = x[i] // d
            out[i, 2 * n + 1] = x[i] % d


@pytest.mark.plain_code
@EACH_DTYPE
def test_divisors_known_at_compile_time(dtype):
    x, _ = numbers(dtype, 3)
    divisors = tuple(d for d in (1, 2, 3, 7, 64, -1, -2, -3, -64) if dtype.kind == "i" or d > 0)
    given_ = [np.zeros((len(x), 2 * len(divisors)), dtype), x]
    out, _ = both(with_literals, given_, {"divisors": divisors})
    with np.errstate(over="ignore"):
        for n, d in enumerate(divisors):
            np.testing.assert_array_equal(out[:, 2 * n], x // dtype.type(d))
            np.testing.assert_array_equal(out[:, 2 * n + 1], x % dtype.type(d))
    specs = [k.TensorSpec(k.scalar_type(dtype), (None,) * n) for n in (2, 1)]
    assert not k.specialize(with_literals, specs, {"divisors": divisors}).messages


# ***** by zero *****
def raises_zero(fn, args, params, message):
    with pytest.raises(ZeroDivisionError, match=message) as raised:
        compiled(fn, args, params)
    assert isinstance(raised.value, KernelRunError)
    assert f"{__file__}:" in str(raised.value)
    with pytest.raises(ZeroDivisionError, match=message):
        interpreted(fn, args, params)


@k.kernel
def one(out: k.Output, x: k.Input, y: k.Input, *, op="//"):
    if op == "//":
        out[0] = x[0] // y[0]
    elif op == "%":
        out[0] = x[0] % y[0]
    else:
        out[0] = k.ceildiv(x[0], y[0])


def dividing(line):
    text = f"def f(out: k.Output, x: k.Input):\n    c = 3\n    if x[0] > 0:\n        {line}\n"
    return k.from_source(text, "f", {"k": k})


@pytest.mark.parametrize("reached", [True, False])
@pytest.mark.parametrize(
    "divided",
    ["x[0] // 0", "x[0] % 0", "x[0] % (c - 3)", "5 // 0", "5 % (c - 3)", "x.load(0, width=4) // 0",
        "k.ceildiv(x[0], 0)"],
)  # fmt: skip
def test_the_number_0_is_refused_at_compile_time(divided, reached):
    """Reached or not; plain Python raises where it is reached."""
    fn = dividing(f"v = {divided}")
    args = [np.zeros(1, np.int64), np.full(4, 5 if reached else -5)]
    with pytest.raises(k.KernelValueError, match=":4:.*: division by zero"):
        compiled(fn, args)
    if reached:
        with pytest.raises(ZeroDivisionError):
            interpreted(fn, args)
    else:
        interpreted(fn, args)


@pytest.mark.parametrize(
    "divided", ["x[0] // k.i64(0)", "x[0] % k.i64(c - 3)", "(x.load(0, width=4) % k.splat(k.i64(0), 4))[0]"]
)  # fmt: skip
def test_a_typed_0_raises_where_it_is_reached(divided):
    fn = dividing(f"out[0] = {divided}")
    for run in (compiled, interpreted):
        with pytest.raises(ZeroDivisionError, match="integer (division|modulo) by zero"):
            run(fn, [np.zeros(1, np.int64), np.full(4, 5)])
        run(fn, [np.zeros(1, np.int64), np.full(4, -5)])


@EACH_DTYPE
@pytest.mark.parametrize(("op", "what"), [("//", "division"), ("%", "modulo"), ("up", "division")])
def test_a_scalar_by_zero(dtype, op, what):
    args = [np.zeros(1, dtype), np.array([5], dtype), np.zeros(1, dtype)]
    shown = "" if op == "up" else f"5 {op} 0: "
    raises_zero(one, args, {"op": op}, f"{shown}integer {what} by zero")


@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize("size", [1, 15, 16, 33])
def test_any_lane_by_zero(size, width):
    x = np.full(size, 7, np.int32)
    for at in {0, size // 2, size - 1}:
        y = np.full(size, -1, np.int32)
        y[at] = 0
        args = [np.zeros((4, size), np.int32), x, y]
        raises_zero(lanes, args, {"W": width}, "integer division by zero")


@k.kernel
def tail_sum(out: k.Output, x: k.Input, y: k.Input, *, W=8):
    total = k.splat(k.i32(0), W)
    for j, mask in k.vectors(x.shape[0], W):
        divisor = k.splat(k.i32(0), W)
        for _ in range(3):
            divisor += y.load(j, width=W, mask=mask)
        total += x.load(j, width=W, mask=mask, other=99) // divisor
        total += x.load(j, width=W, mask=mask, other=99) % divisor
        for i, _ in k.vectors(W, W):
            total += k.splat(k.i32(0), W) // x.load(i, width=W)
    out[0] = k.reduce_add(total)


@pytest.mark.parametrize("size", [8, 9, 15, 23])
def test_lanes_that_are_off_in_a_tail_do_not_count(size):
    x, y = np.arange(5, 5 + size, dtype=np.int32), np.full(size, 2, np.int32)
    out, *_ = both(tail_sum, [np.zeros(1, np.int32), x, y])
    assert out[0] == (x // 6 + x % 6).sum()
    y[-1] = 0
    raises_zero(tail_sum, [np.zeros(1, np.int32), x, y], None, "in a vector")
    y[-1], x[3] = 2, 0  # a whole vector inside of the tail
    raises_zero(tail_sum, [np.zeros(1, np.int32), x, y], None, "in a vector")


SPANS = {
    # the bounds of a loop over vectors of 8, by n, m and p = 2**60 * (n % 2), and whether it has no tail
    "0, m * 8": True,
    "0, 16 * m + 8": True,
    "0, n": False,
    "0, m * 4": False,
    "0, m * 8 + n": False,
    "0, m * 8 - 4": False,
    "n, n + m * 8": False,
    "m * 8, n": False,
    "m * 8, (m + 2) * 24": True,
    "0, k.min(m * 8, 4096)": True,
    "0, k.min(m * 8, 36)": False,
    "0, k.min(m * 8, n)": False,
    "0, k.max(m * 40 - 16, 0)": True,
    "0, k.max(m * 8, 1)": False,
    "0, m * 8 - n * 8": True,
    "0, (m - 10) * 8": True,
    "0, (m * 8) // 3": False,
    "0, (p + m) * 8": True,
}


@pytest.mark.parametrize("span", SPANS)
def test_whole_vectors_have_no_tail(span: str) -> None:
    """Also where the product of the bound wraps: a multiple of a power of two stays one."""
    text = f"""
def kernel(out: k.Output[k.i32, 1], n: k.i64, m: k.i64, p: k.i64):
    for j, mask in k.vectors({span}, 8):
        if mask is None:
            out.store(j, value=out.load(j, width=8) + 1)
        else:
            out.store(j, value=out.load(j, width=8, mask=mask) + 1, mask=mask)
"""
    fn = k.from_source(text, "kernel", {"k": k})
    for n, m in [(0, 0), (1, 1), (7, 2), (13, 5), (16, 3), (3, 12), (100, 11)]:
        p = np.int64(n % 2) << np.int64(60)
        args = [np.zeros(512, np.int32), np.int64(n), np.int64(m), p]
        ir = compiled(fn, args)
        assert ("mask" not in k.emit_llvm(ir, k.host_target())) == SPANS[span]
        names = {"k": k, "n": n, "m": m, "p": int(p)}
        # the bound as 64 bits have it
        start, stop = (
            ((int(x) + (1 << 63)) % (1 << 64)) - (1 << 63) for x in eval(f"({span})", names)
        )
        expected = np.zeros(512, np.int32)
        expected[start : max(stop, start)] = 1
        np.testing.assert_array_equal(args[0], expected)


@k.kernel
def thirds(out: k.InOut, n: k.i64):
    for j, mask in k.vectors(n * 3, 3):
        out.store(j, value=out.load(j, width=3, mask=mask) + 1, mask=mask)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_multiples_of_other_numbers_have_a_tail(n: int) -> None:
    """3 n, where it wraps, is no multiple of 3."""
    out = np.zeros(20, np.int32)
    ir = compiled(thirds, [out, np.int64(n)])
    assert "mask" in k.emit_llvm(ir, k.host_target())
    np.testing.assert_array_equal(out, np.arange(20) < 3 * n)


@k.kernel
def guarded(out: k.Output, n: k.i64, m: k.i64):
    out[0] = n // m if m != 0 else -1
    if m != 0 and n % m == 1:
        out[1] = 1
    if m <= 0:
        out[2] = -1
    else:
        out[2] = n % m
    for i in range(m):
        out[3] = (n + i) // m


@pytest.mark.parametrize("m", [-2, 0, 1, 3])
def test_a_division_that_does_not_run_does_not_raise(m):
    out, *_ = both(guarded, [np.zeros(4, np.int64), np.int64(7), np.int64(m)])
    loop = (7 + m - 1) // m if m > 0 else 0
    assert out.tolist() == [
        7 // m if m else -1,
        int(bool(m) and 7 % m == 1),
        7 % m if m > 0 else -1,
        loop,
    ]


# ***** what is not tested at run time *****
@k.kernel
def proven(out: k.Output, x: k.Input, ctx: k.Context, n: k.i64):
    for i, j in ctx.parallel((x.shape[0], x.shape[1])):
        out[i, j] = x[(i + j) % x.shape[0], j // x.shape[1]]
    for i in range(x.shape[0] * x.shape[1]):
        out[i // x.shape[1], i % x.shape[1]] += k.f32(i // k.max(n, 1))
    for lo, hi in ctx.chunks(x.shape[1]):
        for j in range(lo, hi):
            out[0, j] += k.f32(j % x.shape[1] + j // ctx.num_workers + n // (1 + j))
    if n > 0:
        out[0, 0] += k.f32(7 % n)
    if n <= 0:
        return
    out[0, 0] += k.f32(9 // n)


@pytest.mark.plain_code
@pytest.mark.parametrize("n", [-3, 0, 4])
def test_sizes_of_loops_that_run_are_known_to_be_positive(n):
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    both(proven, [np.zeros_like(x), x, np.int64(n)])
    view = k.TensorSpec(k.f32, (None, None))
    assert not k.specialize(proven, [view, view, k.i64]).messages


@k.kernel
def once_each(out: k.Output, n: k.i64):
    for i in range(out.shape[0]):
        out[i] = 100 // n + 100 % n
        out[i] += i % n


@pytest.mark.plain_code
def test_equal_divisors_are_tested_once():
    ir = k.specialize(once_each, [k.TensorSpec(k.i64, (None,)), k.i64])
    assert len(ir.messages) == 1
    out, _ = both(once_each, [np.zeros(9, np.int64), np.int64(-7)])
    assert out.tolist() == [100 // -7 + 100 % -7 + i % -7 for i in range(9)]


@k.kernel
def empty(out: k.Output, x: k.Input):
    out[0] = 5 // x.shape[0]


def test_a_size_of_zero():
    raises_zero(empty, [np.zeros(1, np.int64), np.zeros(0)], None, "by zero")


class Expression:
    """A random expression over sizes ``n`` and ``m``, an index ``i`` below ``n``, and any number ``z``."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def text(self, depth: int) -> str:
        pick = self.random.choice
        if depth == 0:
            return pick(["n", "m", "i", "z", "1", "3", "-2", "0"])
        p, q = self.text(depth - 1), self.text(depth - 1)
        return pick(
            [
                f"({p} + {q})",
                f"({p} - {q})",
                f"({p} * {q})",
                f"({p} & {q})",
                f"({p} >> {self.random.randint(0, 3)})",
                f"k.min({p}, {q})",
                f"k.max({p}, {q})",
                f"({p} // {q})",
                f"({p} % {q})",
                f"k.ceildiv({p}, {q})",
                f"({p} if {q} > 0 else {q})",
                f"k.i64(k.i32({p}))",
            ]
        )


@given(seed=st.integers(0, 10**9), z=st.integers(-(2**63), 2**63 - 1), n=st.integers(0, 3))
@settings(max_examples=80)
def test_random_expressions(seed, z, n):
    """A number wrongly assumed positive would end the process or change the result."""
    made = Expression(seed)
    dividend, divisor = made.text(2), made.text(2)
    text = f"""
def program(out: k.Output, x: k.Input, z: k.i64):
    n, m = x.shape[0], x.shape[1]
    for i in range(n):
        out[i, 0] = k.i64({dividend}) // k.i64({divisor})
        out[i, 1] = k.i64({dividend}) % k.i64({divisor})
"""
    try:
        fn = k.from_source(text, "program", {"k": k})
        k.specialize(fn, [k.TensorSpec(k.i64, (None, None))] * 2 + [k.i64])
    except k.KernelError as error:
        assert "division by zero" in str(error) or "by zero" in str(error), text
        return
    args = [np.zeros((n, 2), np.int64), np.zeros((n, seed % 3), np.int64), np.int64(z)]
    try:
        both(fn, args)
    except ZeroDivisionError:
        for run in (compiled, interpreted):
            with pytest.raises(ZeroDivisionError):
                run(fn, args)
    except AssertionError as error:
        raise AssertionError(f"z {z}, n {n}\n{text}") from error


# ***** what is known of values *****
def evaluate(op: str, a: int, b: int) -> int | None:
    """The op on unbounded integers; None if it has no value."""
    if op in ("floordiv", "mod", "udiv", "umod"):
        if b == 0 or (op[0] == "u" and min(a, b) < 0):
            return None
        return a // b if op in ("floordiv", "udiv") else a % b
    if op == "shr":
        return a >> b
    return {"add": a + b, "sub": a - b, "mul": a * b, "and": a & b, "min": min(a, b), "max": max(a, b)}[op]  # fmt: skip


def wraps_to(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


@given(seed=st.integers(0, 10**9))
@settings(max_examples=150)
def test_intervals_hold_every_value(seed):
    rng, b = random.Random(seed), Builder()
    known: list[tuple[Atom, int]] = []
    for _ in range(4):
        leaf = b.op("arg", (), INDEX, len(known))
        exponent = rng.choice([1, 2, 4, 31, 48, 62, 63])
        bounds = sorted(rng.randint(-(2**exponent), 2**exponent - 1) for _ in range(3))
        if rng.random() < 0.5:
            bounds = [abs(n) for n in bounds]
        low, value, high = sorted(bounds)
        b.intervals[leaf.id] = low, high
        known.append((leaf, value))
    known += [(b.index(n), n) for n in (0, 1, -1, 3)]
    ops = ("add", "sub", "mul", "and", "min", "max", "shr", "floordiv", "mod", "udiv", "umod")
    for _ in range(8):
        op = rng.choice(ops)
        (x, a), (y, c) = rng.choice(known), rng.choice(known)
        if op == "shr":
            y, c = b.index(n := rng.randint(0, 3)), n
        if (exact := evaluate(op, a, c)) is None:
            continue
        value = wraps_to(exact)
        attr = "nsw" if op in ("add", "sub", "mul") and value == exact else None
        known.append((b.op(op, (x, y), INDEX, attr if rng.random() < 0.7 else None), value))
    conditions = [(x, a, y, c) for x, a in known for y, c in known[4:8] if isinstance(x, Ref)]
    for x, a, y, c in rng.sample(conditions, 3):
        op, holds = rng.choice(
            [("gt", a > c), ("ge", a >= c), ("lt", a < c), ("le", a <= c), ("ne", a != c)]
        )
        note_condition(b, b.scopes[0], b.op(op, (x, y), BOOL), holds)
    for x, a in known:
        if a > 0 and rng.random() < 0.3:
            note_positive(b, b.scopes[0], x)
    for x, a in known:
        low, high = interval(b, x)
        assert low <= a <= high, (x, a, low, high)
        assert a or not (isinstance(x, Ref) and x.id in b.scopes[0].nonzero)


def asked_anew(b: Builder, x: Atom) -> tuple[int, int]:
    """The interval of a value if nothing was asked before."""
    known = [scope.known for scope in b.scopes]
    for scope in b.scopes:
        scope.known = {}
    found = interval(b, x)
    for scope, before in zip(b.scopes, known, strict=True):
        scope.known = before
    return found


@given(seed=st.integers(0, 10**9))
@settings(max_examples=40)
def test_intervals_do_not_depend_on_what_was_asked_before(seed):
    """Of chains longer than the analysis follows, in bodies that are opened, closed, opened again and dropped."""
    rng, b = random.Random(seed), Builder()
    values: list[Atom] = []
    for bounds in ((0, 1000), (-8, 8), (0, 2**40)):
        values.append(b.op("arg", (), INDEX, len(values)))
        b.intervals[values[-1].id] = bounds
    values += [b.index(n) for n in (1, -2)]
    closed = []
    for _ in range(60):
        match rng.randrange(10):
            case 0:
                b.open("branch")
            case 1 if len(b.scopes) > 1:
                closed.append((b.close(), len(b.scopes)))
            case 2 if len(b.scopes) > 1:
                b.scopes[-1].forget(0)
            case 3:
                scope, x = rng.choice(b.scopes), rng.choice(values[1:3] + values[-4:])
                note_positive(b, scope, x)
            case 4 if closed:
                scope, depth = rng.choice(closed)
                if len(b.scopes) == depth:
                    with b.reopen(scope):
                        x = rng.choice(values)
                        assert interval(b, x) == asked_anew(b, x)
            case _:
                # mostly chains
                x, y = rng.choice(values[-3:]), rng.choice(values)
                op = rng.choice(("add", "sub", "mul", "min", "max", "floordiv"))
                values.append(b.op(op, (x, y), INDEX, rng.choice((None, "nsw"))))
        for x in rng.sample(values, 3):
            assert interval(b, x) == asked_anew(b, x)


def test_what_is_proved_inside_is_proved_around_it_later():
    b = Builder()
    x = b.op("arg", (), INDEX, 0)
    b.intervals[x.id] = -8, 8
    y = b.op("add", (x, b.index(2)), INDEX, "nsw")
    assert interval(b, y) == (-6, 10)
    inner = b.open("branch")
    note_positive(b, inner, x)
    assert interval(b, y) == (3, 10)
    note_positive(b, b.scopes[0], x)
    b.close()
    assert interval(b, y) == (3, 10)
