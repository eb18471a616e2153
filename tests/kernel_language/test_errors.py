"""Errors of the compiler point at line and column; errors at run time reach the caller."""

from __future__ import annotations

import linecache
import logging
import re
import textwrap

import numpy as np
import pytest

from max import kernel as k
from max._backends.program import KernelRunError
from max._config import flags
from tests.kernel_language.harness import both, compiled, interpreted

F32_1 = k.TensorSpec(k.f32, (None,))
F32_2 = k.TensorSpec(k.f32, (None, None))


def errors_of(body: str, helpers: str = "", **params: object) -> k.KernelError:
    """Compiles a kernel body that is wrong; ``^`` below a line marks where the error is expected."""
    lines = textwrap.dedent(body).strip("\n").split("\n")
    marks = [(n, line.index("^")) for n, line in enumerate(lines) if line.strip() == "^"]
    source = [line for line in lines if line.strip() != "^"]
    head = textwrap.dedent(helpers).strip("\n")
    names = "".join(f", {name}" for name in params)
    text = (
        head + "\n" if head else ""
    ) + "def bad(out: k.Output, x: k.Input, n: k.i64, ctx: k.Context"
    text += (
        (", *" + names if names else "")
        + "):\n"
        + textwrap.indent("\n".join(source), "    ")
        + "\n"
    )
    fn = k.from_source(text, "bad", {"k": k, "host": host_function})
    with pytest.raises(k.KernelError) as caught:
        k.specialize(fn, [F32_1, F32_2, k.i64], params)
    first = text.index("def bad")
    offset = text[:first].count("\n") + 2
    # a mark stands for the line before it, not counting the marks above
    expected = [(n - i - 1 + offset, column + 5) for i, (n, column) in enumerate(marks)]
    got = [(d.location.line, d.location.column) for d in caught.value.diagnostics]
    if expected:
        assert got == expected, str(caught.value)
    return caught.value


def host_function(x: object) -> object:
    return x


CASES = [
    (
        "out[0] = x[0] + 1\n         ^",
        "takes 1 indices|arithmetic does not take",
        k.KernelTypeError,
    ),
    ("out[0] = y\n         ^", "'y' is not defined", k.KernelNameError),
    ("out[0] = x[0, 0, 0]\n         ^", "2 axes, got 3 indices", IndexError),
    ("x[0, 0] = 1.0\n^", "k.Input and cannot be written", TypeError),
    ("out[0] = n * x[0, 0]\n         ^", "does not take i64 and f32", TypeError),
    ("out[0] = x[0, 0] & 1\n         ^", "integers or masks fit", TypeError),
    ("v = n + 0.5\n    ^", "literal 0.5", TypeError),
    ("v = n / 2\n    ^", "use '//'", TypeError),
    ("v = x.lod(0, 0)\n    ^", "no attribute 'lod'", k.KernelNameError),
    ("v = x.load(0, width=4)\n    ^", "takes 2 indices, got 1", IndexError),
    ("v = x.load(0, 0, width=n)\n    ^", "known at compile time", TypeError),
    ("v = x.load(0, 0, wdth=4)\n    ^", "unexpected keyword argument 'wdth'", TypeError),
    ("v = x.load(0, 0, width=4)\nout[0] = v\n^", "takes a scalar, got SIMD", TypeError),
    (
        "v = x.load(0, 0, width=4) + x.load(0, 0, width=8)\n    ^",
        r"SIMD\[f32, 4\] and SIMD\[f32, 8\]",
        TypeError,
    ),
    ("for i in n:\n         ^\n    pass", "loop over range", TypeError),
    ("for i in k.static_range(n):\n         ^\n    pass", "known at compile time", TypeError),
    ("if x.load(0, 0, width=4) > 0.0:\n   ^\n    pass", "a condition is a scalar", TypeError),
    ("with n:\n^\n    pass", "'with' is not part", SyntaxError),
    ("v = {1, 2}\n    ^", "Set is not part", SyntaxError),
    ("v = host(n)\n    ^", "mark it @k.inline", TypeError),
    ("v = k.i8(300)\n    ^", "does not fit into i8", ValueError),
    ("t = k.tile(k.f32, (2, 2))\nv = t[2, 0]\n    ^", "index 2 out of range", IndexError),
    ("t = k.tile(k.f32, n)\n    ^", "known at compile time", TypeError),
    ("raise ValueError('{} {}', n)\n^", "2 placeholders", ValueError),
    ("raise 3\n^", "exception class", TypeError),
    ("for i in ctx.parallel(n):\n    ctx.barrier()\n    ^", "barrier", SyntaxError),
    (
        "for i in range(n):\n    for j in ctx.parallel(n):\n             ^\n        pass",
        "run-time loop",
        TypeError,
    ),
    ("for i in ctx.parallel(n):\n    break\n    ^", "cannot leave a parallel loop", SyntaxError),
    ("if n > 0:\n    v = 1\nout[0] = v\n         ^", "only one branch", k.KernelNameError),
    (
        "for i in range(n):\n    v = 1\nout[0] = v\n         ^",
        "assigned in a loop that may not run",
        k.KernelNameError,
    ),
    ("a, b = 1, 2, 3\n^", "cannot unpack 3 values into 2", ValueError),
    ("k.static_assert(x.rank == 3, 'rank 3')\n^", "rank 3", ValueError),
    ("v = k.select(n, 1, 2)\n    ^", "takes a mask first", TypeError),
    ("v = k.select(n > 0, x, x[0])\n    ^", "one element type and rank", TypeError),
    ("v = k.exp(n)\n    ^", "convert it", TypeError),
    ("assert n > 0\n^", "k.static_assert", SyntaxError),
    ("return n\n^", "returns nothing", TypeError),
    ("v = n // 0\n    ^", "division by zero", ValueError),
    ("v: k.i32 = n\n^", "v is i32, got i64", TypeError),
    ("v = ~(1 == 1)\n    ^", "'~' of True is -2 in Python, which is true; use not", TypeError),
    ("v = ~(1 == 2)\n    ^", "'~' of False is -1 in Python", TypeError),
]


@pytest.mark.parametrize(
    ("body", "message", "kind"), CASES, ids=[c[0].split("\n")[0] for c in CASES]
)
def test_place_and_message(body, message, kind):
    if message.startswith("takes 1 indices"):
        body, message = "out[0] = x[0] + 1\n         ^", "arithmetic does not take the view x"
    error = errors_of(body)
    assert error.diagnostics and re.search(message, str(error)), str(error)
    assert isinstance(error, kind), type(error)


def test_several_errors_in_one_compilation():
    error = errors_of(
        """
        a = missing
            ^
        b = a + 1
        out[0] = n
        for i in range(n):
            out[i] = x[i]
            ^
        c = x.load(0, 0, width=0)
            ^
        """
    )
    assert "3 errors in the kernel" in str(error)


def test_the_line_is_shown_with_a_caret():
    error = errors_of("out[0] = n + missing\n             ^")
    shown = str(error).split("\n")
    assert shown[1].strip() == "out[0] = n + missing"
    assert shown[2].index("^") - 4 == "out[0] = n + missing".index("missing")


def test_inlined_functions_tell_the_call():
    error = errors_of("out[0] = helper(n)", "def helper(v):\n    return v + missing\n")
    (diagnostic,) = error.diagnostics
    assert diagnostic.location.line == 2 and diagnostic.location.column == 16
    assert [c.line for c in diagnostic.calls] == [4]


def test_arguments_that_do_not_fit():
    text = "def f(out: k.Output[k.f32, 1], n: k.i64, *, W):\n    out[0] = k.f32(W)\n"
    fn = k.from_source(text, "f", {"k": k})
    for args, params, message in [
        ([F32_2, k.i64], {"W": 1}, "out has rank 1, got 2"),
        ([k.TensorSpec(k.i8, (3,)), k.i64], {"W": 1}, "out has dtype f32, got i8"),
        ([F32_1], {"W": 1}, "none for 'n'"),
        ([F32_1, k.i32], {"W": 1}, "n is a scalar i64"),
        ([F32_1, k.i64, k.i64], {"W": 1}, "takes 2 arguments"),
        ([F32_1, k.i64], {}, "needs a value for its compile-time parameter 'W'"),
        ([F32_1, k.i64], {"W": 1, "V": 2}, "has no parameter V"),
    ]:
        with pytest.raises(k.KernelTypeError, match=message):
            k.specialize(fn, args, params)


def test_unknown_names_in_the_registry():
    @k.register("test.errors.op")
    def op(out: k.Output):
        out[0] = 0

    assert k.kernel_of_op("test.errors.op") is op
    file, line = op.location
    assert linecache.getline(file, line).strip().startswith("def op")
    with pytest.raises(k.KernelNameError, match="did you mean 'test.errors.op'"):
        k.kernel_of_op("test.errors.opp")


def test_source_texts_that_do_not_parse():
    with pytest.raises(k.KernelError, match=r":1:"):
        k.from_source("def f(:\n", "f")
    with pytest.raises(k.KernelError, match="does not define 'g'"):
        k.from_source("def f():\n    pass\n", "g")


# ***** at run time *****
@k.inline
def checked(i, n):
    if i >= n:
        raise IndexError("index {} out of {}", i, n)
    return i


@k.kernel
def gather(out: k.Output[k.f32, 1], x: k.Input[k.f32, 1], index: k.Input[k.i64, 1], ctx: k.Context):
    for j in ctx.parallel(out.shape[0], 1):
        out[j] = x[checked(index[j], x.shape[0])]


@pytest.mark.parametrize("workers", [1, 2])
def test_raise_reaches_the_caller(workers):
    x = np.arange(5, dtype=np.float32)
    index = np.array([1, 2, 3, 9, 0])
    for run in (compiled, interpreted):
        with pytest.raises(IndexError, match="index 9 out of 5"):
            run(gather, [np.zeros(5, np.float32), x, index], {}, workers)
    index[3] = 4
    out, *_ = both(gather, [np.zeros(5, np.float32), x, index], {}, workers)
    np.testing.assert_array_equal(out, x[index])


@k.kernel
def raises_before_a_barrier(out: k.Output[k.i64, 1], at: k.i64, ctx: k.Context):
    for phase in k.static_range(4):
        if ctx.worker == ctx.num_workers - 1 and at == phase:
            raise RuntimeError(f"phase {phase}, at {at}, {k.f32(1.5)}")
        ctx.barrier()
    for _ in range(3):
        ctx.barrier()
        if at == 99:
            raise ValueError("late")
    out[0] = 1


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("at", [0, 3])
def test_raise_with_barriers_does_not_hang(workers, at):
    out = np.zeros(1, np.int64)
    with pytest.raises(KernelRunError, match=rf"phase {at}, at {at}, 1.5"):
        compiled(raises_before_a_barrier, [out, np.int64(at)], {}, workers)
    with pytest.raises(KernelRunError, match="late"):
        compiled(raises_before_a_barrier, [out, np.int64(99)], {}, workers)
    assert out[0] == 0
    compiled(raises_before_a_barrier, [out, np.int64(-1)], {}, workers)
    assert out[0] == 1


@k.kernel
def out_of_bounds(out: k.Output[k.f32, 1], x: k.Input[k.f32, 2], i: k.i64, *, what: str):
    if what == "scalar":
        out[0] = x[0, i]
    elif what == "row":
        out[0] = x[i][0]
    elif what == "vector":
        out[0] = k.reduce_add(x.load(0, i, width=4))
    elif what == "masked":
        out[0] = k.reduce_add(x.load(0, i, width=4, mask=k.iota(k.i32, 4) < 2))
    elif what == "store":
        out[i] = 1.0
    elif what == "tile":
        t = k.tile(k.f32, 4, fill=0.0)
        t[i] = 1.0
        out[0] = t[0]
    elif what == "gather":
        out[0] = k.reduce_add(x[0].gather(k.splat(i, 4)))


BOUNDS = [
    ("scalar", 4, 5, r"x: index 5 is out of range for axis 1 of size 5"),
    ("row", 1, 2, r"x: index 2 is out of range for axis 0 of size 2"),
    ("vector", 1, 2, r"x: index 5 is out of range for axis 1 of size 5"),
    ("masked", 3, 4, r"x: lanes from index 4 are out of range for axis 1 of size 5"),
    ("store", 0, -1, r"out: index -1 is out of range for axis 0 of size 1"),
    ("tile", 3, 4, r"tile: index 4 is out of range for size 4"),
    ("gather", 4, 5, r"x.gather: an index is out of range for size 5"),
]


@pytest.mark.parametrize(("what", "good", "bad", "message"), BOUNDS, ids=[b[0] for b in BOUNDS])
def test_bounds_checks(what, good, bad, message):
    x = np.zeros((2, 5), np.float32)
    with flags.override(MAX_KERNEL_CHECK=1):
        compiled(out_of_bounds, [np.zeros(1, np.float32), x, np.int64(good)], {"what": what})
        with pytest.raises(IndexError, match=message):
            compiled(out_of_bounds, [np.zeros(1, np.float32), x, np.int64(bad)], {"what": what})
    with pytest.raises(IndexError):
        interpreted(out_of_bounds, [np.zeros(1, np.float32), x, np.int64(bad)], {"what": what})


def test_dump(caplog):
    with flags.override(MAX_DUMP="kernels"), caplog.at_level(logging.INFO, "max.dump"):
        k.specialize(gather, [F32_1, F32_1, k.TensorSpec(k.i64, (None,))])
    assert "kernel gather" in caplog.text and "parallel" in caplog.text


def test_brief_stands_in_a_loop():
    text = "def f(out: k.Output[k.i64, 1], n: k.i64):\n    k.brief()\n    out[0] = n\n"
    with pytest.raises(k.KernelError, match="must be in a loop"):
        k.specialize(k.from_source(text, "f", {"k": k}), [k.TensorSpec(k.i64, (None,)), k.i64])


# ***** raises of inlined functions *****
HELPERS = """
def fixed_size(what, size, expected):
    if size != expected:
        raise ValueError("{} has size {}, expected {}", what, size, expected)

def first_even(*sizes):
    for size in sizes:
        if size % 2 == 0:
            return size
    raise TypeError(f"no size of {sizes} is even")

def outside(i):
    raise IndexError("index {} is outside", i)

def nested(i):
    outside(i)
    return 3.0
"""


@pytest.mark.parametrize(
    ("body", "message", "kind"),
    [
        ("fixed_size('q', x.rank, 3)", "ValueError: q has size 2, expected 3", ValueError),
        ("out[0] = k.f32(first_even(1, 3))", r"TypeError: no size of \(1, 3\) is even", TypeError),
        ("for i in ctx.parallel(n):\n    fixed_size('q', 1, 2)", "q has size 1", ValueError),
        ("out[0] = nested(n)", "IndexError: index i64 is outside", IndexError),
    ],
)
def test_a_raise_that_every_run_reaches_is_an_error_of_compilation(body, message, kind):
    error = errors_of(body, HELPERS)
    (diagnostic,) = error.diagnostics
    assert re.search(message, diagnostic.message), diagnostic.message
    assert isinstance(error, kind)
    last = HELPERS.strip("\n").count("\n") + 1 + len(body.split("\n"))
    assert diagnostic.calls[-1].line == last + 1


@pytest.mark.parametrize(
    "body",
    [
        "if i >= n:\n    {}\nout[0] = 1.0",
        "if i < n:\n    out[0] = 1.0\nelse:\n    {}",
        "if i < n:\n    out[0] = 1.0\n    return\n{}",
        "for j in range(2):\n    if i < n:\n        continue\n    {}\nout[0] = 1.0",
    ],
)
@pytest.mark.parametrize("call", ["outside(i)", "out[0] = nested(i)"])
def test_a_function_that_only_raises_raises_where_a_run_reaches_it(body, call):
    lines = textwrap.indent(body.format(call), "    ")
    text = f"{HELPERS}\ndef f(out: k.Output[k.f32, 1], i: k.i64, n: k.i64):\n{lines}\n"
    fn = k.from_source(text, "f", {"k": k})
    for run in (compiled, interpreted):
        out = np.zeros(1, np.float32)
        run(fn, [out, np.int64(2), np.int64(3)], {})
        assert out[0] == 1.0
        with pytest.raises(IndexError, match="index 3 is outside"):
            run(fn, [np.zeros(1, np.float32), np.int64(3), np.int64(3)], {})


def test_a_function_that_only_raises_has_no_value_in_a_branch_of_an_expression():
    error = errors_of("v = 1.0 if n > 0 else nested(n)\n                      ^", HELPERS)
    assert "raises on every path" in str(error)
