"""Quantizes the float weights of a checkpoint with compiled kernels on all cores, and caches the result."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from max._host.cache_folders import QUANTIZED_FOLDER, cache_dir
from max._load_steps import STEPS
from max.driver import Tensor
from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, ops
from max.graph.quantization import QuantizationEncoding
from max.graph.weights import SafetensorsFile, WeightData
from max.pipelines.checkpoints.encodings import QUANTIZED_KINDS, block_encoding
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.core.native_calls import native_calls

__all__ = ["Quantizer", "encoding_for", "of_whole_blocks", "quantized_state_dict"]

logger = logging.getLogger("max.pipelines")

_FLOATS = (DType.float32, DType.bfloat16, DType.float16)
# projections of experts are stacked: [experts, rows, columns]
_MATRICES = re.compile(
    r"(_proj|_proj_(qkvz|qkv|z|with_mqa)|indexer\.w(q_b|k)|per_layer_(input_gate|projection)|"
    r"latent_(in|out)|project_(in|out)|lm_head|embed_tokens|embed_tokens_per_layer)\.weight$"
)
_STACKED = re.compile(r"\.experts\.\w+_proj\.weight$")
_OF_TOKENS = re.compile(r"(^|\.)(lm_head|embed_tokens|embed_tokens_per_layer)\.weight$")
_SMALLER = {"q4_k": "q4_0", "q5_k": "q8_0", "q6_k": "q8_0"}
"""The encoding of matrices whose number of columns is not a multiple of 256."""
_OF_8_BITS = ("q8_0", "int8")
_BLOCKS_AT_ONCE = 1 << 15
_FORMAT = 2
"""The version of the encoders; cached weights of other versions are not read."""


def of_whole_blocks(quantize: str, columns: int) -> str:
    """The encoding of a matrix, or the one that takes its place where rows are no whole blocks of 256.

    Args:
        quantize: One of `QUANTIZED_KINDS`.
        columns: The number of columns.
    """
    return _SMALLER.get(quantize, quantize) if columns % 256 else quantize


def encoding_for(name: str, shape: Sequence[int], quantize: str) -> str | None:
    """The encoding of a weight; None if the weight stays as it is.

    Encoded are the matrices of projections, including stacked ones of experts, of embeddings and of the output layer;
    the last two with at least 6 bits, as in llama.cpp. Routers of experts, convolutions, Gemma 3n's small updates and
    the index head weights of DeepSeek V3.2 stay floats.

    Args:
        name: The weight's name in the model.
        shape: Its shape.
        quantize: One of `QUANTIZED_KINDS`.
    """
    stacked = len(shape) == 3 and _STACKED.search(name) is not None
    if not (stacked or len(shape) == 2) or not shape[-1] or not _MATRICES.search(name):
        return None
    if name.endswith(".kv_b_proj.weight"):  # latent attention splits it at load
        return None
    # small, and errors would change which tokens attention reads
    if name.endswith(".indexer.weights_proj.weight"):
        return None
    if quantize in ("q4_0", "q4_k", "q5_k") and _OF_TOKENS.search(name):
        quantize = "q6_k"
    quantize = of_whole_blocks(quantize, shape[-1])
    return None if shape[-1] % 32 else quantize


class Quantizer:
    """Encodes float weights with kernels.

    Args:
        session: Compiles and runs the kernels.
    """

    def __init__(self, session: InferenceSession) -> None:
        self._session = session
        self._programs: dict[tuple[DType, str, bool], Model] = {}

    def encode(
        self, weight: WeightData, quantize: str, importance: npt.NDArray[np.float32] | None = None
    ) -> WeightData:
        """Encodes a weight in blocks.

        Args:
            weight: Floats ``[…, rows, columns]``; the number of columns is a multiple of the block size.
            quantize: One of `QUANTIZED_KINDS`; ``int8`` has one scale per row, in blocks of Q8_0.
            importance: The weights of the columns' squared errors, ``[columns]``, or ``[…, columns]`` for each matrix;
                ignored by 8-bit encodings. None: all columns have equal weight.

        Returns:
            uint8 ``[…, rows, bytes]``.

        Raises:
            ModelFilesError: A value is not finite, or too large for float16 scales.
        """
        values = Tensor.from_dlpack(weight.data)
        if values.dtype not in _FLOATS:
            values = Tensor.from_dlpack(weight.astype(DType.float32).data)
        stored = values.to_numpy()
        if quantize in _OF_8_BITS:
            importance = None
        if importance is not None and importance.ndim > 1:
            matrices = [
                self._blocks(weight.name, matrix, values.dtype, quantize, columns)
                for matrix, columns in zip(
                    stored.reshape(-1, *stored.shape[-2:]),
                    importance.reshape(-1, stored.shape[-1]),
                    strict=True,
                )
            ]
            out = np.concatenate(matrices)
        else:
            array = stored.reshape(-1, stored.shape[-1])
            out = self._blocks(weight.name, array, values.dtype, quantize, importance)
        encoding = block_encoding(quantize)
        return WeightData._from_tensor(  # pyright: ignore[reportPrivateUsage]
            Tensor.from_numpy(out.reshape(*stored.shape[:-1], -1)), weight.name, encoding
        )

    def _blocks(
        self,
        name: str,
        array: npt.NDArray[Any],
        dtype: DType,
        quantize: str,
        importance: npt.NDArray[np.float32] | None,
    ) -> npt.NDArray[np.uint8]:
        """Encodes a matrix ``[rows, columns]``, and returns its blocks."""
        rows, columns = array.shape
        encoding = block_encoding(quantize)
        elements, size = BLOCK_FORMATS[encoding.value]
        out = np.empty((rows, columns // elements * size), np.uint8)
        step = max(_BLOCKS_AT_ONCE * elements // columns, 1)
        for start in range(0, rows, step):
            part = np.ascontiguousarray(array[start : start + step])
            _check(name, part)
            if quantize == "int8":
                out[start : start + step] = _rows_of_int8(part)
                continue
            operands = [Tensor.from_numpy(part)]
            if importance is not None:
                operands.append(Tensor.from_numpy(importance))
            program = self._program(dtype, encoding.value, importance is not None)
            blocks = program.execute(*operands)[0]
            assert isinstance(blocks, Tensor)
            out[start : start + step] = blocks.to_numpy()
        return out

    def _program(self, dtype: DType, encoding: str, weighted: bool) -> Model:
        """The model that quantizes `[rows, columns]`; compiled once per dtype and encoding."""
        key = dtype, encoding, weighted
        if key not in self._programs:
            types = [TensorType(dtype, ["rows", "columns"], DeviceRef.CPU())]
            if weighted:
                types.append(TensorType(DType.float32, ["columns"], DeviceRef.CPU()))
            with Graph(f"quantize_{encoding}", input_types=types) as graph:
                inputs = [value.tensor for value in graph.inputs]
                graph.output(ops.quantize(QuantizationEncoding(encoding), *inputs))
            self._programs[key] = self._session.load(graph)
        return self._programs[key]


def _check(name: str, values: np.ndarray[Any, Any]) -> None:
    """Refuses values that blocks cannot represent."""
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(values).max().astype(np.float64)) if values.size else 0.0
    # a scale is at most the largest value divided by 8, and 65504 is the largest float16
    if not largest <= 65504 * 8:
        raise ModelFilesError(
            f"weight {name!r} has the value {largest}, which quantized blocks do not hold",
            "Leave out --quantize, or check the checkpoint.",
        )


def _rows_of_int8(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Q8_0 blocks in which all blocks of a row have the same scale."""
    floats = values.astype(np.float32)
    half = (np.abs(floats).max(1, keepdims=True) / 127).astype(np.float16)
    scale = half.astype(np.float32)
    q = np.rint(floats / np.where(scale == 0, np.float32(1), scale))
    q = np.clip(q, -127, 127).astype(np.int8).reshape(len(values), -1, 32)
    scales = np.broadcast_to(half[:, None], (*q.shape[:2], 1))
    blocks = [np.ascontiguousarray(scales).view(np.uint8), q.view(np.uint8)]
    return np.concatenate(blocks, 2).reshape(len(values), -1)


def quantized_state_dict(
    state_dict: Mapping[str, WeightData],
    quantize: str,
    session: InferenceSession,
    files: Sequence[Path],
) -> dict[str, WeightData]:
    """Quantizes the float matrices of a model; reads them from the cache if they were quantized before.

    Args:
        state_dict: The weights by the model's names.
        quantize: One of `QUANTIZED_KINDS`.
        session: Compiles and runs the kernels.
        files: The files of the weights, which identify cached weights.

    Raises:
        ModelFilesError: A weight has values that blocks cannot represent.
    """
    assert quantize in QUANTIZED_KINDS
    plan = dict(_plan(state_dict, quantize))
    cached = _stored_weights(files, plan)
    if cached is None:
        quantizer = Quantizer(session)
        cached = {}
        for name, chosen in plan.items():
            STEPS.at("quantizing weights", len(cached), len(plan))
            cached[name] = quantizer.encode(state_dict[name], chosen)
        _remember(files, plan, cached)
    return {**state_dict, **cached}


def _plan(state_dict: Mapping[str, WeightData], quantize: str) -> Iterator[tuple[str, str]]:
    for name, value in state_dict.items():
        if value.quantization_encoding is None and value.dtype.is_float():
            chosen = encoding_for(name, [int(size) for size in value.shape], quantize)
            if chosen is not None:
                yield name, chosen


# the cache -------------------------------------------------------------------------------------


def _folder() -> Path:
    return cache_dir() / QUANTIZED_FOLDER


def _key(files: Sequence[Path], plan: Mapping[str, str]) -> Path:
    stats = [(os.path.realpath(path), path.stat()) for path in files]
    identity = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    text = json.dumps([_FORMAT, identity, sorted(plan.items())])
    return _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.safetensors"


def _stored_weights(files: Sequence[Path], plan: Mapping[str, str]) -> dict[str, WeightData] | None:
    """The stored weights of a plan; None if they are absent or of another plan."""
    path = _key(files, plan)
    try:
        file = SafetensorsFile(path)
    except (OSError, ValueError):
        return None
    if file.entries.keys() != plan.keys():
        return None
    weights: dict[str, WeightData] = {}
    for name, quantize in plan.items():
        weights[name] = WeightData._from_tensor(  # pyright: ignore[reportPrivateUsage]
            file.read(name), name, block_encoding(quantize)
        )
    os.utime(path)
    return weights


def _remember(
    files: Sequence[Path], plan: Mapping[str, str], weights: Mapping[str, WeightData]
) -> None:
    """Writes quantized weights to the cache, and removes those of the same files in other encodings."""
    path = _key(files, plan)
    first = hashlib.sha256(os.path.realpath(files[0]).encode()).hexdigest()[:16]
    temporary = path.with_suffix(f".{os.getpid()}.part")
    # names the cached file of the same checkpoint, which one of another kind replaces
    mark = _folder() / f"{first}.of"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: Tensor.from_dlpack(w.data).to_numpy() for name, w in weights.items()}
        with native_calls("the quantized weights cannot be stored"):
            save_file(arrays, temporary)
        temporary.replace(path)
        if mark.is_file() and (before := mark.read_text("utf-8")) != path.name:
            (_folder() / Path(before).name).unlink(missing_ok=True)
        mark.write_text(path.name, "utf-8")
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        logger.warning("the quantized weights are not remembered: %s", error)
