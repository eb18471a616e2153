"""`max run model.onnx`, `max import`, `max compare`, and `max explain` of an ONNX file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from max.engine import InferenceSession
from max.entrypoints.cli.imported import relative_error
from tests.cli.harness import CommandLine

onnx = pytest.importorskip("onnx")

TEXT = """
<ir_version: 8, opset_import: ["" : 18]>
m (float[batch, 3] x, int64[1] axes) => (float[batch, 3] y, float[] total) {
  y = Exp (x)
  total = ReduceSum <keepdims = 0> (y, axes)
}
"""
PLAIN = TEXT.replace(", int64[1] axes", "").replace(
    "total = ", "axes = Constant <value = int64[1] {0}> ()\n  total = "
)


@pytest.fixture
def max_(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path / "models", capfd)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "axes.onnx", tmp_path / "plain.onnx"
    for path, text in zip(paths, (TEXT, PLAIN), strict=True):
        path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    return paths


def test_a_file_runs_and_its_outputs_are_saved(
    max_: CommandLine, files: tuple[Path, Path], tmp_path: Path
) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "axes.npy", np.array([1]))
    inputs = [f"--input=x={tmp_path / 'x.npy'}", f"--input=axes={tmp_path / 'axes.npy'}"]
    said = max_.done("run", files[0], *inputs, "--save", tmp_path / "out", "--repeat", "2")
    assert "tensor(float)  [batch, 3]" in said and "runs/s" in said
    np.testing.assert_allclose(np.load(tmp_path / "out" / "y.npy"), np.exp(x), rtol=1e-6)
    np.testing.assert_allclose(np.load(tmp_path / "out" / "total.npy"), np.exp(x).sum(1), rtol=1e-5)
    assert "[4, 3]" in max_.done("run", files[1], "--size", "batch=4")


def test_a_file_becomes_a_graph(
    max_: CommandLine, files: tuple[Path, Path], tmp_path: Path
) -> None:
    target = tmp_path / "graph.mo"
    assert str(target) in max_.done("import", files[1], "-o", target)
    x = np.ones((2, 3), np.float32)
    y, _ = InferenceSession().load(target).execute(x)
    np.testing.assert_allclose(y.to_numpy(), np.exp(x), rtol=1e-6)
    assert max_("import", files[0], "-o", target).code != 0
    assert "kernel" in max_.done("explain", files[1])


def test_a_file_is_compared(max_: CommandLine, files: tuple[Path, Path]) -> None:
    said = max_.done(
        "compare", files[1], "--with", "reference", "--repeat", "2", "--size", "batch=3"
    )
    assert "largest error" in said and "reference" in said and "differs" not in said
    said = max_(
        "compare", files[1], "--with", "reference", "--tolerance", "-1", "--size", "batch=3"
    )
    assert said.code != 0 and "first in 'y', of Exp" in said.err


@pytest.mark.parametrize(
    "words",
    [
        ["run", "missing.onnx"],
        ["run", "plain.onnx", "--input", "z=x.npy"],
        ["run", "plain.onnx", "--input", "x"],
        ["run", "plain.onnx", "--input", "x=missing.npy"],
        ["run", "plain.onnx", "--size", "batch=many"],
        ["run", "plain.onnx", "--input", "x=wrong.npy"],
        ["import", "missing.onnx", "-o", "x.mo"],
    ],
)
def test_mistakes_are_told(
    max_: CommandLine, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(files[0].parent)
    np.save("wrong.npy", np.ones(7, np.float32))
    said = max_(*words)
    assert said.code != 0 and "Traceback" not in said.err and len(said.err) > 20


def test_errors_are_relative() -> None:
    x = np.array([1.0, np.nan, np.inf])
    assert relative_error(x, x) == 0
    assert relative_error(x, x[:2]) == relative_error(x, np.array([1.0, 1.0, np.inf])) == np.inf
    assert relative_error(np.array([1.0, 10.0]), np.array([2.0, 10.0])) == pytest.approx(0.1)
    assert relative_error([x], [x]) == 0 and relative_error([x], [x, x]) == np.inf
