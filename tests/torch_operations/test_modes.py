"""Operations under torch.export, fake tensors, dynamic shapes, threads and autograd; what a call costs."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._inductor import config as inductor_config  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from max.dtype import DType  # noqa: E402
from max.graph import DeviceRef, TensorType, ops  # noqa: E402
from max.torch import graph_op  # noqa: E402
from tests.guarded import guarded  # noqa: E402

VECTOR = TensorType(DType.float32, ["n"], DeviceRef.CPU())


@graph_op(input_types=[VECTOR, VECTOR])
def weighted(x, y):
    return ops.tanh(x) * y


@graph_op
def doubled_first_four(x):
    return x[:4] * 2


def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    weighted(out, x, y)
    return out


class Module(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return call(x, y) + 1


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_dynamic_size(strict: bool) -> None:
    size = torch.export.Dim("size", min=2, max=100)
    example = (torch.rand(5), torch.rand(5))
    program = torch.export.export(
        Module(), example, dynamic_shapes=({0: size}, {0: size}), strict=strict
    )
    assert any("max.weighted" in str(node.target) for node in program.graph.nodes)
    for n in (3, 17):
        x, y = torch.rand(n), torch.rand(n)
        torch.testing.assert_close(program.module()(x, y), torch.tanh(x) * y + 1)


def test_compile_whole_with_a_dynamic_size() -> None:
    compiled = torch.compile(Module(), backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (3, 8, 17):
        x, y = torch.rand(n), torch.rand(n)
        torch.testing.assert_close(compiled(x, y), torch.tanh(x) * y + 1)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_by_inductor(dynamic: bool) -> None:
    """The operation stands among fused kernels; each result is written before the next kernel reads it."""

    def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = call(x + 1, y * 2)
        second = call(first.t().contiguous().t() - y, x)
        return torch.relu(first) + second.sum()

    rows = torch.compile(twice, backend="inductor", fullgraph=True, dynamic=dynamic)
    # g++ takes two seconds for each kernel, of which another fixed size has three more, and ten to probe vector units
    for n in (3, 8, 17) if dynamic else (17,):
        x, y = torch.rand(n), torch.rand(n)
        first = torch.tanh(x + 1) * (y * 2)
        want = torch.relu(first) + (torch.tanh(first - y) * x).sum()
        with inductor_config.patch({"cpp.vec_isa_ok": False, "compile_threads": 1}):
            torch.testing.assert_close(rows(x, y), want)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dynamic_sizes_are_traced_once(backend: str) -> None:
    traced = CompileCounterWithBackend(backend)
    compiled = torch.compile(Module(), backend=traced, fullgraph=True, dynamic=True)
    for n in (3, 8, 17, 40, 5):
        x, y = torch.rand(n), torch.rand(n)
        torch.testing.assert_close(compiled(x, y), torch.tanh(x) * y + 1)
    assert traced.frame_count == 1


def test_compile_with_an_operation_of_given_shapes() -> None:
    """Without input_types each shape has a graph, which is made where the sizes are known: at the run."""
    shapes: list[Any] = []

    @graph_op
    def summed(x):
        shapes.append(list(x.shape))
        return ops.sum(x, axis=1)

    def rows(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], 1)
        summed(out, x * 2)
        return out

    compiled = torch.compile(rows, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (3, 5, 3):
        x = torch.rand(n, 4)
        torch.testing.assert_close(compiled(x), (x * 2).sum(1, keepdim=True))
    assert shapes == [[3, 4], [5, 4]]


def in_threads(work: Any, count: int = 4) -> list[BaseException]:
    """Runs ``work(0)`` to ``work(count - 1)`` at once; returns what was raised."""
    errors: list[BaseException] = []

    def caught(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caught, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_compiled_and_exported_programs_in_threads() -> None:
    size = torch.export.Dim("size", min=2, max=100)
    example = (torch.rand(5), torch.rand(5))
    exported = torch.export.export(Module(), example, dynamic_shapes=({0: size}, {0: size}))
    programs = [
        torch.compile(Module(), backend="aot_eager", fullgraph=True, dynamic=True),
        exported.module(),
    ]

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for n in range(2, 25):
            x, y = torch.rand(n, generator=generator), torch.rand(n, generator=generator)
            torch.testing.assert_close(programs[seed % 2](x, y), torch.tanh(x) * y + 1)

    assert in_threads(work) == []


SAVED = """
import sys, torch
from max.dtype import DType
from max.graph import DeviceRef, TensorType, ops
from max.torch import graph_op

vector = TensorType(DType.float32, ["n"], DeviceRef.CPU())

def made(by):
    @graph_op(input_types=[vector], name="by")
    def scaled(x):
        return x * by
    return scaled

if sys.argv[2] != "none":
    two = made(2.0)
    three = made(3.0)

class Net(torch.nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        three(out, x)
        return out + 1

if sys.argv[2] == "save":
    torch.export.save(torch.export.export(Net(), (torch.ones(3),)), sys.argv[1])
elif sys.argv[2] == "none":
    made(2.0)(torch.empty(3), torch.ones(3))
    try:
        torch.export.load(sys.argv[1]).module()(torch.ones(3))
    except RuntimeError as error:
        print(error)
else:
    print(torch.export.load(sys.argv[1]).module()(torch.ones(3)).tolist())
"""


def test_exported_programs_that_were_saved(tmp_path: Path) -> None:
    """Another process that makes the same operations runs them; one that lacks them says so."""

    def run(what: str) -> str:
        command = [sys.executable, "-c", SAVED, str(tmp_path / "net.pt2"), what]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    run("save")
    assert run("load") == "[4.0, 4.0, 4.0]"
    assert "max::by_oi: graph 1 of the operation is not in this process" in run("none")


def test_fake_tensors_compute_nothing() -> None:
    with FakeTensorMode():
        x = torch.empty(1 << 40)
        assert call(x, x).shape == (1 << 40,)


def test_threads() -> None:
    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for n in range(1, 40):
            x, y = torch.rand(n, generator=generator), torch.rand(n, generator=generator)
            torch.testing.assert_close(call(x, y), torch.tanh(x) * y)

    assert in_threads(work) == []


def test_a_gradient_that_the_user_gives() -> None:
    @graph_op(input_types=[VECTOR, VECTOR])
    def scaled(x, y):
        return ops.tanh(x) * y

    def keep(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        t = torch.tanh(x)
        return gradient * y * (1 - t * t), gradient * t

    scaled.register_autograd(backward, setup_context=keep)
    x = torch.rand(7, requires_grad=True)
    y = torch.nn.Parameter(torch.rand(7))
    out = torch.empty(7)
    scaled(out, x * 2, y)
    (out * out).sum().backward()
    a, b = x.detach().clone().requires_grad_(), y.detach().clone().requires_grad_()
    ((torch.tanh(a * 2) * b) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, a.grad)
    torch.testing.assert_close(y.grad, b.grad)
    with torch.no_grad():
        scaled(plain := torch.empty(7), x, y)
    assert not plain.requires_grad
    scaled.register_autograd(lambda ctx, gradient: gradient)
    scaled(out := torch.empty(7), x, y)
    with pytest.raises(RuntimeError, match="scaled: its backward returned 1 gradients, expected 2"):
        out.sum().backward()


def test_without_a_gradient_only_the_backward_fails() -> None:
    x = torch.rand(4, requires_grad=True)
    out = call(x, torch.ones(4))
    torch.testing.assert_close(out.detach(), torch.tanh(x.detach()))
    with pytest.raises(
        RuntimeError,
        match="weighted: the operation has no gradient; give one with register_autograd",
    ):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operands_are_not_copied(dtype: torch.dtype) -> None:
    """The graph reads the first four elements; the rest of the operand is in a page whose reading ends the process."""
    plain = torch.tensor([0.5, -1.0, 2.0, 8.0]).to(dtype)
    first = guarded(plain.view(torch.uint8).numpy())
    whole = np.lib.stride_tricks.as_strided(first, (1024,), (1,))
    x = torch.from_numpy(whole).view(dtype)
    out = torch.empty(4, dtype=dtype)
    doubled_first_four(out, x)
    torch.testing.assert_close(out, plain * 2, rtol=0, atol=0)


def test_results_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph writes to the memory of the tensor; one that cannot take it so is copied to."""
    copied: list[int] = []
    copy = torch.Tensor.copy_

    def counted(self: torch.Tensor, *args: Any) -> torch.Tensor:
        copied.append(self.numel())
        return copy(self, *args)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    x, y = torch.rand(1600), torch.rand(1600)
    out, version = torch.empty(1600), torch.empty(0)._version
    weighted(out, x, y)
    assert copied == [] and out._version > version
    torch.testing.assert_close(out, torch.tanh(x) * y)
    strided = torch.empty(1600, 2)[:, 0]
    weighted(strided, x, y)
    assert copied == [1600]
    assert torch.equal(strided, out)
    # 4 bytes beyond the alignment of outputs
    odd = torch.empty(1601)[1:]
    weighted(odd, x, y)
    assert copied == [1600, 1600]
    assert torch.equal(odd, out)


def test_results_over_operands() -> None:
    """A result whose memory an operand shares is written after the operand was read."""

    @graph_op(num_outputs=2)
    def reversed_twice(x: Any) -> tuple[Any, Any]:
        return x[::-1] + 1.0, x[::-1] * 2.0

    memory = torch.arange(300, dtype=torch.float32)
    x, first, second = memory[:256], memory[32:288], torch.empty(256)
    expected = x.flip(0) + 1.0, x.flip(0) * 2.0
    reversed_twice(first, second, x)
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])


def test_negated_views() -> None:
    numbers = torch.randn(64, dtype=torch.complex64)
    x = torch.imag(torch.conj(numbers))
    assert x.is_neg()
    y, out = torch.rand(64), torch.imag(torch.conj(torch.zeros(64, dtype=torch.complex64)))
    weighted(out, x, y)
    torch.testing.assert_close(out.resolve_neg(), torch.tanh(x.resolve_neg()) * y)


def test_a_wrong_number_of_tensors() -> None:
    with pytest.raises(
        TypeError, match="weighted: 2 tensors, expected 3: 1 for results, then 2 operands"
    ):
        weighted(torch.empty(3), torch.rand(3))
    # what torch's dispatcher would say of its own
    with FakeTensorMode(), pytest.raises(TypeError, match="2 tensors, expected 3"):
        weighted(torch.empty(3), torch.rand(3))
    with pytest.raises(Exception, match="2 tensors, expected 3"):
        torch.compile(lambda x: weighted(torch.empty(3), x), fullgraph=True, backend="eager")(
            torch.rand(3)
        )


def test_arguments_that_are_no_dense_tensors() -> None:
    x = torch.rand(3)
    with pytest.raises(
        TypeError, match=r"argument 1 is a numpy\.ndarray, expected a torch\.Tensor"
    ):
        weighted(torch.empty(3), np.zeros(3, np.float32), x)
    with torch.no_grad(), pytest.raises(TypeError, match="argument 2 is a float, expected"):
        weighted(torch.empty(3), x, 2.0)
    with pytest.raises(
        TypeError, match=r"argument 2 has the layout torch\.sparse_coo; make it dense with"
    ):
        weighted(torch.empty(3), x, x.to_sparse())


def test_plain_calls_skip_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher costs some 2 µs a call; compilers, fake tensors and transforms need it."""
    calls: list[int] = []
    monkeypatch.setattr(weighted, "_operation", lambda *arguments: calls.append(1))
    call(torch.rand(3), torch.rand(3))
    assert calls == []
    call(torch.rand(3).as_subclass(type("Own", (torch.Tensor,), {})), torch.rand(3))
    assert calls == [1]


@graph_op
def squared(x):
    return x * x


def keep_operands(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


squared.register_autograd(lambda ctx, g: g * 2 * ctx.saved_tensors[0], setup_context=keep_operands)


def square(x: torch.Tensor) -> torch.Tensor:
    squared(out := torch.empty_like(x), x)
    return out


def test_gradients_by_transforms_of_torch_func() -> None:
    x = torch.rand(5)
    torch.testing.assert_close(torch.func.grad(lambda x: square(x).sum())(x), 2 * x)
    torch.testing.assert_close(torch.func.jacrev(square)(x), torch.diag(2 * x))
    with pytest.raises(RuntimeError, match="weighted: the operation has no gradient"):
        torch.func.grad(lambda x: call(x, x).sum())(x)


def test_forward_mode_is_an_error() -> None:
    """The tangent would be lost."""
    x = torch.rand(5)
    message = "squared: the operation has no derivative in forward mode"
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(square, (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match=message):
        square(torch.autograd.forward_ad.make_dual(x, x))
    with torch.autograd.forward_ad.dual_level():
        torch.testing.assert_close(square(x), x * x)


@pytest.mark.parametrize("size", [0, 12], ids=["freed", "shrunk"])
def test_storages_that_are_smaller_than_their_tensors(size: int) -> None:
    """In either place: the graph would read or write what is not the tensor's."""
    for place in (0, 1):
        tensors = [torch.zeros(4), torch.zeros(4)]
        tensors[place].untyped_storage().resize_(size)
        with pytest.raises(ValueError, match=f"is on a storage of {size} bytes, expected 16"):
            squared(*tensors)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_an_error() -> None:
    nested = torch.nested.nested_tensor([torch.rand(2), torch.rand(3)])
    with pytest.raises(TypeError, match="squared: argument 1 is a nested tensor; make it dense"):
        squared(torch.empty(2, 3), nested)


def test_operations_of_one_name_that_threads_make_at_once() -> None:
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        for turn in range(10):
            barrier.wait(timeout=60)
            times = graph_op(lambda x: x * float(number), name=f"times_{turn}")
            times(out := torch.empty(3), torch.ones(3))
            assert out.tolist() == [number] * 3

    assert in_threads(work) == []


def test_a_copy_of_a_module_calls_the_same_operation() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.operation, self.weight = squared, torch.nn.Parameter(torch.rand(3))

    net = copy.deepcopy(Net())
    assert net.operation is squared
    torch.testing.assert_close(square(net.weight), net.weight**2)
