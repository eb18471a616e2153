"""From a fused region to the source of a kernel in the kernel language.

* :mod:`spec` describes a region as plain data: an iteration space, leaves, nodes, results;
* :mod:`expressions` writes one node as an expression;
* :mod:`functions` has the functions of the kernel language that expressions call;
* :mod:`values` writes the values of a region as assignments;
* :mod:`axes` chooses the vectorised and the tiled axes;
* :mod:`nest` writes the loops around the values;
* :mod:`epilogue` writes the function that a library kernel calls on its results.
"""
