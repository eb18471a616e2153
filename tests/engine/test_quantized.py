"""Products with quantized weights in the interpreter and the engine, and errors of the ops."""

from __future__ import annotations

import numpy as np
import pytest

from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS, decode
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.graph.quantization import QuantizationConfig, QuantizationEncoding
from tests.nn.harness import BACKENDS, FLOATS, run_graph
from tests.quantized import ENCODINGS, assert_product, gptq_weight, random_weight
from tests.tolerance import assert_close

CPU = DeviceRef.CPU()
GPTQ = QuantizationEncoding.GPTQ
ROWS = (1, 2, 5, 16, 67)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_qmatmul(encoding, dtype, backend, rng):
    form = BLOCK_FORMATS[encoding]
    inner = form.elements * int(rng.choice([1, 3, 5]))
    w = random_weight(rng, 37, inner, encoding)
    types = [
        TensorType(FLOATS[dtype], ["m", inner], CPU),
        TensorType(DType.uint8, ["n", w.shape[1]], CPU),
    ]
    with Graph("qmatmul", input_types=types) as graph:
        x, weight = (value.tensor for value in graph.inputs)
        graph.output(ops.qmatmul(QuantizationEncoding(encoding), None, x, weight))
    for rows in ROWS:
        x = rng.standard_normal((rows, inner)).astype(FLOATS[dtype].to_numpy())
        (y,) = run_graph(graph, [x, w], None, backend)
        assert_product(y, x, decode(w, encoding))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_qmatmul_with_a_weight(encoding, dtype, threads, rng):
    """Weights are packed at load: the integer kernels."""
    form = BLOCK_FORMATS[encoding]
    for columns in (1, 16, 37, 70):
        inner = form.elements * int(rng.choice([1, 2, 5, 32]) if form.elements == 32 else 4)
        w = random_weight(rng, columns, inner, encoding)
        weight = Weight("w", DType.float32, (columns, inner), CPU, QuantizationEncoding(encoding))
        types = [TensorType(FLOATS[dtype], ["m", inner], CPU)]
        with Graph("qmatmul", input_types=types) as graph:
            x = graph.inputs[0].tensor
            graph.output(ops.qmatmul(weight.quantization_encoding, None, x, weight))
        model = InferenceSession(num_threads=threads).load(graph, weights_registry={"w": w})
        expected = decode(w, encoding)
        for rows in (*ROWS, 0, 6, 17, 300):
            # rows of all magnitudes, and one of zeros
            x = rng.standard_normal((rows, inner)) * 10.0 ** rng.uniform(-3, 0.5, (rows, 1))
            x[1:2] = 0
            x = x.astype(FLOATS[dtype].to_numpy())
            (y,) = model.execute(x)
            y = y.to_numpy()
            assert y.shape == (rows, columns)
            if rows:
                assert_product(y, x, expected)
            if rows > 16:
                # the result of a row does not depend on the other rows
                (few,) = model.execute(x[:2])
                assert_close(few.to_numpy(), y[:2])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_no_number_stays_in_its_row(encoding, rng):
    inner = BLOCK_FORMATS[encoding].elements
    w = random_weight(rng, 24, inner, encoding)
    weight = Weight("w", DType.float32, (24, inner), CPU, QuantizationEncoding(encoding))
    with Graph("g", input_types=[TensorType(DType.float32, ["m", inner], CPU)]) as graph:
        x = graph.inputs[0].tensor
        graph.output(ops.qmatmul(weight.quantization_encoding, None, x, weight))
    model = InferenceSession().load(graph, weights_registry={"w": w})
    for rows in (3, 20):
        for bad in (np.nan, np.inf, -np.inf):
            x = rng.standard_normal((rows, inner)).astype(np.float32)
            x[1, 5] = bad
            (y,) = model.execute(x)
            finite = np.isfinite(y.to_numpy())
            assert finite[0].all() and finite[2:].all() and not finite[1].any()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_qmatmul_with_a_weight_and_an_epilogue(encoding, rng):
    form = BLOCK_FORMATS[encoding]
    inner = 2 * form.elements
    w, bias = random_weight(rng, 24, inner, encoding), rng.standard_normal(24).astype(np.float32)
    weight = Weight("w", DType.float32, (24, inner), CPU, QuantizationEncoding(encoding))
    with Graph("g", input_types=[TensorType(DType.float32, ["b", "s", inner], CPU)]) as graph:
        x = graph.inputs[0].tensor
        y = ops.qmatmul(weight.quantization_encoding, None, x, weight)
        graph.output(
            ops.relu(y + bias), ops.qmatmul(weight.quantization_encoding, None, x[0, 0], weight)
        )
    x = rng.standard_normal((2, 3, inner)).astype(np.float32)
    expected = decode(w, encoding)
    found, row = run_graph(graph, [x], {"w": w}, "engine")
    (plain, _) = run_graph(graph, [x], {"w": w}, "interpreter")
    assert_close(plain, np.maximum(x @ expected.T + bias, 0), scale=4)
    # rounding to 8 bits may change the sign of a value
    slack = 0.02 * np.abs(x @ expected.T).max()
    np.testing.assert_allclose(found, plain, atol=slack)
    assert row.shape == (24,)
    assert_product(row[None], x[0, :1], expected)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_empty(rows):
    types = [TensorType(DType.float32, ["m", 256], CPU), TensorType(DType.uint8, ["n", 144], CPU)]
    with Graph("g", input_types=types) as graph:
        graph.output(
            ops.qmatmul(QuantizationEncoding.Q4_K, None, *[v.tensor for v in graph.inputs])
        )
    for columns in (0, 2):
        inputs = [np.ones((rows, 256), np.float32), np.zeros((columns, 144), np.uint8)]
        (y,) = run_graph(graph, inputs, None, "engine")
        assert y.shape == (rows, columns) and not y.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("inner", "group"), [(96, 32), (64, -1), (80, 32), (320, 64)])
def test_gptq(inner, group, bits, desc_act, backend, rng):
    tensors, weight = gptq_weight(rng, inner, 48, bits, inner if group == -1 else group, desc_act)
    config = QuantizationConfig("gptq", bits, group, desc_act)
    x = rng.standard_normal((7, inner)).astype(np.float32)
    types = [TensorType(DType.from_numpy(a.dtype), a.shape, CPU) for a in (x, *tensors)]
    with Graph("g", input_types=types) as graph:
        graph.output(ops.qmatmul(GPTQ, config, *[value.tensor for value in graph.inputs]))
    (y,) = run_graph(graph, [x, *tensors], None, backend)
    assert_product(y, x, weight, scale=8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gptq_with_a_group_that_is_not_there(backend, rng):
    tensors, _ = gptq_weight(rng, 64, 16, 4, 32, True)
    tensors[3][5] = 2
    x = np.ones((1, 64), np.float32)
    types = [TensorType(DType.from_numpy(a.dtype), a.shape, CPU) for a in (x, *tensors)]
    config = QuantizationConfig("gptq", 4, 32, True)
    with Graph("g", input_types=types) as graph:
        graph.output(ops.qmatmul(GPTQ, config, *[value.tensor for value in graph.inputs]))
    with pytest.raises(IndexError, match="g_idx has the group 2, there are 2"):
        run_graph(graph, [x, *tensors], None, backend)


Q4_0, Q4_K = QuantizationEncoding.Q4_0, QuantizationEncoding.Q4_K
F, U, I = DType.float32, DType.uint8, DType.int32  # noqa: E741
CONFIG = QuantizationConfig("gptq", 4, 32)
PARTS = [(F, (2, 64)), (I, (8, 16)), (I, (2, 2)), (F, (2, 16))]

MISTAKES = {
    "bytes": (
        lambda x, w: ops.qmatmul(Q4_0, None, x, w), [(F, (2, 32)), (U, (3, 19))], ValueError,
        r"qmatmul: the last dimension of ui8\[3, 19\] is not a multiple of 18 bytes, a block of Q4_0",
    ),
    "inner": (
        lambda x, w: ops.qmatmul(Q4_0, None, x, w), [(F, (2, 64)), (U, (3, 18))], ValueError,
        r"f32\[2, 64\] by the Q4_0 weight ui8\[3, 18\].* is 64, a row of the weight holds 32 elements",
    ),
    "dtype": (
        lambda x, w: ops.qmatmul(Q4_0, None, x, w), [(F, (2, 32)), (DType.int8, (3, 18))], TypeError,
        r"the weight is si8\[3, 18\], expected uint8 blocks",
    ),
    "left": (
        lambda x, w: ops.qmatmul(Q4_0, None, x, w), [(I, (2, 32)), (U, (3, 18))], TypeError,
        r"the left operand is si32\[2, 32\], expected float32, bfloat16 or float16",
    ),
    "rank": (
        lambda x, w: ops.qmatmul(Q4_0, None, x, w), [(F, (2, 32)), (U, (1, 3, 18))], ValueError,
        "expected rank 2: rows of blocks",
    ),
    "rank 0": (
        lambda x, w: ops.qmatmul(Q4_0, None, x, w), [(F, ()), (U, (3, 18))], ValueError,
        "expected rank 1 or more",
    ),
    "count": (
        lambda x, w: ops.qmatmul(Q4_0, None, x, w, w), [(F, (2, 32)), (U, (3, 18))], ValueError,
        "2 operands after the left one, expected 1: the Q4_0 weight",
    ),
    "no encoding": (
        lambda x, w: ops.qmatmul("Q4_0", None, x, w), [(F, (2, 32)), (U, (3, 18))], TypeError,
        "the encoding is 'Q4_0', expected a QuantizationEncoding",
    ),
    "no config": (
        lambda *a: ops.qmatmul(GPTQ, None, *a), PARTS, ValueError,
        "the config of a GPTQ weight is None, expected one with quant_method gptq",
    ),
    "bits": (
        lambda *a: ops.qmatmul(GPTQ, QuantizationConfig("gptq", 3, 32), *a), PARTS, ValueError,
        "bits is 3, expected 2, 4, 8",
    ),
    "parts": (
        lambda *a: ops.qmatmul(GPTQ, QuantizationConfig("gptq", 4, 32, True), *a), PARTS, ValueError,
        "3 operands after the left one, expected 4 for desc_act True: qweight, qzeros, scales, g_idx",
    ),
    "groups": (
        lambda *a: ops.qmatmul(GPTQ, QuantizationConfig("gptq", 4, 16), *a), PARTS, ValueError,
        r"scales is f32\[2, 16\], expected 4 groups of 16 inputs by 16",
    ),
    "inputs": (
        lambda *a: ops.qmatmul(GPTQ, CONFIG, *a), [(F, (2, 32)), *PARTS[1:]], ValueError,
        r"f32\[2, 32\] by qweight si32\[8, 16\] of 4 bits: .* is 32, the weight has 64 inputs",
    ),
    "dequantize dtype": (
        lambda x: ops.dequantize(Q4_K, x), [(DType.int8, (2, 144))], TypeError, "expected uint8 blocks",
    ),
    "dequantize rows": (
        lambda x: ops.dequantize(Q4_K, x), [(U, (2, 100))], ValueError, "not a multiple of 144 bytes",
    ),
    "dequantize rank": (
        lambda x: ops.dequantize(Q4_K, x), [(U, ())], ValueError, "rank 0, expected rows of Q4_K blocks",
    ),
    "dequantize gptq": (
        lambda x: ops.dequantize(GPTQ, x), [(U, (2, 144))], ValueError, "GPTQ is not a block encoding",
    ),
    "quantize gptq": (
        lambda x: ops.quantize(GPTQ, x), [(F, (2, 256))], ValueError, "GPTQ is not a block encoding",
    ),
    "quantize rows": (
        lambda x: ops.quantize(Q4_0, x), [(F, (2, 33))], ValueError, "not a multiple of 32 elements",
    ),
    "quantize dtype": (
        lambda x: ops.quantize(Q4_0, x), [(I, (2, 32))], TypeError, "expected a floating-point type",
    ),
    "quantize weights": (
        lambda x, w: ops.quantize(Q4_0, x, w), [(F, (2, 64)), (F, (32,))], ValueError,
        r"the weights are f32\[32\] for f32\[2, 64\], expected one for each of 64 columns",
    ),
    "quantize dtype of weights": (
        lambda x, w: ops.quantize(Q4_0, x, w), [(F, (2, 32)), (DType.bfloat16, (32,))], TypeError,
        "expected float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    build, types, error, message = MISTAKES[name]
    given = [TensorType(dtype, shape, CPU) for dtype, shape in types]
    with Graph("g", input_types=given) as graph, pytest.raises(error, match=message):
        build(*[value.tensor for value in graph.inputs])
