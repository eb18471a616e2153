"""Models of other formats are told apart from damaged graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from max.engine import InferenceSession


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("yolo.onnx", "an ONNX model"),
        ("BERT.TorchScript", "a TorchScript model"),
        ("net.pt", "a PyTorch file"),
        ("llama.mef", "a compiled model of MAX"),
    ],
)
def test_formats_that_are_not_read(tmp_path: Path, name: str, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x08\x08ONNX")
    with pytest.raises(
        RuntimeError, match=f"{said}, which is not read here; build a max.graph.Graph"
    ):
        InferenceSession().load(path)
    with pytest.raises(RuntimeError, match="does not exist"):
        InferenceSession().load(str(tmp_path / "none" / name))
