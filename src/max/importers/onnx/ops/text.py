"""Ops on strings, which the host executes, and ops whose results have sizes that depend on data in no simple way."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from max.importers.errors import ModelFileError
from max.importers.node import Node
from max.importers.onnx.table import host

Array = npt.NDArray[Any]


def _each(x: Array, function: Callable[[str], Any], dtype: Any = object) -> Array:
    result = np.empty(x.shape, dtype)
    for place in np.ndindex(x.shape):
        result[place] = function(str(x[place]))
    return result


@host("StringConcat")
def string_concat(node: Node, x: Array, y: Array) -> Array:
    return np.asarray(x + y, object)


@host("RegexFullMatch")
def regex_full_match(node: Node, x: Array) -> Array:
    pattern = re.compile(node.attr("pattern"))
    return _each(x, lambda text: pattern.fullmatch(text) is not None, bool)


@host("StringNormalizer")
def string_normalizer(node: Node, x: Array) -> Array:
    action = node.attr("case_change_action", "NONE")
    sensitive = node.attr("is_case_sensitive", 0)
    stops = node.attr("stopwords") or []
    if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[0] != 1):
        raise ModelFileError(
            f"StringNormalizer: the operand has the shape {list(x.shape)}, expected [n] or [1, n]"
        )
    words = [str(word) for word in x.reshape(-1)]
    if sensitive:
        kept = [word for word in words if word not in set(stops)]
    else:
        folded = {stop.lower() for stop in stops}
        kept = [word for word in words if word.lower() not in folded]
    change: Callable[[str], str] = {"LOWER": str.lower, "UPPER": str.upper}.get(action, str)
    # where no word is left, the result is one empty text
    result = np.array([change(word) for word in kept] or [""], object)
    return result.reshape(1, -1) if x.ndim == 2 else result


@host("StringSplit")
def string_split(node: Node, x: Array) -> tuple[Array, Array]:
    delimiter, most = node.attr("delimiter"), node.attr("maxsplit", -1)
    parts = [str(text).split(delimiter or None, most) for text in x.reshape(-1)]
    counts = np.array([len(part) for part in parts], np.int64).reshape(x.shape)
    width = max((len(part) for part in parts), default=0)
    texts = np.full((len(parts), width), "", object)
    for row, part in enumerate(parts):
        texts[row, : len(part)] = part
    return texts.reshape(*x.shape, width), counts


@host("Where")
def where(node: Node, condition: Array, x: Array, y: Array) -> Array:
    return np.where(condition, x, y)


@host("Equal")
def equal(node: Node, x: Array, y: Array) -> Array:
    return np.asarray(x == y, bool)


@host("TfIdfVectorizer")
def tf_idf_vectorizer(node: Node, x: Array) -> Array:
    """Counts of n-grams, with gaps of up to `max_skip_count` elements."""
    mode = node.attr("mode")
    shortest, longest = node.attr("min_gram_length"), node.attr("max_gram_length")
    skips = node.attr("max_skip_count")
    starts, indexes = node.attr("ngram_counts"), node.attr("ngram_indexes")
    pool = node.attr("pool_strings") or node.attr("pool_int64s")
    weights = node.attr("weights")
    grams: dict[tuple[Any, ...], int] = {}
    number = 0
    # the pool has n-grams by their length; `starts` has where each length begins
    for size, start in enumerate(starts, 1):
        end = starts[size] if size < len(starts) else len(pool)
        for first in range(start, end, size):
            grams[tuple(pool[first : first + size])] = number
            number += 1
    rows = x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(1, -1)
    counts = np.zeros((len(rows), max(indexes, default=-1) + 1), np.float32)
    for row, items in enumerate(rows.tolist()):
        for size in range(shortest, longest + 1):
            # a single element has no gaps
            for skip in range(skips + 1 if size > 1 else 1):
                step = skip + 1
                for first in range(len(items) - (size - 1) * step):
                    gram = grams.get(tuple(items[first : first + (size - 1) * step + 1 : step]))
                    if gram is not None:
                        counts[row, indexes[gram]] += 1
    factors = np.ones(counts.shape[1], np.float32)
    if weights:
        for gram, index in enumerate(indexes):
            factors[index] = weights[gram]
    if mode == "IDF":
        counts = (counts > 0) * factors
    elif mode == "TFIDF":
        counts = counts * factors
    counts = counts.astype(np.float32)
    return counts.reshape(*x.shape[:-1], -1) if x.ndim > 1 else counts[0]


@host("Unique")
def unique(node: Node, x: Array) -> tuple[Array, ...]:
    axis = node.attr("axis")
    values, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not node.attr("sorted", 1):
        # NumPy sorts the values; `order` is that of their first occurrences
        order = np.argsort(first, kind="stable")
        places = np.argsort(order, kind="stable")
        values = np.take(values, order, 0 if axis is None else axis)
        first, counts, inverse = first[order], counts[order], places[inverse]
    return values, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64)


_LARGEST_IMAGE = 1 << 28
"""Bytes of a decoded image."""


@host("ImageDecoder")
def image_decoder(node: Node, data: Array) -> Array:
    """Pixels of an encoded image, by Pillow."""
    try:
        from PIL import Image  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "ImageDecoder reads images with the package Pillow: pip install pillow"
        ) from error
    order = node.attr("pixel_format", "RGB")
    try:
        with Image.open(io.BytesIO(data.tobytes())) as image:
            if image.width * image.height * 3 > _LARGEST_IMAGE:
                raise ModelFileError(
                    f"ImageDecoder: an image of {image.width} × {image.height} pixels"
                )
            pixels = np.array(image.convert("L" if order == "Grayscale" else "RGB"))
    except OSError as error:
        raise ModelFileError(f"ImageDecoder: {error}") from error
    if order == "Grayscale":
        return pixels[:, :, None]
    return np.ascontiguousarray(pixels[:, :, ::-1]) if order == "BGR" else pixels
