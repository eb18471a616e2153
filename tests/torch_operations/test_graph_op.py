"""Graphs as operations of torch: eager, within `torch.compile`, and in autograd functions."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import Function  # noqa: E402

import max.torch  # noqa: E402
from max.dtype import DType  # noqa: E402
from max.graph import DeviceRef, TensorType, ops  # noqa: E402
from max.torch import graph_op  # noqa: E402
from max.torch._operation import _running  # noqa: E402

CPU = DeviceRef.CPU()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(4)
    yield


@max.torch.graph_op
def max_matmul(A, B):
    return ops.matmul(A, B)


@graph_op
def max_layer_norm(x, weight, bias):
    return ops.layer_norm(x, weight, bias, epsilon=1e-5)


@pytest.mark.parametrize("shape", [(1, 3, 2), (5, 7, 4), (17, 33, 9)])
def test_a_graph_writes_its_result_into_the_first_argument(shape) -> None:
    m, k, n = shape
    a, b = torch.randn(m, k), torch.randn(k, n)
    out = torch.full((m, n), torch.nan)
    assert max_matmul(out, a, b) is None
    torch.testing.assert_close(out, a @ b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_dtypes(dtype) -> None:
    @graph_op
    def doubled(x):
        return x + x

    x = torch.randn(9).mul(10).to(dtype)
    out = torch.empty_like(x)
    doubled(out, x)
    torch.testing.assert_close(out, x + x)


def test_non_contiguous_arguments_and_results() -> None:
    a, b = torch.randn(6, 4).t(), torch.randn(5, 6).t()
    out = torch.empty(5, 4).t()
    max_matmul(out, a, b)
    torch.testing.assert_close(out, a @ b)


def test_a_result_may_lie_where_an_argument_does() -> None:
    @graph_op
    def turned(x):
        return ops.transpose(x, 0, 1) * 2

    x = torch.randn(5, 5)
    want = x.t() * 2
    turned(x, x)
    torch.testing.assert_close(x, want)


def test_several_results_and_a_scalar() -> None:
    @graph_op(num_outputs=2, name="moments")
    def moments(x):
        mean = ops.squeeze(ops.mean(x, axis=0), 0)
        return mean, ops.mean(x * x, axis=0)

    x = torch.randn(8)
    mean, square = torch.empty(()), torch.empty(1)
    moments(mean, square, x)
    torch.testing.assert_close(mean, x.mean())
    torch.testing.assert_close(square, (x * x).mean()[None])


def test_symbolic_sizes_compile_one_graph() -> None:
    calls = []
    rows = TensorType(DType.float32, ["n", 4], CPU)

    @graph_op(input_types=[rows], output_types=[TensorType(DType.float32, ["n", 1], CPU)])
    def summed(x):
        calls.append(x.shape)
        return ops.sum(x, axis=1)

    for n in (1, 3, 50):
        x, out = torch.randn(n, 4), torch.empty(n, 1)
        summed(out, x)
        torch.testing.assert_close(out, x.sum(1, keepdim=True))
    assert len(calls) == 1


def test_each_form_is_compiled_once() -> None:
    calls = []

    @graph_op
    def shifted(x):
        calls.append(tuple(x.shape))
        return x + 1

    for n in (2, 3, 2, 3, 2):
        out = torch.empty(n)
        shifted(out, torch.zeros(n))
        assert out.tolist() == [1] * n
    assert len(calls) == 2


def test_within_torch_compile() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(6))
            self.bias = torch.nn.Parameter(torch.randn(6))

        def forward(self, x):
            out = torch.empty_like(x)
            max_layer_norm(out, x * 2, self.weight.detach(), self.bias.detach())
            return torch.relu(out)

    net, x = Net(), torch.randn(3, 6)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    want = torch.relu(torch.nn.functional.layer_norm(x * 2, (6,), net.weight, net.bias))
    torch.testing.assert_close(compiled(x), want.detach(), rtol=1e-4, atol=1e-5)


def test_in_an_autograd_function_that_defines_its_operation_each_time() -> None:
    class Matmul(Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            out = torch.empty(a.shape[0], b.shape[1])

            @max.torch.graph_op
            def _product(a, b):
                return ops.matmul(a, b)

            _product(out, a.detach(), b.detach())
            return out

        @staticmethod
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return grad @ b.t(), a.t() @ grad

    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    for _ in range(3):
        Matmul.apply(a, b).sum().backward()
        gc.collect()
    torch.testing.assert_close(a.grad, 3 * (torch.ones(3, 2) @ b.detach().t()))
    assert not [run for run in _running.values() if run.name == "_product"]


def test_operations_of_one_name_do_not_disturb_each_other() -> None:
    def scaled(by: float):
        @graph_op
        def custom(x):
            return x * by

        return custom

    two, three = scaled(2.0), scaled(3.0)
    x, out = torch.ones(2), torch.empty(2)
    two(out, x)
    assert out.tolist() == [2, 2]
    three(out, x)
    assert out.tolist() == [3, 3]
    two(out, x)
    assert out.tolist() == [2, 2]


def test_lambdas_and_arguments_named_as_results() -> None:
    out, x = torch.empty(2), torch.tensor([1.0, 2.0])
    graph_op(lambda output: -output)(out, x)
    assert out.tolist() == [-1, -2]


@pytest.mark.parametrize(
    ("out", "x", "said"),
    [
        (torch.empty(3), torch.zeros(2), r"result 0 is torch.float32 \[2\].*\[3\]"),
        (torch.empty(2, dtype=torch.int32), torch.zeros(2), r"torch.float32.*torch.int32"),
        (torch.empty(1), torch.zeros(2), r"\[2\].*\[1\]"),
    ],
)
def test_results_that_do_not_fit(out, x, said) -> None:
    operation = graph_op(lambda x: x + 1)
    with pytest.raises(ValueError, match=said):
        operation(out, x)


def test_counts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="2 results, and 1 are expected"):
        graph_op(lambda x: (x, x + 1), name="pair")(torch.empty(2), torch.zeros(2))
    types = [TensorType(DType.float32, [2], CPU)]
    with pytest.raises(ValueError, match="num_outputs is 2"):
        graph_op(lambda x: x, output_types=types, num_outputs=2)
    with pytest.raises(TypeError, match="takes 2 arguments, and 1"):
        graph_op(lambda x, y: x, input_types=types)
    with pytest.raises(TypeError, match="no positional argument"):
        graph_op(lambda *xs: xs[0])
    with pytest.raises(ValueError, match="the function returns"):
        graph_op(lambda x: x.cast(DType.int32), input_types=types, output_types=types)(
            torch.empty(2), torch.zeros(2)
        )


def test_conversions() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        assert max.torch.max_dtype_to_torch(max.torch.torch_dtype_to_max(dtype)) == dtype
    assert max.torch.max_device_ref(torch.device("cpu")) == CPU
    with pytest.raises(ValueError, match="graphs run on the CPU"):
        max.torch.max_device_ref(torch.device("cuda"))
    from max.torch.torch import max_device_ref

    assert max_device_ref is max.torch.max_device_ref
