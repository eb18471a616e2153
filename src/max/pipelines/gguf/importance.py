"""Importance matrices: the weight of each column of a matrix, measured from the activations of a text.

An error in a column of a weight is multiplied by the column's input, so the expected squared error of a product is the
sum of the squared errors of the weight, each times the mean square of its input (as llama.cpp's ``imatrix``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from max.driver import Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.graph.weights import WeightData
from max.nn.kv_cache import KVCacheParams
from max.nn.layer import Layer, add_layer_hook, remove_layer_hook
from max.nn.layers.experts import ExpertProduct
from max.nn.layers.linear import Linear
from max.nn.transformer import ReturnLogits
from max.pipelines.core.exceptions import InputError, ModelFilesError
from max.pipelines.kv_cache.memory import group_shapes
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.decoder import Decoder
from max.pipelines.models.decoder.graph import build_graph
from max.pipelines.models.decoder.weights import weights_registry

__all__ = ["WINDOW", "ImportanceMatrix", "importance_matrix"]

WINDOW = 512
"""The number of tokens of a window of the text; each window starts from an empty cache."""
_LEAST = 1e-4
"""The minimum importance of a column relative to the mean of its matrix, as other texts may use other columns."""
_HALF = (DType.bfloat16, DType.float16)


@dataclass(frozen=True)
class ImportanceMatrix:
    """Statistics of the inputs of a model's matrices over a text.

    Args:
        sums: The sum of squares of each input column, by the decoder's weight names, float64 ``[columns]``, for experts
            ``[experts, columns]``.
        counts: The number of summed rows: int64 ``[]``, for experts ``[experts]``.
    """

    sums: dict[str, npt.NDArray[np.float64]]
    counts: dict[str, npt.NDArray[np.int64]]

    def of(self, name: str) -> npt.NDArray[np.float32] | None:
        """The importance of the columns of a matrix, with mean 1; None if the text never used the matrix.

        An expert that received no token gets the importance over all experts. No column has less than 1/10,000 of the
        mean.

        Args:
            name: The decoder's name of the weight.

        Returns:
            float32 ``[columns]``, for experts ``[experts, columns]``.
        """
        sums = self.sums.get(name)
        if sums is None or not sums.any():
            return None
        if sums.ndim > 1:
            # experts that no token chose get the mean of the others
            unseen = ~sums.any(-1, keepdims=True)
            sums = np.where(unseen, sums.sum(0), sums)
        # the number of rows cancels, as the mean is normalized to 1
        share = sums / sums.mean(-1, keepdims=True)
        return np.maximum(share, _LEAST).astype(np.float32)


def importance_matrix(
    decoder: type[Decoder],
    config: DecoderConfig,
    weights: Mapping[str, WeightData],
    tokens: Sequence[int],
    session: InferenceSession,
    window: int = WINDOW,
) -> ImportanceMatrix:
    """Runs a text through a model, and sums the squares of the inputs of each matrix.

    The text is read in windows, each from an empty cache; an incomplete last window is left out.

    Args:
        decoder: The model's class.
        config: The shape of the model.
        weights: Floats by the decoder's names, fused projections split.
        tokens: The tokens of the text.
        session: Compiles and runs the model.
        window: The number of tokens of a window, at most the model's context.

    Raises:
        InputError: The text has fewer tokens than a window, or tokens outside the vocabulary.
        ModelFilesError: The inputs of a matrix are not finite.
    """
    config = replace(config, max_seq_len=min(window, config.max_seq_len))
    window = config.max_seq_len
    if len(tokens) < window:
        raise InputError(
            f"the text of the importance matrix has {len(tokens)} tokens, fewer than a window of {window}",
            "Give a longer text; a hundred windows and more serve well.",
        )
    if max(tokens) >= config.vocab_size:
        raise InputError(
            f"the text has the token {max(tokens)}, and the model's vocabulary {config.vocab_size} tokens",
            "Check that the tokenizer and the weights belong together.",
        )
    dtype = weights["embed_tokens.weight"].dtype
    dtype = dtype if dtype in _HALF else DType.float32
    params = config.cache_params(dtype, window)
    registry = weights_registry(decoder, config, params, dtype, weights)
    with _recorded_inputs() as names:
        graph = build_graph(
            decoder, config, params, dtype, ReturnLogits.ALL, use_subgraphs=False, state_dict=weights
        )  # fmt: skip
    model = session.load(graph, weights_registry=registry)
    cache = _empty_cache(config, params, window)
    sums: dict[str, npt.NDArray[np.float64]] = {}
    counts: dict[str, npt.NDArray[np.int64]] = {}
    for start in range(0, len(tokens) - window + 1, window):
        outputs = model.execute(
            Tensor.from_numpy(np.array(tokens[start : start + window], np.int64)),
            Tensor.from_numpy(np.array([0, window], np.uint32)),
            Tensor.from_numpy(np.array([1], np.int64)),
            *cache,
        )
        arrays = [value.to_numpy() for value in outputs if isinstance(value, Tensor)]
        for name, squares, rows in zip(names, arrays[::2], arrays[1::2], strict=True):
            sums[name] = sums.get(name, 0) + squares.astype(np.float64)
            counts[name] = counts.get(name, 0) + rows.astype(np.int64)
    for name, values in sums.items():
        if not np.isfinite(values).all():
            raise ModelFilesError(
                f"the inputs of {name!r} are not finite over the text", "Check the checkpoint."
            )
    return ImportanceMatrix(sums, counts)


@contextmanager
def _recorded_inputs() -> Iterator[list[str]]:
    """Within this context, a staged decoder graph also returns two values for each matrix: the sums of squares and the
    number of rows.

    Yields:
        The names of the matrices, in the order of the values; complete when the graph is staged.
    """
    names: list[str] = []
    values: list[TensorValue] = []

    def record(name: str, squares: TensorValue, rows: TensorValue) -> None:
        if name not in names:
            names.append(name)
            values.extend([squares, rows])

    def observe(
        layer: Layer, args: tuple[Any, ...], kwargs: Mapping[str, object], outputs: object
    ) -> tuple[TensorValue, ...] | None:
        """Records the inputs of a linear layer or an expert product; a decoder returns all recorded values."""
        if isinstance(layer, Decoder):
            return tuple(values)
        # skip a tied output layer, whose weight is the embedding: its rows are looked up too
        if isinstance(layer, Linear) and not layer.weight.name.startswith("embed_tokens."):
            record(layer.weight.name, *_of_rows(args[0]))
        elif isinstance(layer, ExpertProduct) and isinstance(layer.weight, Weight):
            record(layer.weight.name, *_of_experts(args[0], args[1], int(layer.weight.shape[0])))
        return None

    add_layer_hook(observe)
    try:
        yield names
    finally:
        remove_layer_hook(observe)


def _of_rows(x: TensorValue) -> tuple[TensorValue, TensorValue]:
    """The sum of squares of each column, float32 ``[columns]``, and the number of rows."""
    wide = ops.cast(x, DType.float32)
    flat = ops.reshape(wide, [-1, x.shape[-1]])
    total = ops.reshape(ops.sum(flat * flat, axis=0), [x.shape[-1]])
    return total, TensorValue(flat.shape[0])


def _of_experts(
    x: TensorValue, of_rows: TensorValue, experts: int
) -> tuple[TensorValue, TensorValue]:
    """The same per expert: float32 ``[experts, columns]``, and ``[experts]``."""
    wide, rows = ops.cast(x, DType.float32), x.shape[0]
    ids = ops.constant(np.arange(experts), DType.int64, DeviceRef.CPU())
    chosen = ops.reshape(ops.cast(of_rows, DType.int64), [1, rows])
    ours = ops.cast(ops.equal(ops.reshape(ids, [experts, 1]), chosen), DType.float32)
    return ours @ (wide * wide), ops.reshape(ops.sum(ours, axis=1), [experts])


def _empty_cache(config: DecoderConfig, params: KVCacheParams, window: int) -> list[Tensor]:
    """The cache inputs of the graph for one uncached sequence; a page holds a whole window."""
    pages = [
        Tensor.zeros((1, 1 if p.is_mla else 2, layers, window, p.n_kv_heads_per_device, p.stored_head_dim), p.dtype)
        for p, layers in group_shapes(params, config.num_cached_layers)
    ]  # fmt: skip
    table = Tensor.from_numpy(np.zeros((1, 1), np.uint32))
    lengths = np.zeros(1, np.uint32), np.array([[window, 0]], np.uint32)
    cache = [pages[0], Tensor.from_numpy(lengths[0]), table, Tensor.from_numpy(lengths[1])]
    for blocks in pages[1:]:
        cache += [blocks, table]  # one page each: the same table
    if params.states:
        states = [Tensor.zeros((1, s.layers, *s.shape), s.dtype) for s in params.states]
        cache += [Tensor.from_numpy(np.zeros(1, np.uint32)), *states]
    return cache
