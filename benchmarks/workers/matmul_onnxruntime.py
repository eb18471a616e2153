"""Products with int8 weights in ONNX Runtime: `MatMulInteger` of uint8 rows, and of float32 rows `DynamicQuantizeMatMul`.

Runs in its own environment (see `benchmarks.peers`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from benchmarks.runner import serve
from benchmarks.timing import median_time

_made: dict[tuple[int, ...], Any] = {}
DOMAIN = "com.microsoft"


def setup() -> dict[str, object]:
    return {}


def _session(m: int, n: int, k: int, scaled: bool, copies: int) -> onnxruntime.InferenceSession:
    """A graph of the given number of products; one element of each is an output."""
    rng = np.random.default_rng(0)
    # the second operand is [K, N]
    weight = np.ascontiguousarray(rng.integers(-127, 128, (n, k)).astype(np.int8).T)
    kind = TensorProto.FLOAT if scaled else TensorProto.UINT8
    result = TensorProto.FLOAT if scaled else TensorProto.INT32
    constants = [
        numpy_helper.from_array(np.array(values, np.int64), name)
        for name, values in (("start", [0, 0]), ("stop", [1, 1]))
    ]
    if scaled:
        constants.append(numpy_helper.from_array(np.full(n, 0.01, np.float32), "scales"))
    nodes: list[Any] = []
    for i in range(copies):
        # no two weights are equal, which might make them one
        weight[0, 0], weight[1, 0] = i % 256 - 128, i // 256 % 256 - 128
        constants.append(numpy_helper.from_array(weight, f"w{i}"))
        if scaled:
            operands: Sequence[str] = ("x", f"w{i}", "scales")
            node = helper.make_node("DynamicQuantizeMatMul", operands, [f"p{i}"], domain=DOMAIN)
        else:
            node = helper.make_node("MatMulInteger", ("x", f"w{i}"), [f"p{i}"])
        nodes += [node, helper.make_node("Slice", (f"p{i}", "start", "stop"), [f"y{i}"])]
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", kind, (m, k))],
        [helper.make_tensor_value_info(f"y{i}", result, (1, 1)) for i in range(copies)],
        constants,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, ["CPUExecutionProvider"]
    )


def run(
    m: int, n: int, k: int, dtype: str, copies: int, seconds: float, epilogue: bool = False
) -> dict[str, float]:
    """Seconds for a product, of uint8 rows or of float32 ones that are rounded and scaled."""
    if epilogue:
        raise NotImplementedError("no epilogue")
    scaled = dtype == "int8, scaled"
    key = (m, n, k, scaled, copies)
    if key not in _made:
        _made.clear()
        _made[key] = _session(m, n, k, scaled, copies)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, k), np.float32)
    if not scaled:
        # its fast kernels take unsigned rows
        x = rng.integers(0, 256, (m, k)).astype(np.uint8)
    return {"seconds": median_time(lambda: _made[key].run(None, {"x": x}), seconds, 3) / copies}


if __name__ == "__main__":
    serve({"setup": setup, "run": run})
