"""The kernels of regions on the CPU, written in the kernel language.

* :mod:`axes` chooses the vectorized and the tiled axes;
* :mod:`vector_width` chooses the number of vectors in a step;
* :mod:`accumulators` writes reductions;
* :mod:`nest` writes the loops.
"""
