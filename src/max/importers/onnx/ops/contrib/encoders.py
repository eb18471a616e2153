"""Scalers, encoders and other steps that prepare features."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import TensorValue, ops
from max.importers.errors import HostNode, Unsupported
from max.importers.node import Node
from max.importers.onnx.table import host, op

Array = npt.NDArray[Any]
_ML = "ai.onnx.ml"


@op(f"{_ML}:Scaler")
def scaler(node: Node, x: TensorValue) -> TensorValue:
    x = ops.cast(x, DType.float32)
    offset = np.array(node.attr("offset", [0.0]), np.float32)
    scale = np.array(node.attr("scale", [1.0]), np.float32)
    return (x - ops.constant(offset)) * ops.constant(scale)


@op(f"{_ML}:Normalizer")
def normalizer(node: Node, x: TensorValue) -> TensorValue:
    x = ops.cast(x, DType.float32)
    kind = node.attr("norm", "MAX")
    axis = x.rank - 1
    match kind:
        case "MAX":
            size = ops.max(x, axis=axis)
        case "L1":
            size = ops.sum(ops.abs(x), axis)
        case "L2":
            size = ops.sqrt(ops.sum(x * x, axis))
        case _:
            raise Unsupported(f"norm is {kind!r}")
    # a norm of 0 leaves its row as it is
    return x / ops.where(ops.equal(size, 0.0), 1.0, size)


@op(f"{_ML}:Binarizer")
def binarizer(node: Node, x: TensorValue) -> TensorValue:
    return ops.cast(x > node.attr("threshold", 0.0), x.dtype)


@op(f"{_ML}:Imputer")
def imputer(node: Node, x: TensorValue) -> TensorValue:
    floats = node.attr("imputed_value_floats")
    values = np.array(floats if floats else node.attr("imputed_value_int64s"), x.dtype.to_numpy())
    replaced = (
        node.attr("replaced_value_float", 0.0) if floats else node.attr("replaced_value_int64", 0)
    )
    missing = (
        ops.is_nan(x)
        # NaN equals nothing, itself included
        if isinstance(replaced, float) and np.isnan(replaced)
        else ops.equal(x, replaced)
    )
    return ops.where(missing, ops.constant(values if values.size > 1 else values.reshape(())), x)


@op(f"{_ML}:ArrayFeatureExtractor")
def array_feature_extractor(node: Node, x: TensorValue, indices: TensorValue) -> TensorValue:
    y = ops.gather(x, ops.reshape(indices, [-1]), x.rank - 1)
    return ops.unsqueeze(y, 0) if x.rank == 1 else y


@op(f"{_ML}:FeatureVectorizer")
def feature_vectorizer(node: Node) -> TensorValue:
    tensors = [ops.cast(node.tensor(index), DType.float32) for index in range(len(node.operands))]
    flat = [x if x.rank == 2 else ops.reshape(x, [x.shape[0], -1]) for x in tensors]
    sizes = node.attr("inputdimensions") or [int(x.shape[1]) for x in flat]
    return ops.concat([x[:, :size] for x, size in zip(flat, sizes, strict=True)], 1)


def _encoder(node: Node) -> tuple[Array, Array, Any]:
    """Keys, values, and the value of other keys, of a LabelEncoder."""
    found: dict[str, Array] = {}
    for role in ("keys", "values"):
        for kind, dtype in (
            ("strings", object),
            ("int64s", np.int64),
            ("floats", np.float32),
            ("tensor", None),
        ):
            given = node.attr(f"{role}_{kind}")
            if given is not None and len(given):
                found[role] = np.asarray(given) if dtype is None else np.array(given, dtype)
    if len(found) < 2:
        raise Unsupported("has no keys or no values")
    values = found["values"]
    default: Any
    if node.attr("default_tensor") is not None:
        default = np.asarray(node.attr("default_tensor")).reshape(-1)[0]
    elif values.dtype == object:
        default = node.attr("default_string", "_Unused")
    elif values.dtype.kind == "f":
        default = node.attr("default_float", -0.0)
    else:
        default = node.attr("default_int64", -1)
    return found["keys"], values, default


@op(f"{_ML}:LabelEncoder")
def label_encoder(node: Node) -> TensorValue:
    keys, values, default = _encoder(node)
    x = node.value(0)
    if keys.dtype == object or values.dtype == object or x.is_text:
        raise HostNode("encodes strings between graphs")
    tensor = x.tensor
    result = ops.broadcast_to(ops.constant(np.array(default, values.dtype)), tensor.shape)
    # a graph compares each element with each key
    if len(keys) > 256:
        raise HostNode("looks up many keys between graphs")
    for key, value in zip(keys, values, strict=True):
        is_nan = keys.dtype.kind == "f" and np.isnan(key)
        same = (
            ops.is_nan(tensor)
            if is_nan
            else ops.equal(tensor, ops.constant(np.array(key, tensor.dtype.to_numpy())))
        )
        result = ops.where(same, ops.constant(np.array(value, values.dtype)), result)
    return result


@host(f"{_ML}:LabelEncoder")
def label_encoder_on_host(node: Node, x: Array) -> Array:
    keys, values, default = _encoder(node)
    table = {_key(key): value for key, value in zip(keys.tolist(), values.tolist(), strict=True)}
    flat = [table.get(_key(item), default) for item in x.reshape(-1).tolist()]
    result = np.empty(len(flat), values.dtype)
    result[:] = flat
    return result.reshape(x.shape)


def _key(item: Any) -> Any:
    # a key of a dictionary that equals itself
    return "NaN" if isinstance(item, float) and item != item else item


@host(f"{_ML}:OneHotEncoder")
def one_hot_encoder(node: Node, x: Array) -> Array:
    categories = node.attr("cats_strings") or node.attr("cats_int64s")
    if x.dtype != object:
        x = x.astype(np.int64)
    hot = np.stack([x == category for category in categories], -1).astype(np.float32)
    if not node.attr("zeros", 1) and not hot.any(-1).all():
        raise ValueError("OneHotEncoder: an element is none of the categories")
    return hot


@op(f"{_ML}:OneHotEncoder")
def one_hot_encoder_in_graph(node: Node) -> TensorValue:
    x = node.value(0)
    categories = node.attr("cats_int64s")
    if x.is_text or not categories or not node.attr("zeros", 1):
        raise HostNode("encodes strings between graphs")
    tensor = ops.cast(x.tensor, DType.int64)
    return ops.cast(
        ops.equal(ops.unsqueeze(tensor, -1), ops.constant(np.array(categories, np.int64))),
        DType.float32,
    )


@host(f"{_ML}:CategoryMapper")
def category_mapper(node: Node, x: Array) -> Array:
    texts, numbers = node.attr("cats_strings"), node.attr("cats_int64s")
    if x.dtype == object:
        table = dict(zip(texts, numbers, strict=True))
        missing: Any = node.attr("default_int64", -1)
        return np.array([table.get(item, missing) for item in x.reshape(-1)], np.int64).reshape(
            x.shape
        )
    names = dict(zip(numbers, texts, strict=True))
    missing = node.attr("default_string", "_Unused")
    return np.array([names.get(int(item), missing) for item in x.reshape(-1)], object).reshape(
        x.shape
    )


@host(f"{_ML}:ZipMap")
def zip_map(node: Node, x: Array) -> Any:
    """A dictionary for each row: the scores by class."""
    labels = node.attr("classlabels_strings") or node.attr("classlabels_int64s")
    return [dict(zip(labels, row.tolist(), strict=True)) for row in x.reshape(-1, len(labels))]
