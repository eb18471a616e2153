"""Custom ops as operations of torch."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from max.graph import KernelLibrary  # noqa: E402
from max.torch import CustomOpLibrary  # noqa: E402

KERNELS = """
from max import kernel as k


@k.register("wild_gray")
def gray(out: k.Output[k.f32, 2], image: k.Input[k.f32, 3], ctx: k.Context):
    for i in ctx.parallel(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = 0.25 * image[i, j, 0] + 0.5 * image[i, j, 1] + 0.25 * image[i, j, 2]


@k.register("wild_scale")
def scale(out: k.Output[k.f32, 1], x: k.Input[k.f32, 1], ctx: k.Context, *, factor: int = 2):
    for i in ctx.parallel(x.shape[0]):
        out[i] = x[i] * k.f32(factor)


@k.register("wild_count")
def count(old: k.Output[k.i64, 1], state: k.InOut[k.i64, 1], by: k.Input[k.i64, 1], ctx: k.Context):
    for i in ctx.parallel(state.shape[0]):
        old[i] = state[i]
        state[i] = state[i] + by[i]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kernels.py").write_text(KERNELS)
    return tmp_path


def test_an_op_of_a_folder(folder: Path) -> None:
    library = CustomOpLibrary(folder)
    image = torch.rand(7, 5, 3)
    out = torch.empty(7, 5)
    library.wild_gray(out, image)
    torch.testing.assert_close(out, image @ torch.tensor([0.25, 0.5, 0.25]))
    assert library.wild_gray is library.wild_gray
    assert {"wild_gray", "wild_scale"} <= set(dir(library))


def test_compile_time_parameters(folder: Path) -> None:
    library = CustomOpLibrary(KernelLibrary(paths=[folder]))
    x, out = torch.arange(4.0), torch.empty(4)
    library.wild_scale(out, x)
    assert out.tolist() == [0, 2, 4, 6]
    tripled = library.wild_scale[{"factor": 3}]
    tripled(out, x)
    assert out.tolist() == [0, 3, 6, 9]
    assert library.wild_scale[{"factor": 3}] is tripled
    library.wild_scale(out, x)
    assert out.tolist() == [0, 2, 4, 6]


def test_within_torch_compile(folder: Path) -> None:
    op = CustomOpLibrary(folder).wild_scale[{"factor": 5}]

    def run(x):
        out = torch.empty_like(x)
        op(out, x + 1)
        return out - 1

    x = torch.randn(6)
    compiled = torch.compile(run, backend="aot_eager")
    torch.testing.assert_close(compiled(x), (x + 1) * 5 - 1)


def test_what_a_kernel_changes_is_changed(folder: Path) -> None:
    op = CustomOpLibrary(folder).wild_count
    state, old = torch.tensor([1, 2]), torch.empty(2, dtype=torch.int64)
    for _ in range(3):
        op(old, state, torch.tensor([10, 1]))
    assert state.tolist() == [31, 5] and old.tolist() == [21, 4]
    with pytest.raises(ValueError, match="not contiguous"):
        op(old, torch.zeros(4, dtype=torch.int64)[::2], torch.tensor([10, 1]))


def test_a_gradient(folder: Path) -> None:
    scale = CustomOpLibrary(folder).wild_scale[{"factor": 3}]
    x = torch.rand(5, requires_grad=True)
    out = torch.empty(5)
    scale.register_autograd(lambda ctx, gradient: gradient * 3)
    scale(out, x)
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((5,), 3.0))


def test_errors(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    library = CustomOpLibrary(folder)
    with pytest.raises(
        AttributeError, match=r"no custom op 'sharpen'; it has: wild_count, wild_gray"
    ):
        _ = library.sharpen
    with pytest.raises(TypeError, match=r"int32|i32"):
        library.wild_scale(torch.empty(2), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        CustomOpLibrary(folder / "none")
    other = tmp_path_factory.mktemp("mojo")
    (other / "grayscale.mojo").write_text("fn main(): pass")
    with pytest.raises(
        ValueError, match=r"grayscale\.mojo is a kernel in Mojo.*max\.kernel\.register"
    ):
        CustomOpLibrary(other)
    with pytest.raises(ValueError, match=r"kernel in Mojo"):
        CustomOpLibrary(other / "grayscale.mojo")


def test_parameters_of_variants(folder: Path) -> None:
    op = CustomOpLibrary(folder).wild_scale
    assert op[{"factor": 3}] is op[{"factor": 3}]
    assert op[{"factor": 1}] is not op[{"factor": True}]
    with pytest.raises(
        TypeError, match=r"wild_scale: the parameters are \{'factor': \[3\]\}, expected"
    ):
        op[{"factor": [3]}]
