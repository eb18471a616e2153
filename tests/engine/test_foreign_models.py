"""Files of other model formats raise another error than damaged graph files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("graph.pb", "a graph of TensorFlow 1"),
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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x: [x, x], r"one list of 2: give its items one by one, execute\(\*inputs\)"),
        (lambda x: (x, x, x), "one tuple of 3"),
        (lambda x: {"x": x, "y": x}, "a dictionary: give its values one by one"),
        (lambda x: x, "got 1$"),
    ],
)
def test_inputs_that_come_as_one(wrong, said: str) -> None:
    kind = TensorType(DType.float32, [2], DeviceRef.CPU())
    graph = Graph("add", lambda x, y: x + y, input_types=[kind, kind])
    model = InferenceSession().load(graph)
    with pytest.raises(TypeError, match=f"add takes 2 inputs .*{said}"):
        model.execute(wrong(np.ones(2, np.float32)))
