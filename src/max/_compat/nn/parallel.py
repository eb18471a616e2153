"""Concatenation of NumPy arrays by a pool of threads."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from max._errors import AxisError
from max.driver import Device, Tensor

__all__ = ["ParallelArrayOps"]

_Array = npt.NDArray[Any]


class ParallelArrayOps:
    """Copies arrays into one by several threads; NumPy's copies run without Python's lock.

    Args:
        accelerator: An accelerator whose page-locked memory holds the results; None for the host's.
        max_workers: The greatest number of threads.

    Raises:
        ValueError: `max_workers` is less than 1, or the device is no accelerator.
        TypeError: `max_workers` is not an int.
    """

    __module__ = "max.nn.parallel.numpy_parallel_ops"

    def __init__(self, accelerator: Device | None = None, max_workers: int = 24) -> None:
        workers = operator.index(max_workers)
        if workers < 1:
            raise ValueError(f"ParallelArrayOps: max_workers is {max_workers}, expected 1 or more")
        if accelerator is not None and accelerator.is_host:
            raise ValueError(
                f"ParallelArrayOps: {accelerator!r} has no page-locked memory, expected an accelerator or None"
            )
        self._accelerator, self._workers = accelerator, workers
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def concatenate(
        self, arrays: Sequence[_Array], axis: int = 0, min_chunk_size_mb: float = 50.0
    ) -> Tensor:
        """The arrays one after the other along an axis, as `numpy.concatenate`; always a copy.

        Args:
            arrays: Arrays of one dtype, and of one shape but for the axis.
            axis: The axis; negative counts from the last.
            min_chunk_size_mb: The least size of the parts into which large arrays are split.

        Raises:
            ValueError: There are no arrays, or dtypes or shapes differ.
            AxisError: The axis is out of range; it is an IndexError too.
        """
        parts = list(arrays)
        if not parts:
            raise ValueError("concatenate: there are no arrays, expected at least one")
        first = parts[0]
        for index, part in enumerate(parts):
            if not isinstance(part, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(
                    f"concatenate: array {index} is a {type(part).__name__}, expected a NumPy array"
                )
            if part.dtype != first.dtype:
                raise ValueError(
                    f"concatenate: array {index} is {part.dtype}, array 0 is {first.dtype}"
                )
        if not -first.ndim <= axis < first.ndim:
            raise AxisError(f"concatenate: axis {axis} is out of range for rank {first.ndim}")
        axis %= first.ndim
        rest = [n for i, n in enumerate(first.shape) if i != axis]
        for index, part in enumerate(parts):
            if (
                part.ndim != first.ndim
                or [n for i, n in enumerate(part.shape) if i != axis] != rest
            ):
                raise ValueError(
                    f"concatenate: array {index} has shape {part.shape}, array 0 {first.shape}; they may differ in "
                    f"axis {axis} only"
                )
        sizes = [part.shape[axis] for part in parts]
        shape = (*first.shape[:axis], sum(sizes), *first.shape[axis + 1 :])
        result = np.empty(shape, first.dtype)
        copies: list[tuple[_Array, _Array]] = []
        start = 0
        for part, size in zip(parts, sizes, strict=True):
            target = np.moveaxis(result, axis, 0)[start : start + size]
            source = np.moveaxis(part, axis, 0)
            count = self._chunks(part.nbytes, size, min_chunk_size_mb, len(parts))
            edges = [size * i // count for i in range(count + 1)]
            copies += [
                (target[low:high], source[low:high])
                for low, high in zip(edges, edges[1:], strict=False)
            ]
            start += size
        self._copy(copies)
        tensor = Tensor.from_numpy(result)
        return tensor if self._accelerator is None else tensor.to(self._accelerator)

    def _chunks(self, nbytes: int, size: int, least: float, arrays: int) -> int:
        """The number of parts into which an array is split."""
        if self._workers <= arrays:  # there is one for each thread
            return 1
        most = nbytes // int(least * (1 << 20)) if least * (1 << 20) >= 1 else nbytes
        return max(1, min(self._workers, size, most))

    def _copy(self, copies: list[tuple[_Array, _Array]]) -> None:
        if len(copies) == 1 or self._workers == 1 or self._closed:
            for target, source in copies:
                np.copyto(target, source)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, "max-arrays")
        for done in [self._pool.submit(np.copyto, target, source) for target, source in copies]:
            done.result()

    def shutdown(self, wait: bool = True) -> None:
        """Ends the threads; later calls copy by the calling thread.

        Args:
            wait: Whether to wait for copies in progress.
        """
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait, cancel_futures=not wait)
            self._pool = None

    def __del__(self) -> None:
        if getattr(self, "_pool", None) is not None:
            self.shutdown(wait=False)
