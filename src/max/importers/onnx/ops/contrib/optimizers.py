"""The optimizers of `ai.onnx.preview.training`: a step for each tensor of a group."""

from __future__ import annotations

from typing import Any

from max.graph import TensorValue, ops
from max.importers.node import Node
from max.importers.onnx.table import op

_DOMAIN = "ai.onnx.preview.training"


def _groups(node: Node, count: int) -> tuple[TensorValue, TensorValue, list[list[TensorValue]]]:
    """Rate, step number, and `count` tensors for each optimized tensor."""
    tensors = [node.tensor(index) for index in range(2, len(node.operands))]
    each = len(tensors) // count
    # all tensors come first, then all gradients, and so on
    return node.tensor(0), node.tensor(1), [tensors[index::each] for index in range(each)]


def _flat(results: list[tuple[TensorValue, ...]]) -> tuple[TensorValue, ...]:
    return tuple(item for items in zip(*results, strict=True) for item in items)


@op(f"{_DOMAIN}:Adagrad")
def adagrad(node: Node) -> Any:
    rate, step, groups = _groups(node, 3)
    rate = rate / (1.0 + ops.cast(step, rate.dtype) * node.attr("decay_factor", 0.0))
    results: list[tuple[TensorValue, ...]] = []
    for x, gradient, squares in groups:
        gradient = gradient + x * node.attr("norm_coefficient", 0.0)
        total = squares + gradient * gradient
        results.append(
            (x - rate * gradient / (ops.sqrt(total) + node.attr("epsilon", 1e-6)), total)
        )
    return _flat(results)


@op(f"{_DOMAIN}:Momentum")
def momentum(node: Node) -> Any:
    rate, step, groups = _groups(node, 3)
    alpha, beta = node.attr("alpha"), node.attr("beta")
    nesterov = node.attr("mode") == "nesterov"
    results: list[tuple[TensorValue, ...]] = []
    for x, gradient, velocity in groups:
        gradient = gradient + x * node.attr("norm_coefficient", 0.0)
        # the first step takes the gradient as it is
        factor = ops.where(step > 0, beta, 1.0)
        following = velocity * alpha + gradient * ops.cast(factor, x.dtype)
        change = gradient + following * alpha if nesterov else following
        results.append((x - rate * change, following))
    return _flat(results)


@op(f"{_DOMAIN}:Adam")
def adam(node: Node) -> Any:
    rate, step, groups = _groups(node, 4)
    alpha, beta = node.attr("alpha", 0.9), node.attr("beta", 0.999)
    count = ops.cast(step, rate.dtype)
    first, second = 1.0 - ops.pow(alpha, count), 1.0 - ops.pow(beta, count)
    # the averages begin at 0: both are divided by the sum of their weights so far
    adapted = ops.where(step > 0, rate * ops.sqrt(second) / first, rate)
    after = node.attr("norm_coefficient_post", 0.0)
    results: list[tuple[TensorValue, ...]] = []
    for x, gradient, mean, squares in groups:
        gradient = gradient + x * node.attr("norm_coefficient", 0.0)
        mean = mean * alpha + gradient * (1.0 - alpha)
        squares = squares * beta + gradient * gradient * (1.0 - beta)
        new = x - adapted * mean / (ops.sqrt(squares) + node.attr("epsilon", 1e-6))
        results.append((new * (1.0 - after), mean, squares))
    return _flat(results)
