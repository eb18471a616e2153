"""The results of classifiers: scores after a transform, and labels, which may be strings."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from max.graph import TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.node import Node
from max.importers.onnx.table import host
from max.importers.source import InputType, SourceGraph, SourceNode
from max.importers.values import Imported

Array = npt.NDArray[Any]

_LOOKUP = "max.importers:Lookup"


def scores_of(y: TensorValue, transform: str) -> TensorValue:
    """Scores after the transform of a classifier or regressor."""
    match transform:
        case "NONE":
            return y
        case "LOGISTIC":
            return ops.sigmoid(y)
        case "SOFTMAX":
            return ops.softmax(y, 1)
        case "SOFTMAX_ZERO":
            powers = ops.exp(y - ops.max(y, axis=1))
            # scores of exactly 0 stay 0
            powers = ops.where(ops.equal(y, 0.0), 0.0, powers)
            total = ops.sum(powers, 1)
            return powers / ops.where(ops.equal(total, 0.0), 1.0, total)
        case "PROBIT":
            return _probit(y)
        case _:
            raise Unsupported(f"post_transform is {transform!r}")


def _probit(y: TensorValue) -> TensorValue:
    """The inverse of the normal distribution, by Winitzki's inverse of the error function."""
    x = 2.0 * y - 1.0
    log = ops.log((1.0 - x) * (1.0 + x))
    # 3.14159 and 0.147 as onnxruntime has them, so that results agree
    v = 2.0 / (3.14159 * 0.147) + 0.5 * log
    inverse = ops.sqrt(-v + ops.sqrt(v * v - log * (1.0 / 0.147)))
    return ops.where(x < 0.0, -inverse, inverse) * 1.4142135623730951


def label_classes(node: Node, choice: TensorValue, scores: TensorValue) -> Any:
    """The labels of classes, and the scores. The host looks strings up."""
    names = node.attr("classlabels_strings")
    if not names:
        numbers = np.array(
            node.attr("classlabels_int64s") or node.attr("classlabels_ints"), np.int64
        )
        return ops.gather(ops.constant(numbers), choice, 0), scores
    # the operands of the two nodes that replace this one, under names that the model lacks
    own = node.source
    prefix = f"{own.outputs[0]}/labels/"
    node.walker.values[prefix + "choice"] = Imported(choice)
    node.walker.values[prefix + "scores"] = Imported(scores)
    lookup = SourceNode(
        "Lookup", "max.importers", 1, (prefix + "choice",), ("label",), {"names": list(names)}, own.label, own.number
    )  # fmt: skip
    copy = SourceNode(
        "Identity", "", own.version, (prefix + "scores",), ("score",), {}, own.label, own.number
    )
    unknown = InputType()
    return SourceGraph(own.op, (), (("label", unknown), ("score", unknown)), (copy, lookup))


@host(_LOOKUP)
def lookup(node: Node, choice: Array) -> Array:
    """The names at positions."""
    return np.array(node.attr("names"), object)[choice]
