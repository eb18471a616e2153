"""What people see in a notebook: tables of tensors, graphs that open, short tracebacks, names that need no import."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from max import driver
from max._html import array_html
from max.dtype import DType
from max.engine import InferenceSession
from max.experimental import Tensor
from max.experimental import functional as F
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops
from max.nn import module_v3

ROOT = Path(__file__).parents[1]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}


def cells(text: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", text)
    return [[html.unescape(c) for c in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows]


def test_tensors_are_tables() -> None:
    numbers = np.random.default_rng(4)
    values = numbers.standard_normal((3, 4)).astype(np.float32)
    for tensor in (Tensor.constant(values, dtype=DType.float32), driver.Tensor.from_numpy(values)):
        text = tensor._repr_html_()
        assert cells(text) == [[f"{v.item():.5g}" for v in row] for row in values]
        assert "[3, 4] float32" in text
        np.testing.assert_array_equal(tensor.numpy(), values)
    recorded = F.relu(Tensor.constant(values, dtype=DType.float32))
    assert cells(recorded._repr_html_())[0] == [f"{max(v.item(), 0):.5g}" for v in values[0]]


@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (11,), (0, 3), (3, 0), (12, 25), (2, 3, 4), (0, 2, 2), (2, 0, 2, 2)]
)
def test_tables_of_all_shapes_are_small(shape: tuple[int, ...]) -> None:
    text = array_html(np.ones(shape, np.int8), "<x>")
    assert "&lt;x&gt;" in text and text.count("<td") <= 121
    assert len(cells(text)) <= 11 and text.count("<div>") == text.count("</div>") == 1


def test_graphs_models_and_types() -> None:
    kind = TensorType(DType.float32, ("rows", 4), DeviceRef.CPU())
    with Graph("shown", input_types=[kind]) as graph:
        graph.output(ops.softmax(graph.inputs[0].tensor))
    text = graph._repr_html_()
    assert text.startswith("<details>") and html.escape(str(graph)) in text
    assert kind._repr_html_() == "<pre>TensorType float32[rows, 4] on cpu:0</pre>"
    assert "BufferType" in BufferType(DType.int8, (1,), DeviceRef.CPU())._repr_html_()
    model = InferenceSession(devices=[driver.CPU()]).load(graph)
    assert "1 launch<" in model._repr_html_() and "float32" in model._repr_html_()
    layer = module_v3.Linear(2, 3)
    assert html.escape(repr(layer)) in layer._repr_html_()


def test_a_value_of_a_graph_has_no_table() -> None:
    with Graph("inner", input_types=[TensorType(DType.float32, (2,), DeviceRef.CPU())]) as graph:
        tensor = Tensor.from_graph_value(graph.inputs[0].tensor)
        assert "in a graph" in tensor._repr_html_() and "in a graph" in repr(tensor)
        graph.output(graph.inputs[0].tensor)


def test_packages_are_attributes_of_max() -> None:
    code = "import max; print(max.graph.Graph.__name__, max.nn.Linear.__name__, max.driver.CPU.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "Graph Linear CPU\n", done.stderr


SHELL = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="nocolor")
{before}
shell.run_cell("import max.graph")
shell.run_cell('''
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops
def mistake():
    with Graph("g", input_types=[TensorType(DType.float32, (2, 3), DeviceRef.CPU())]) as g:
        return ops.matmul(g.inputs[0].tensor, g.inputs[0].tensor)
mistake()
''')
shell.run_cell("1 / 0")
"""


@pytest.mark.parametrize("style", ["short", "full", "own"])
def test_tracebacks_in_ipython(style: str) -> None:
    pytest.importorskip("IPython")
    own = "shell.set_custom_exc((ValueError,), lambda *rest, **more: print('mine'))"
    done = subprocess.run(
        [sys.executable, "-c", SHELL.format(before=own if style == "own" else "")],
        env={**ENV, "MAX_TRACEBACK": "full" if style == "full" else "short", "HOME": "/nonexistent"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said = done.stdout
    assert "ZeroDivisionError: division by zero" in said, done.stderr
    inner = str(ROOT / "src" / "max")
    if style == "own":
        assert "mine" in said
        return
    assert "Error: matmul: f32[2, 3] @ f32[2, 3]" in said and "mistake()" in said
    assert (inner in said or "/max/" in said) is (style == "full")
