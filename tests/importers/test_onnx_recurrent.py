"""Recurrent layers: the kernels for whole sequences against torch's layers, and against the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
torch = pytest.importorskip("torch")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from max import _interpreter  # noqa: E402
from max.engine import InferenceSession  # noqa: E402
from max.onnx import from_onnx  # noqa: E402
from tests.cpu_kernels.harness import run  # noqa: E402

ORDERS = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""The place of each gate of ONNX in torch's weights."""


def reordered(kind: str, array: Any) -> Any:
    parts = np.split(array, len(ORDERS[kind]))
    return np.concatenate([parts[i] for i in ORDERS[kind]])


def layer_of(kind: str, inputs: int, hidden: int, directions: int) -> tuple[Any, Any]:
    """A layer of torch, and the model of one node with its weights."""
    layer = getattr(torch.nn, kind)(inputs, hidden, bidirectional=directions == 2)
    names = [f"{d}" for d in ("", "_reverse")[:directions]]

    def stacked(*parts: str) -> Any:
        rows = [
            np.concatenate(
                [reordered(kind, getattr(layer, f"{p}_l0{n}").detach().numpy()) for p in parts]
            )
            for n in names
        ]
        return np.stack(rows)

    constants = {
        "w": stacked("weight_ih"), "r": stacked("weight_hh"), "b": stacked("bias_ih", "bias_hh"),
    }  # fmt: skip
    states = ["h", "c"] if kind == "LSTM" else ["h"]
    attributes: dict[str, Any] = {"hidden_size": hidden}
    if directions == 2:
        attributes["direction"] = "bidirectional"
    if kind == "GRU":
        attributes["linear_before_reset"] = 1
    node = helper.make_node(
        kind, ["x", "w", "r", "b", "ends", *states], ["y", *[f"{s}_last" for s in states]], **attributes
    )  # fmt: skip
    floats = lambda name, shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)  # noqa: E731
    last = [directions, "batch", hidden]
    graph = helper.make_graph(
        [node],
        "layer",
        [
            floats("x", ["length", "batch", inputs]),
            helper.make_tensor_value_info("ends", TensorProto.INT32, ["batch"]),
            *[floats(s, last) for s in states],
        ],
        [
            floats("y", ["length", directions, "batch", hidden]),
            *[floats(f"{s}_last", last) for s in states],
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    return layer, model


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("hidden", [5, 32])
@pytest.mark.parametrize("kind", list(ORDERS))
def test_a_layer_of_torch(
    kind: str, hidden: int, directions: int, rng: np.random.Generator
) -> None:
    torch.manual_seed(0)
    layer, model = layer_of(kind, 7, hidden, directions)
    loaded = InferenceSession().load(from_onnx(model))
    assert any(kind.lower() in name for name in loaded.kernel_summaries)
    for length, batch in ((1, 1), (12, 1), (9, 13)):
        x = rng.standard_normal((length, batch, 7)).astype(np.float32)
        # the kernel orders nothing by length, torch does
        ends = np.sort(rng.integers(1, length + 1, batch).astype(np.int32))[::-1].copy()
        ends[0] = length
        states = [
            rng.standard_normal((directions, batch, hidden)).astype(np.float32)
            for _ in range(2 if kind == "LSTM" else 1)
        ]
        packed = torch.nn.utils.rnn.pack_padded_sequence(torch.from_numpy(x), ends.tolist())
        given = tuple(torch.from_numpy(s) for s in states)
        with torch.no_grad():
            y, last = layer(packed, given if kind == "LSTM" else given[0])
        y, _ = torch.nn.utils.rnn.pad_packed_sequence(y)
        want = [y.numpy().reshape(length, batch, directions, hidden).transpose(0, 2, 1, 3)]
        want += [s.numpy() for s in (last if kind == "LSTM" else (last,))]
        got = [result.to_numpy() for result in loaded.execute(x, ends, *states)]
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=2e-6)


def drawn(op: str, rng: np.random.Generator) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Operands, types of results and attributes of an op, of random sizes."""
    length, batch = int(rng.integers(0, 5)), int(rng.integers(1, 15))
    hidden, gates = int(rng.integers(1, 40)), {"mo.lstm": 4, "mo.gru": 3, "mo.rnn": 1}[op]
    direction = str(rng.choice(["forward", "reverse", "bidirectional"]))
    directions = 2 if direction == "bidirectional" else 1
    blocks = -(-hidden // 16)

    def floats(*shape: int) -> Any:
        return (rng.standard_normal(shape) / 2).astype(np.float32)

    weight = np.zeros((directions, blocks * 16, gates, blocks * 16), np.float32)
    weight[:, :hidden, :, :hidden] = floats(directions, hidden, gates, hidden)
    weight = weight.reshape(directions, blocks * 16, gates, blocks, 16).transpose(0, 3, 1, 2, 4)
    state = (directions, batch, hidden)
    operands = [
        floats(length, batch, directions, gates, hidden), np.ascontiguousarray(weight), floats(*state),
    ]  # fmt: skip
    results = [(np.float32, (length, directions, batch, hidden)), (np.float32, state)]
    names = ["sigmoid", "tanh", "relu"]
    attributes: dict[str, Any] = {
        "direction": direction, "clip": float(rng.choice([0.0, 0.4])), "candidate": str(rng.choice(names)),
    }  # fmt: skip
    if op != "mo.rnn":
        attributes["gate"] = str(rng.choice(names))
    if op == "mo.gru":
        operands.append(floats(directions, hidden))
        attributes["reset_after"] = bool(rng.integers(2))
    if op == "mo.lstm":
        operands += [floats(*state), floats(directions, 3, hidden)]
        results.append((np.float32, state))
        attributes |= {
            "output": str(rng.choice(names)), "coupled": bool(rng.integers(2)), "looks": bool(rng.integers(2)),
        }  # fmt: skip
    # lengths beyond the sequence, and none
    operands.append(rng.integers(-1, length + 2, batch))
    return operands, results, attributes


@pytest.mark.parametrize("machine", ["host", "avx2", "generic"])
@pytest.mark.parametrize("op", ["mo.lstm", "mo.gru", "mo.rnn"])
def test_random_forms(op: str, machine: str, rng: np.random.Generator) -> None:
    for _ in range(3):
        operands, results, attributes = drawn(op, rng)
        workers = int(rng.integers(1, 4))
        got = run(op, operands, results, attributes, machine=machine, workers=workers)
        want = _interpreter.REFERENCES[op](*operands, **attributes)
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
