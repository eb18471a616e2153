"""Array operations that several threads share."""

from max.nn.parallel.numpy_parallel_ops import ParallelArrayOps

__all__ = ["ParallelArrayOps"]
