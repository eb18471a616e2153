"""Libraries of custom ops: the forms in which they are passed, and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from max.dtype import DType
from max.engine import InferenceSession
from max.graph import (
    DeviceRef,
    Graph,
    KernelLibrary,
    TensorType,
    default_custom_extensions,
    default_custom_extensions_scope,
    ops,
)

KERNEL = """
from max import kernel as k

@k.register("library_twice")
def twice(out: k.Output[k.f32, 1], x: k.Input[k.f32, 1], ctx: k.Context):
    for i in ctx.parallel(x.shape[0]):
        out[i] = x[i] * 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ops.py").write_text(KERNEL)
    return tmp_path


def test_paths_come_with_and_without_a_context(folder: Path) -> None:
    for library in (
        KernelLibrary(None, [folder]),
        KernelLibrary([folder]),
        KernelLibrary(paths=[folder]),
        KernelLibrary(object(), [folder]),
    ):
        assert library.symbols() == ["library_twice"]
        assert library.library_paths() == [folder]
    late = KernelLibrary()
    late.load_paths([folder])
    late.load_paths(None, [folder])
    assert late.library_paths() == [folder]
    assert KernelLibrary(object(), []).symbols() == []
    assert list(late) == ["library_twice"] and "library_twice" in late and "other" not in late
    assert late["library_twice"] == folder / "ops.py"
    with pytest.raises(KeyError, match="other"):
        _ = late["other"]


@pytest.mark.parametrize("wrong", ["ops.py", 3, Path("ops.py")])
def test_a_single_path_is_no_list(wrong: object) -> None:
    with pytest.raises(TypeError, match="expected a list of files and folders"):
        KernelLibrary().load_paths(wrong)


def test_kernels_in_mojo_are_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "grayscale.mojo").write_text("fn main(): pass")
    types = [TensorType(DType.float32, [4], DeviceRef.CPU())]
    for path in (tmp_path, tmp_path / "deep" / "grayscale.mojo"):
        with pytest.raises(ValueError, match=r"grayscale\.mojo is a kernel in Mojo.*max\.kernel"):
            Graph("gray", input_types=types, custom_extensions=[path])
    # together with kernels of ours it has no effect
    (tmp_path / "ops.py").write_text(KERNEL)
    assert KernelLibrary([tmp_path]).symbols() == ["library_twice"]


def test_a_path_that_is_not_there_is_an_error_of_both_kinds(tmp_path: Path) -> None:
    for kind in (FileNotFoundError, ValueError):
        with pytest.raises(kind, match="does not exist"):
            KernelLibrary([tmp_path / "none"])


def test_new_graphs_have_default_libraries(folder: Path) -> None:
    types = [TensorType(DType.float32, (3,), DeviceRef.CPU())]
    assert default_custom_extensions() == ()
    with default_custom_extensions_scope(folder):
        assert default_custom_extensions() == (folder,)
        with default_custom_extensions_scope(folder / "ops.py"):
            assert default_custom_extensions() == (folder, folder / "ops.py")
        graph = Graph("twice", input_types=types)
        with graph:
            x = graph.inputs[0].tensor
            graph.output(*ops.custom("library_twice", x.device, [x], [x.type]))
    assert default_custom_extensions() == () and graph.kernel_libraries_paths == [folder]
    assert Graph("none", input_types=types).kernel_libraries_paths == []
    model = InferenceSession().load(graph)
    x = np.array([1, 2, 3], np.float32)
    np.testing.assert_array_equal(model(x)[0].to_numpy(), x * 2)
    with pytest.raises(FileNotFoundError), default_custom_extensions_scope(folder / "nothing"):
        pass
    assert default_custom_extensions() == ()
