"""`@k.outlined`: the results of inlined code, and one function for all kernels with an equal body."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from max import kernel as k
from max._config import flags
from max.kernel.frontend import inlining, outlining
from tests.kernel_language.harness import compiled, interpreted, spec_of


@pytest.fixture(autouse=True)
def accesses_that_are_not_compared() -> Iterator[None]:
    """No function is outlined if accesses are checked."""
    with flags.override(MAX_KERNEL_CHECK=0):
        yield


@k.outlined
def add_runs(out: k.Output, x: k.Input, first, count, width: int) -> None:
    for i in range(first, first + count):
        total = k.splat(k.f32(0), width)
        for j, mask in k.vectors(x.shape[1], width):
            total += x.load(i, j, width=width, mask=mask)
        out[i] = k.reduce_add(total)


@k.kernel
def sums(out: k.Output, x: k.Input, ctx: k.Context):
    for i in ctx.parallel(x.shape[0]):
        add_runs(out, x, i, k.i64(1), 8)


@k.kernel
def shifted_sums(out: k.Output, x: k.Input, shift: k.f32, ctx: k.Context):  # pyright: ignore
    for i in ctx.parallel(x.shape[0]):
        add_runs(out, x, i, k.i64(1), 8)
        out[i] = out[i] + shift


@k.outlined
def largest(best, x: k.Input) -> None:
    for i in range(x.shape[0]):
        if x[i] > best[0]:
            best[0] = x[i]
            best[1] = k.f32(i)


@k.kernel
def find_largest(out: k.Output, x: k.Input):
    best = k.tile(k.f32, 2, fill=-1.0)
    largest(best, x)
    out[0] = best[0]
    out[1] = best[1]


@k.outlined
def checked_shares(out: k.Output, x: k.Input, divisor) -> None:
    for i in range(x.shape[0]):
        out[i] = x[i] // divisor


@k.kernel
def shares(out: k.Output, x: k.Input, divisor: k.i64):  # pyright: ignore
    checked_shares(out, x, divisor)


@k.outlined
def with_result(x: k.Input):
    return x[0]


@k.kernel
def uses_result(out: k.Output, x: k.Input):
    out[0] = with_result(x)


def test_results_are_those_of_numpy_and_of_plain_python() -> None:
    rng = np.random.default_rng(3)
    for shape in ((1, 1), (7, 19), (3, 64)):
        x = rng.integers(-9, 9, shape).astype(np.float32)
        for kernel, extra in ((sums, ()), (shifted_sums, (np.float32(0.5),))):
            out, plain = np.zeros(shape[0], np.float32), np.zeros(shape[0], np.float32)
            compiled(kernel, [out, x, *extra], num_workers=2)
            interpreted(kernel, [plain, x, *extra], num_workers=2)
            expected = x.sum(1) + (extra[0] if extra else 0)
            assert np.array_equal(out, expected) and np.array_equal(plain, expected)


def test_variables_of_the_caller_are_written() -> None:
    x = np.random.default_rng(4).permutation(33).astype(np.float32)
    out, plain = np.zeros(2, np.float32), np.zeros(2, np.float32)
    compiled(find_largest, [out, x])
    interpreted(find_largest, [plain, x])
    assert out.tolist() == plain.tolist() == [32.0, float(x.argmax())]


def modules(kernel: k.Kernel, *args) -> k.Modules:
    target = k.host_target()
    return k.emit_modules(k.specialize(kernel, [spec_of(a) for a in args], None, target), target)


def test_kernels_share_a_function() -> None:
    out, x = np.zeros(2, np.float32), np.zeros((2, 3), np.float32)
    first, second = modules(sums, out, x), modules(shifted_sums, out, x, np.float32(1))
    assert first.functions == second.functions and len(first.functions) == 1
    (name,) = first.functions
    assert f"call void @{name}(" in first.text and f"define void @{name}(" in first.functions[name]
    # another type, another function
    assert name not in modules(sums, np.zeros(2, np.float64), x).functions
    # one module has all
    target = k.host_target()
    text = k.emit_llvm(k.specialize(sums, [spec_of(out), spec_of(x)], None, target), target)
    assert "max_function" not in text


def test_a_body_that_raises_stays_in_its_kernel() -> None:
    x = np.arange(-6, 6)
    out = np.zeros(12, np.int64)
    compiled(shares, [out, x, np.int64(4)])
    assert out.tolist() == (x // 4).tolist()
    assert not modules(shares, out, x, np.int64(4)).functions
    with pytest.raises(ZeroDivisionError, match="integer division by zero"):
        compiled(shares, [out, x, np.int64(0)])


def test_a_result_is_refused() -> None:
    x = np.zeros(1, np.float32)
    with pytest.raises(k.KernelError, match="with_result is outlined and returns"):
        compiled(uses_result, [x, x])


# ***** bodies that are compiled once *****
@k.outlined
def add_quotients(out: k.Output, x: k.Input, divisor) -> None:
    for i in range(x.shape[0]):
        out[i] = out[i] + x[i] // divisor
        if x[i] == 3:
            return


@k.kernel
def quotients(out: k.Output, x: k.Input, divisor: k.i64):  # pyright: ignore
    add_quotients(out, x, divisor)


@k.kernel
def positive_quotients(out: k.Output, x: k.Input, divisor: k.i64):  # pyright: ignore
    if divisor > 0:
        add_quotients(out, x, divisor)
        add_quotients(out, x, divisor)


@k.kernel
def nonzero_quotients(out: k.Output, x: k.Input, divisor: k.i64):  # pyright: ignore
    if divisor != 0:
        add_quotients(out, x, divisor)


@k.kernel
def quotients_by_sizes(out: k.Output, x: k.Input, divisor: k.i64):  # pyright: ignore
    for i in range(x.shape[0]):
        add_quotients(out[i:], x[i:], x.shape[0])
    add_quotients(out, x, 7)


@k.outlined
def fill(to, first, value) -> None:
    for i in range(first, to.shape[0]):
        to[i] = value


@k.kernel
def fill_result(out: k.Output, x: k.Input):
    fill(out, 1, x[0])


@k.kernel
def fill_operand(out: k.Output, x: k.Input):
    fill(x, 1, out[0])


@k.kernel
def sums_of_halves(out: k.Output, x: k.Input):
    half = x.shape[0] // 2
    add_runs(out, x, 0, half, 8)
    add_runs(out[half:], x[half:], k.i64(0), x.shape[0] - half, 8)


X = np.zeros((2, 3), np.float32)
NUMBERS = np.arange(-6, 6)
CALLS = {
    "sums": (sums, [np.zeros(2, np.float32), X]),
    "shifted": (shifted_sums, [np.zeros(2, np.float32), X, np.float32(1)]),
    "f64": (sums, [np.zeros(2, np.float64), X]),
    "halves": (sums_of_halves, [np.zeros(2, np.float32), X]),
    "tile": (find_largest, [np.zeros(2, np.float32), np.zeros(3, np.float32)]),
    "raises": (quotients, [np.zeros(12, np.int64), NUMBERS, np.int64(4)]),
    "positive": (positive_quotients, [np.zeros(12, np.int64), NUMBERS, np.int64(4)]),
    "nonzero": (nonzero_quotients, [np.zeros(12, np.int64), NUMBERS, np.int64(4)]),
    "sizes": (quotients_by_sizes, [np.zeros(12, np.int64), NUMBERS, np.int64(4)]),
}


def printed(kernel: k.Kernel, args) -> tuple[str, k.Modules]:
    target = k.host_target()
    ir = k.specialize(kernel, [spec_of(a) for a in args], None, target)
    return ir.text, k.emit_modules(ir, target)


def test_bodies_that_are_used_again_are_the_same_code(bodies, monkeypatch) -> None:
    """Each kernel, after all others and twice, as when every body is compiled at its call."""
    with monkeypatch.context() as alone:
        alone.setattr(outlining, "_is_fixed", lambda function: False)
        expected = {name: printed(*call) for name, call in CALLS.items()}
    bodies.clear()
    assert {name: printed(*call) for name, call in CALLS.items()} == expected
    assert bodies.count("add_runs") == 4, "two dtypes, and halves from 0 and from a number"
    bodies.clear()
    for name, call in reversed(CALLS.items()):
        assert printed(*call) == expected[name]
    # a tile is memory of the caller, and a body that raises has a message of its kernel
    assert bodies == ["add_quotients", "largest"]
    out = np.zeros(12, np.int64)
    compiled(positive_quotients, [out, NUMBERS, np.int64(4)])
    expected_sums = np.where(np.arange(12) <= 9, NUMBERS // 4 * 2, 0)
    assert out.tolist() == expected_sums.tolist()


def test_a_body_that_writes_is_not_used_for_a_read_only_view(bodies) -> None:
    x = np.zeros(3, np.float32)
    printed(fill_result, [x, x])
    with pytest.raises(k.KernelError, match="read-only|Input"):
        printed(fill_operand, [x, x])
    printed(fill_result, [x, x])
    assert bodies == ["fill", "fill"]


def test_bodies_of_functions_whose_names_may_change_are_compiled_each_time(monkeypatch) -> None:
    compiled_bodies = []
    inline = inlining._inline_body

    def counted(fe, node, frame):
        compiled_bodies.append(node.name)
        return inline(fe, node, frame)

    monkeypatch.setattr(inlining, "_inline_body", counted)
    for _ in range(2):
        printed(*CALLS["sums"])
    assert compiled_bodies == ["add_runs", "add_runs"]


@k.outlined
def fill_block(to: k.Output, value) -> None:
    for i in range(to.shape[0]):
        for j, mask in k.vectors(to.shape[1], 4):
            to.store(i, j, value=k.splat(k.f32(value), 4), mask=mask)


@k.kernel
def fill_blocks_of_any_size(out: k.Output):
    fill_block(k.run_time(out[:2, :3]), k.run_time(4))
    fill_block(k.run_time(out[2:, 1:9]), k.run_time(7))
    fill_block(k.run_time(out[3:4]), k.run_time(k.i64(out.shape[1])))


@k.kernel
def fill_one_of_any_size(out: k.Output):
    fill_block(k.run_time(out[1:, :5]), k.run_time(3))


@k.kernel
def fill_blocks(out: k.Output):
    fill_block(out[:2, :3], 4)
    fill_block(out[2:, 1:9], 7)


def test_arguments_known_at_run_time_only_share_a_function() -> None:
    spec = k.TensorSpec(k.f32, (7, 11))

    def functions(kernel: k.Kernel, spec: k.TensorSpec) -> set[str]:
        ir = k.specialize(kernel, args=[spec], target=k.host_target())
        return set(k.emit_modules(ir, k.host_target()).functions)

    assert len(functions(fill_blocks, spec)) == 2
    shared = functions(fill_blocks_of_any_size, spec)
    assert len(shared) == 1
    # by other kernels and for other sizes too
    assert functions(fill_one_of_any_size, spec) == shared
    assert functions(fill_one_of_any_size, k.TensorSpec(k.f32, (9, 64))) == shared
    want = np.full((7, 11), -1, np.float32)
    want[:2, :3], want[2:, 1:9], want[3] = 4, 7, 11
    for run in (compiled, interpreted):
        out = np.full((7, 11), -1, np.float32)
        run(fill_blocks_of_any_size, [out])
        np.testing.assert_array_equal(out, want)


def test_only_integers_and_views_are_known_at_run_time_only() -> None:
    def wrong(out: k.Output):
        out[0] = k.run_time(1.5)

    with pytest.raises(k.KernelError, match=r"integer"):
        k.specialize(k.kernel(wrong), args=[k.TensorSpec(k.f32, (1,))], target=k.host_target())
