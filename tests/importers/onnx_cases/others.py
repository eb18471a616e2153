"""Cases of sequences, random tensors, training steps and other domains."""

from __future__ import annotations

import numpy as np

from tests.importers.onnx_cases.case import Case, Draw, case

ML, MS = "ai.onnx.ml", "com.microsoft"
SIZE = 8


@case(
    f"{ML}:Scaler",
    f"{ML}:Normalizer",
    f"{ML}:Binarizer",
    f"{ML}:Imputer",
    f"{ML}:ArrayFeatureExtractor",
)
def features(draw: Draw, name: str) -> Case:
    x = draw.floats(3, 4)
    match name.split(":")[1]:
        case "Scaler":
            return Case(
                [x],
                {"offset": [1.0, 2.0, 3.0, 4.0], "scale": [0.5]},
                expected=(x - [1, 2, 3, 4]) * 0.5,
            )
        case "Normalizer":
            return Case([x], {"norm": "L2"}, expected=x / np.sqrt((x * x).sum(1, keepdims=True)))
        case "Binarizer":
            return Case([x], {"threshold": 0.5}, expected=(x > 0.5).astype(np.float32))
        case "Imputer":
            x[0, 1] = np.nan
            attrs = {"imputed_value_floats": [7.0], "replaced_value_float": float("nan")}
            return Case([x], attrs, expected=np.where(np.isnan(x), 7, x))
        case _:
            places = draw.ints(2, low=0, high=3)
            return Case([x, places], expected=x[:, places])


@case(f"{ML}:FeatureVectorizer", f"{ML}:LabelEncoder", f"{ML}:OneHotEncoder")
def encoders(draw: Draw, name: str) -> Case:
    keys = draw.ints(3, 2, low=0, high=4)
    match name.split(":")[1]:
        case "FeatureVectorizer":
            x, y = draw.floats(3, 2), draw.floats(3, 3)
            return Case([x, y], {"inputdimensions": [2, 3]}, expected=np.concatenate([x, y], 1))
        case "LabelEncoder":
            attrs = {"keys_int64s": [0, 2], "values_floats": [1.5, 2.5], "default_float": -1.0}
            return Case(
                [keys], attrs, expected=np.where(keys == 0, 1.5, np.where(keys == 2, 2.5, -1))
            )
        case _:
            return Case(
                [keys],
                {"cats_int64s": [0, 1, 3]},
                expected=(keys[..., None] == [0, 1, 3]).astype(np.float32),
            )


@case(f"{ML}:LinearRegressor", f"{ML}:LinearClassifier", f"{ML}:SVMRegressor")
def linear_models(draw: Draw, name: str) -> Case:
    x = draw.floats(5, 4)
    weights, bias = draw.floats(3, 4), draw.floats(3)
    y = x @ weights.T + bias
    match name.split(":")[1]:
        case "LinearRegressor":
            attrs = {
                "coefficients": weights.ravel().tolist(),
                "intercepts": bias.tolist(),
                "targets": 3,
            }
            return Case([x], attrs, expected=y, rtol=1e-3)
        case "LinearClassifier":
            attrs = {
                "coefficients": weights.ravel().tolist(),
                "intercepts": bias.tolist(),
                "classlabels_ints": [3, 5, 7],
            }
            return Case([x], attrs, 2, expected=[np.array([3, 5, 7])[y.argmax(1)], y], rtol=1e-3)
        case _:
            vectors, factors = draw.floats(2, 4), draw.floats(2)
            distance = ((x[:, None] - vectors[None]) ** 2).sum(2)
            attrs = {
                "coefficients": factors.tolist(), "support_vectors": vectors.ravel().tolist(), "n_supports": 2,
                "kernel_type": "RBF", "kernel_params": [0.3, 0.0, 3.0], "rho": [0.5],
            }  # fmt: skip
            return Case(
                [x], attrs, expected=(np.exp(-0.3 * distance) @ factors + 0.5)[:, None], rtol=1e-3
            )


def stump(draw: Draw) -> tuple[dict[str, list], np.ndarray]:
    """Three trees with one test each, and their limits."""
    limits = draw.floats(3)
    attrs = {
        "nodes_treeids": [0] * 3 + [1] * 3 + [2] * 3, "nodes_nodeids": [0, 1, 2] * 3,
        "nodes_featureids": [0, 0, 0, 1, 0, 0, 2, 0, 0],
        "nodes_values": [v for limit in limits.tolist() for v in (limit, 0.0, 0.0)],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"] * 3,
        "nodes_truenodeids": [1, 0, 0] * 3, "nodes_falsenodeids": [2, 0, 0] * 3,
    }  # fmt: skip
    return attrs, limits


@case(f"{ML}:TreeEnsembleRegressor", f"{ML}:TreeEnsembleClassifier", f"{ML}:TreeEnsemble")
def trees(draw: Draw, name: str) -> Case:
    x = draw.floats(7, 3)
    attrs, limits = stump(draw)
    weights = draw.floats(3, 2)
    leaves = np.where(x <= limits, weights[:, 0], weights[:, 1])
    places = {
        "treeids": [0, 0, 1, 1, 2, 2],
        "nodeids": [1, 2] * 3,
        "weights": weights.ravel().tolist(),
    }
    match name.split(":")[1]:
        case "TreeEnsembleRegressor":
            targets = {f"target_{k}": v for k, v in places.items()} | {"target_ids": [0] * 6}
            return Case(
                [x],
                {**attrs, **targets, "n_targets": 1},
                expected=leaves.sum(1, keepdims=True),
                rtol=1e-3,
            )
        case "TreeEnsembleClassifier":
            targets = {f"class_{k}": v for k, v in places.items()} | {
                "class_ids": [0] * 6,
                "classlabels_int64s": [4, 9],
            }
            score = leaves.sum(1)
            probability = 1 / (1 + np.exp(-score))
            positive = (weights >= 0).all()
            labels = np.where(score > (0.5 if positive else 0), 9, 4)
            expected = [labels, np.stack([1 - probability, probability], 1)]
            return Case(
                [x],
                {**attrs, **targets, "post_transform": "LOGISTIC"},
                2,
                expected=expected,
                rtol=1e-3,
            )
        case _:
            new = {
                "nodes_featureids": [0, 1, 2], "nodes_splits": limits, "nodes_modes": np.zeros(3, np.uint8),
                "nodes_truenodeids": [0, 2, 4], "nodes_falsenodeids": [1, 3, 5], "nodes_trueleafs": [1] * 3,
                "nodes_falseleafs": [1] * 3, "tree_roots": [0, 1, 2], "leaf_targetids": [0] * 6,
                "leaf_weights": weights.ravel(), "n_targets": 1,
            }  # fmt: skip
            return Case([x], new, expected=leaves.sum(1, keepdims=True), rtol=1e-3)


TRAINING = "ai.onnx.preview.training"


@case(f"{TRAINING}:Adagrad", f"{TRAINING}:Adam", f"{TRAINING}:Momentum")
def training(draw: Draw, name: str) -> Case:
    x, gradient, state = draw.floats(4), draw.floats(4), draw.floats(4, low=0.1)
    head = [np.array([0.1], np.float32), np.array([0])]
    match name.split(":")[1]:
        case "Adagrad":
            total = state + gradient**2
            return Case(
                [*head, x, gradient, state],
                {},
                2,
                expected=[x - 0.1 * gradient / (np.sqrt(total) + 1e-6), total],
            )
        case "Momentum":
            attrs = {"alpha": 0.9, "beta": 0.5, "mode": "standard", "norm_coefficient": 0.0}
            following = 0.9 * state + gradient
            return Case(
                [*head, x, gradient, state], attrs, 2, expected=[x - 0.1 * following, following]
            )
        case _:
            squares = draw.floats(4, low=0.1)
            mean, square = 0.9 * state + 0.1 * gradient, 0.999 * squares + 0.001 * gradient**2
            y = x - 0.1 * mean / (np.sqrt(square) + 1e-6)
            return Case(
                [*head, x, gradient, state, squares], {}, 3, expected=[y, mean, square], rtol=1e-3
            )


def gelu(x: np.ndarray) -> np.ndarray:
    from math import erf

    return (0.5 * x * (1 + np.vectorize(erf)(x / 2**0.5))).astype(x.dtype)


@case(
    f"{MS}:Gelu",
    f"{MS}:BiasGelu",
    f"{MS}:FastGelu",
    f"{MS}:QuickGelu",
    f"{MS}:BiasAdd",
    f"{MS}:BiasSplitGelu",
)
def activations(draw: Draw, name: str) -> Case:
    x, bias = draw.floats(2, 3, SIZE), draw.floats(SIZE)
    match name.split(":")[1]:
        case "Gelu":
            return Case([x], expected=gelu(x), rtol=1e-3)
        case "BiasGelu":
            return Case([x, bias], expected=gelu(x + bias), rtol=1e-3)
        case "FastGelu":
            z = x + bias
            y = 0.5 * z * (1 + np.tanh(0.7978845608028654 * (z + 0.044715 * z**3)))
            return Case([x, bias], expected=y, rtol=1e-3)
        case "QuickGelu":
            return Case([x], {"alpha": 1.5}, expected=x / (1 + np.exp(-1.5 * x)), rtol=1e-3)
        case "BiasAdd":
            return Case([x, bias, x], expected=2 * x + bias)
        case _:
            first, second = np.split(x + bias, 2, 2)
            return Case([x, bias], expected=first * gelu(second), rtol=1e-3)


@case(
    f"{MS}:FusedMatMul",
    f"{MS}:TransposeMatMul",
    f"{MS}:FusedGemm",
    f"{MS}:FusedConv",
    f"{MS}:Inverse",
    f"{MS}:BiasSoftmax",
)
def fused_products(draw: Draw, name: str) -> Case:
    a, b = draw.floats(2, 4, 3), draw.floats(2, 4, 5)
    match name.split(":")[1]:
        case "FusedMatMul" | "TransposeMatMul":
            return Case(
                [a, b],
                {"transA": 1, "alpha": 0.5},
                expected=0.5 * a.transpose(0, 2, 1) @ b,
                rtol=1e-3,
            )
        case "FusedGemm":
            c = draw.floats(5)
            y = np.maximum(a[0].T @ b[0] + c, 0)
            return Case([a[0], b[0], c], {"transA": 1, "activation": "Relu"}, expected=y, rtol=1e-3)
        case "FusedConv":
            x, w = draw.floats(1, 2, 5), draw.floats(3, 2, 1)
            y = np.maximum(np.einsum("fc,ncl->nfl", w[:, :, 0], x), 0)
            return Case([x, w], {"activation": "Relu"}, expected=y, rtol=1e-3)
        case "Inverse":
            x = draw.floats(2, 3, 3) + 5 * np.eye(3, dtype=np.float32)
            return Case([x], expected=np.linalg.inv(x), rtol=1e-3)
        case _:
            z = a + a
            y = np.exp(z - z.max(-1, keepdims=True))
            return Case(
                [a, a],
                {"axis": 2, "is_inner_broadcast": 0},
                expected=y / y.sum(-1, keepdims=True),
                rtol=1e-3,
            )


def layer_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray | float = 0.0) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias


def rms_norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


@case(
    *(
        f"{MS}:SkipLayerNormalization",
        f"{MS}:SkipSimplifiedLayerNormalization",
        f"{MS}:EmbedLayerNormalization",
    ),
    *("SimplifiedLayerNormalization", f"{MS}:SimplifiedLayerNormalization", f"{MS}:GroupNorm"),
)
def fused_norms(draw: Draw, name: str) -> Case:
    x, skip, scale, bias = (
        draw.floats(2, 3, SIZE),
        draw.floats(2, 3, SIZE),
        draw.floats(SIZE),
        draw.floats(SIZE),
    )
    match name.split(":")[-1]:
        case "SkipLayerNormalization":
            attrs = {"epsilon": 1e-5}
            return Case(
                [x, skip, scale, bias], attrs, expected=layer_norm(x + skip, scale, bias), rtol=1e-3
            )
        case "SkipSimplifiedLayerNormalization":
            return Case(
                [x, skip, scale], {"epsilon": 1e-5}, expected=rms_norm(x + skip, scale), rtol=1e-3
            )
        case "SimplifiedLayerNormalization":
            return Case(
                [x, scale], {"epsilon": 1e-5, "axis": -1}, expected=rms_norm(x, scale), rtol=1e-3
            )
        case "EmbedLayerNormalization":
            ids, words, places = (
                draw.ints(2, 4, low=0, high=5, dtype=np.int32),
                draw.floats(6, SIZE),
                draw.floats(4, SIZE),
            )
            y = layer_norm(words[ids] + places, scale, bias)
            inputs = [ids, None, words, places, None, scale, bias]
            return Case(
                inputs, {"epsilon": 1e-5}, 2, expected=[y, np.zeros(2, np.int32)], rtol=1e-3
            )
        case _:
            image = draw.floats(1, 2, 3, SIZE)
            parts = image.reshape(1, 6, 2, SIZE // 2)
            mean, variance = parts.mean((1, 3), keepdims=True), parts.var((1, 3), keepdims=True)
            y = ((parts - mean) / np.sqrt(variance + 1e-5)).reshape(image.shape) * scale + bias
            return Case(
                [image, scale, bias],
                {"groups": 2, "epsilon": 1e-5, "activation": 0},
                expected=y,
                rtol=1e-3,
            )


def heads_of(x: np.ndarray, heads: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def attended(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray | None = None
) -> np.ndarray:
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    scores = scores if allowed is None else np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    y = weights / weights.sum(-1, keepdims=True) @ v
    return y.transpose(0, 2, 1, 3).reshape(q.shape[0], q.shape[2], -1)


@case(
    f"{MS}:Attention",
    f"{MS}:MultiHeadAttention",
    f"{MS}:GroupQueryAttention",
    f"{MS}:RotaryEmbedding",
)
def attention(draw: Draw, name: str) -> Case:
    x = draw.floats(2, 5, SIZE)
    match name.split(":")[1]:
        case "Attention":
            weight, bias = draw.floats(SIZE, 3 * SIZE), draw.floats(3 * SIZE)
            q, k, v = (heads_of(part, 2) for part in np.split(x @ weight + bias, 3, 2))
            causal = draw.int(0, 1)
            allowed = np.tril(np.ones((5, 5), bool)) if causal else None
            attrs = {"num_heads": 2, "unidirectional": causal}
            return Case([x, weight, bias], attrs, expected=attended(q, k, v, allowed), rtol=1e-3)
        case "MultiHeadAttention":
            key, value = draw.floats(2, 6, SIZE), draw.floats(2, 6, SIZE)
            y = attended(heads_of(x, 2), heads_of(key, 2), heads_of(value, 2))
            return Case([x, key, value], {"num_heads": 2}, expected=y, rtol=1e-3)
        case "GroupQueryAttention":
            key, value = draw.floats(2, 5, SIZE // 2), draw.floats(2, 5, SIZE // 2)
            past = [draw.floats(2, 1, 3, 4), draw.floats(2, 1, 3, 4)]
            k = np.concatenate([past[0], heads_of(key, 1)], 2)
            v = np.concatenate([past[1], heads_of(value, 1)], 2)
            allowed = np.arange(8) <= np.arange(5)[:, None] + 3
            y = attended(heads_of(x, 2), k.repeat(2, 1), v.repeat(2, 1), allowed)
            inputs = [x, key, value, *past, np.full(2, 7, np.int32), np.int32(8)]
            return Case(
                inputs, {"num_heads": 2, "kv_num_heads": 1}, 3, expected=[y, k, v], rtol=1e-3
            )
        case _:
            places = draw.ints(2, 5, low=0, high=8)
            angles = draw.floats(9, 2)
            cosines, sines = np.cos(angles), np.sin(angles)
            halves = heads_of(x, 2)
            a, b = halves[..., :2], halves[..., 2:]
            c, s = cosines[places][:, None], sines[places][:, None]
            y = (
                np.concatenate([a * c - b * s, a * s + b * c], -1)
                .transpose(0, 2, 1, 3)
                .reshape(x.shape)
            )
            return Case([x, places, cosines, sines], expected=y, rtol=1e-3)


def codes(draw: Draw, *shape: int) -> np.ndarray:
    return draw.ints(*shape, low=0, high=255, dtype=np.uint8)


SCALE, ZERO = np.float32(0.05), np.uint8(120)
TO = np.float32(0.1), np.uint8(30)


def quantized(y: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(y / TO[0]) + TO[1], 0, 255).astype(np.uint8)


def numbers(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32) - 120) * SCALE


@case(
    *(
        f"{MS}:QLinearAdd",
        f"{MS}:QLinearMul",
        f"{MS}:QLinearSigmoid",
        f"{MS}:QLinearLeakyRelu",
        f"{MS}:QLinearSoftmax",
    ),
    *(
        f"{MS}:QLinearGlobalAveragePool",
        f"{MS}:QLinearConcat",
        f"{MS}:QuantizeLinear",
        f"{MS}:DequantizeLinear",
    ),
)
def on_codes(draw: Draw, name: str) -> Case:
    x, y = codes(draw, 2, 3, 4), codes(draw, 2, 3, 4)
    a, b = numbers(x), numbers(y)
    one = [x, SCALE, ZERO]
    match name.split(":")[1]:
        case "QLinearAdd":
            return Case([*one, y, SCALE, ZERO, *TO], expected=quantized(a + b), rtol=1.01)
        case "QLinearMul":
            return Case([*one, y, SCALE, ZERO, *TO], expected=quantized(a * b), rtol=1.01)
        case "QLinearSigmoid":
            return Case([*one, *TO], expected=quantized(1 / (1 + np.exp(-a))), rtol=1.01)
        case "QLinearLeakyRelu":
            return Case(
                [*one, *TO],
                {"alpha": 0.5},
                expected=quantized(np.where(a < 0, a * 0.5, a)),
                rtol=1.01,
            )
        case "QLinearSoftmax":
            power = np.exp(a - a.max(-1, keepdims=True))
            return Case(
                [*one, *TO],
                {"axis": -1},
                expected=quantized(power / power.sum(-1, keepdims=True)),
                rtol=1.01,
            )
        case "QLinearGlobalAveragePool":
            return Case([*one, *TO], expected=quantized(a.mean(2, keepdims=True)), rtol=1.01)
        case "QLinearConcat":
            return Case(
                [*TO, *one, y, SCALE, ZERO],
                {"axis": 1},
                expected=quantized(np.concatenate([a, b], 1)),
                rtol=1.01,
            )
        case "QuantizeLinear":
            return Case([a, *TO], expected=quantized(a), rtol=1.01)
        case _:
            return Case(one, expected=a)


@case(
    f"{MS}:QGemm", f"{MS}:MatMulIntegerToFloat", f"{MS}:DynamicQuantizeMatMul", f"{MS}:MatMulNBits"
)
def quantized_products(draw: Draw, name: str) -> Case:
    a, b = codes(draw, 3, 4), codes(draw, 4, 5)
    y = (a.astype(np.int64) - 120) @ (b.astype(np.int64) - 120) * np.float64(SCALE) ** 2
    match name.split(":")[1]:
        case "QGemm":
            return Case([a, SCALE, ZERO, b, SCALE, ZERO], expected=y.astype(np.float32), rtol=1e-3)
        case "MatMulIntegerToFloat":
            return Case([a, b, SCALE, SCALE, ZERO, ZERO], expected=y.astype(np.float32), rtol=1e-3)
        case "DynamicQuantizeMatMul":
            x = draw.floats(3, 4)
            low, high = min(x.min(), 0), max(x.max(), 0)
            scale = np.float32((high - low) / 255)
            zero = np.clip(np.rint(-low / scale), 0, 255)
            rounded = np.clip(np.rint(x / scale) + zero, 0, 255) - zero
            expected = rounded @ (b.astype(np.float64) - 120) * scale * SCALE
            return Case([x, b, SCALE, ZERO], expected=expected.astype(np.float32), rtol=1e-2)
        case _:
            bits, block, columns = draw.choice([2, 4, 8]), 16, 3
            inner = draw.choice([32, 27])
            full = draw.ints(columns, 2 * block, low=0, high=2**bits - 1, dtype=np.uint8)
            per = 8 // bits
            packed = sum(full[:, i::per].astype(np.int64) << (bits * i) for i in range(per)).astype(
                np.uint8
            )
            scales = draw.floats(columns, 2)
            weight = (full.astype(np.float32) - 2 ** (bits - 1)).reshape(
                columns, 2, block
            ) * scales[..., None]
            x = draw.floats(4, inner)
            attrs = {"K": inner, "N": columns, "bits": bits, "block_size": block}
            inputs = [x, packed.reshape(columns, 2, -1), scales.reshape(-1)]
            expected = x @ weight.reshape(columns, -1)[:, :inner].T
            return Case(inputs, attrs, constant=(1, 2), expected=expected, rtol=1e-2)
