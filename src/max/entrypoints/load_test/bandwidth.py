"""The bandwidth of reading memory, and how much of it products with weights of each format reach.

Reads and products are measured in turn, as the bandwidth of a shared machine changes within seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from max import kernel as k
from max._host.machine import available_memory, last_level_cache
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.engine.explain import explanations
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.graph.quantization import QuantizationEncoding

__all__ = ["FORMATS", "FORMAT_HEADER", "RUNS", "FormatSpeed", "Reads", "measure_formats"]

RUNS = 9
"""The number of reads and of products of each format, of which medians count."""
WEIGHT_BYTES = 96 << 20
"""The size of a weight; reads in between displace it from the caches."""
LEAST_READ = 256 << 20
"""The fewest bytes that reads sum."""
INNER = 2048
"""The number of inputs of a product."""
FORMATS: dict[str, DType] = {
    "float32": DType.float32,
    "bfloat16": DType.bfloat16,
    **{e.value: DType.uint8 for e in QuantizationEncoding if e is not QuantizationEncoding.GPTQ},
}
"""The dtypes of stored weights by the names of their formats."""

_PIECE = 1 << 14
"""Elements that a worker reads of each stream of a task: 64 KB."""
_STREAMS = 4
_LINE = 16
"""Elements of a cache line."""
_READ = "max.bandwidth.read"
_WAYS = ((1, 0, 0), (_STREAMS, 0, 0), (2, 1024, 4096), (_STREAMS, 1024, 2048))
"""Streams that a worker reads in turn, and the distances in bytes of prefetches into the L1 and into the L2 cache; 0:
there are none. Which is fastest depends on the processor: hardware prefetchers follow a stream within a page only."""


FORMAT_HEADER = f"{'format':<12}{'GB/s':>8}{'packed':>8}{'of reads':>10}"
"""The header of a table of `FormatSpeed.row`."""


class FormatSpeed(NamedTuple):
    """The speed of a product of one row and a weight that caches do not hold.

    Args:
        stored: Bytes of the stored weight in a second.
        packed: Bytes of the packed weight in a second, which is what the product reads.
        share: `packed` as a share of the bandwidth of reads, measured in turn.
    """

    stored: float
    packed: float
    share: float

    def row(self, encoding: str) -> str:
        """A line of the table that `FORMAT_HEADER` begins."""
        return (
            f"{encoding:<12}{self.stored / 1e9:>8.3g}{self.packed / 1e9:>8.3g}{self.share:>10.0%}"
        )

    def __str__(self) -> str:
        packed = (
            ""
            if abs(self.packed / self.stored - 1) < 0.005
            else f" ({self.packed / 1e9:.3g} as packed)"
        )
        return (
            f"{self.stored / 1e9:.3g} GB/s of the stored weight{packed}, {self.share:.0%} of reads"
        )


@k.register(_READ)
def _read(out: k.Output, x: k.Input, ctx: k.Context, *, streams: int, near: int, far: int) -> None:
    """Sums the elements of tasks, `x` `[tasks, streams, elements]`, in the lanes of `out` `[tasks, lanes]`."""
    width = ctx.target.width(k.i32)
    step = 4 * _LINE
    for task in ctx.parallel(x.shape[0]):
        sums = k.tile(k.i32, (step // width,), width=width, fill=0)
        for begin in range(0, x.shape[2], step):
            for stream in k.static_range(streams):
                for i in k.static_range(0, step, width):
                    if far and i % _LINE == 0:
                        x.prefetch(task, stream, begin + i + far // 4, locality=2)
                    if near and i % _LINE == 0:
                        x.prefetch(task, stream, begin + i + near // 4, locality=3)
                    sums[i // width] += x.load(task, stream, begin + i, width=width)
        total = sums[0]
        for i in k.static_range(1, step // width):
            total += sums[i]
        out[task] = k.reduce_add(total)


def _reader(streams: int, near: int, far: int, tasks: int) -> Model:
    """A model that reads `[tasks, streams, elements]`."""
    device = DeviceRef.CPU()
    kind = TensorType(DType.int32, (tasks, streams, _PIECE), device)
    with Graph("read", input_types=[kind]) as graph:
        results = [TensorType(DType.int32, (tasks,), device)]
        parameters = {"streams": streams, "near": near, "far": far}
        graph.output(ops.custom(_READ, device, list(graph.inputs), results, parameters)[0])
    return InferenceSession(devices=[CPU()]).load(graph)


class _Way(NamedTuple):
    model: Model
    memory: Tensor


class Reads:
    """Reads of more memory than the caches hold, as far as a quarter of what is available, in the fastest of several
    ways.
    """

    def __init__(self) -> None:
        available = available_memory()
        num_bytes = max(LEAST_READ, last_level_cache() * 5 // 4)  # more than the caches hold
        if available is not None:
            num_bytes = min(num_bytes, available // 4)
        tasks = max(num_bytes // (4 * _PIECE * _STREAMS), 1)
        self._memory = Tensor.zeros((tasks * _STREAMS * _PIECE,), DType.int32, CPU())
        # zeros that were never written share one page
        np.from_dlpack(self._memory)[...] = 1
        self._bytes = 4 * self._memory.num_elements
        ways = [
            _Way(
                _reader(s, near, far, tasks * _STREAMS // s),
                self._memory.view(DType.int32, (tasks * _STREAMS // s, s, _PIECE)),
            )
            for s, near, far in _WAYS
        ]
        speeds = [max(self._speed_of(each) for _ in range(3)) for each in ways]
        self._fastest = ways[speeds.index(max(speeds))]

    def _speed_of(self, way: _Way) -> float:
        return self._bytes / _seconds(*way)

    def speed(self) -> float:
        """Bytes that are read in a second, measured once."""
        return self._speed_of(self._fastest)


def _seconds(model: Model, tensor: Tensor) -> float:
    begin = time.perf_counter()
    model.execute(tensor)
    return time.perf_counter() - begin


def _product(encoding: str) -> tuple[Model, Tensor, int, int]:
    """A product of one row with a weight: the model, the row, the bytes of the stored and of the packed weight."""
    device, dtype = DeviceRef.CPU(), FORMATS[encoding]
    blocks = None if dtype.is_float() else QuantizationEncoding(encoding)
    row = INNER * dtype.size_in_bytes
    if blocks is not None:
        row = INNER // blocks.elements_per_block * blocks.block_size
    count = max(WEIGHT_BYTES // row // 32 * 32, 32)
    x_type = dtype if blocks is None else DType.float32
    with Graph("weight", input_types=[TensorType(x_type, (1, INNER), device)]) as graph:
        x = graph.inputs[0].tensor
        shape = (count, row // dtype.size_in_bytes)
        weight = Weight("w", dtype, shape, device, quantization_encoding=blocks)
        graph.output(
            x @ ops.transpose(weight, 0, 1)
            if blocks is None
            else ops.qmatmul(blocks, None, x, weight)
        )
    # small numbers, which no format overflows; their 16 upper bytes are those of a model's weights
    values = np.random.default_rng(0).integers(0, 16, (count, row), np.uint8)
    stored = Tensor.from_numpy(values).view(dtype, shape)
    with explanations() as found:
        model = InferenceSession(devices=[CPU()]).load(graph, weights_registry={"w": stored})
    packed: Any = found[0]["bytes"]["computed once"] if found else 0
    if found and f"coded {encoding}" in str(found[0]["row_thresholds"]) and dtype is DType.bfloat16:
        # the buffer has room for plain panels; sixteen upper bytes take 12 of 16 bits
        packed = values.nbytes * 3 // 4
    return model, Tensor.zeros((1, INNER), x_type, CPU()), values.nbytes, packed or values.nbytes


def measure_formats(
    reads: Reads, encodings: Iterable[str] = FORMATS
) -> Iterator[tuple[str, FormatSpeed]]:
    """Products of one row with weights of some formats, each with reads in turn.

    Args:
        reads: The reads.
        encodings: The formats, of `FORMATS`.
    """
    for encoding in encodings:
        model, row, stored, packed = _product(encoding)
        bandwidths, seconds = list[float](), list[float]()
        _seconds(model, row)  # warms up
        for _ in range(RUNS):
            bandwidths.append(reads.speed())
            seconds.append(_seconds(model, row))
        median = statistics.median(seconds)
        share = packed / median / statistics.median(bandwidths)  # of what reads reached meanwhile
        yield encoding, FormatSpeed(stored / median, packed / median, share)
