"""Linear models and support vector machines."""

from __future__ import annotations

from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.node import Node
from max.importers.onnx.ops.contrib.labels import label_classes, scores_of
from max.importers.onnx.table import op

_ML = "ai.onnx.ml"


def _floats(x: TensorValue) -> TensorValue:
    x = ops.cast(x, DType.float32)
    return x if x.rank > 1 else ops.reshape(x, [1, x.shape[0]])


@op(f"{_ML}:LinearRegressor")
def linear_regressor(node: Node, x: TensorValue) -> TensorValue:
    x = _floats(x)
    targets = node.attr("targets", 1)
    weights = np.array(node.attr("coefficients"), np.float32).reshape(targets, -1)
    y = ops.matmul(x, ops.constant(np.ascontiguousarray(weights.T)))
    bias = node.attr("intercepts")
    y = y + ops.constant(np.array(bias, np.float32)) if bias else y
    return scores_of(y, node.attr("post_transform", "NONE"))


@op(f"{_ML}:LinearClassifier")
def linear_classifier(node: Node, x: TensorValue) -> Any:
    x = _floats(x)
    bias = np.array(node.attr("intercepts") or [], np.float32)
    labels = node.attr("classlabels_strings") or node.attr("classlabels_ints")
    coefficients = np.array(node.attr("coefficients"), np.float32)
    # without intercepts the number of rows follows from the coefficients
    rows = len(bias) or max(1, len(coefficients) // max(1, int(x.shape[1])))
    y = ops.matmul(x, ops.constant(np.ascontiguousarray(coefficients.reshape(rows, -1).T)))
    y = y + ops.constant(bias) if bias.size else y
    transform = node.attr("post_transform", "NONE")
    if rows == 1 and len(labels) == 2:
        # one row of coefficients gives the score of the second class, whose sign decides
        choice = ops.cast(ops.reshape(y, [-1]) > 0.0, DType.int64)
        scores = ops.concat([-y, y], 1)
        if transform == "LOGISTIC":
            scores = ops.sigmoid(scores)
        elif transform != "NONE":
            scores = scores_of(scores, transform)
        return label_classes(node, choice, scores)
    choice = ops.reshape(ops.argmax(y, 1), [-1])
    return label_classes(node, choice, scores_of(y, transform))


def _kernel(node: Node, x: TensorValue, vectors: np.ndarray) -> TensorValue:
    """The kernel function of each row and each support vector."""
    gamma, coefficient, degree = ([*(node.attr("kernel_params") or []), 0.0, 0.0, 0.0])[:3]
    kind = node.attr("kernel_type", "LINEAR")
    if kind == "RBF":
        rows = ops.unsqueeze(x, 1) - ops.constant(vectors[None])  # [rows, vectors, features]
        return ops.exp(ops.reshape(ops.sum(rows * rows, 2), [x.shape[0], len(vectors)]) * -gamma)
    product = ops.matmul(x, ops.constant(np.ascontiguousarray(vectors.T)))
    match kind:
        case "LINEAR":
            return product
        case "POLY":
            return ops.pow(product * gamma + coefficient, degree)
        case "SIGMOID":
            return ops.tanh(product * gamma + coefficient)
        case _:
            raise Unsupported(f"kernel_type is {kind!r}")


@op(f"{_ML}:SVMRegressor")
def svm_regressor(node: Node, x: TensorValue) -> TensorValue:
    x = _floats(x)
    count = node.attr("n_supports", 0)
    rho = np.array(node.attr("rho"), np.float32)
    coefficients = np.array(node.attr("coefficients"), np.float32)
    if count:
        vectors = np.array(node.attr("support_vectors"), np.float32).reshape(count, -1)
        y = ops.matmul(_kernel(node, x, vectors), ops.constant(coefficients.reshape(-1, 1)))
    else:
        y = ops.matmul(x, ops.constant(coefficients.reshape(-1, 1)))
    y = y + float(rho[0])
    if node.attr("one_class", 0):
        # 1 for members of the class, -1 for outliers
        y = ops.where(y > 0.0, 1.0, ops.broadcast_to(ops.constant(np.float32(-1)), y.shape))
    return scores_of(y, node.attr("post_transform", "NONE"))
