"""From a fused region to the text of a kernel in the kernel language.

* :mod:`spec` describes a region as plain data: an iteration space, leaves, nodes, results;
* :mod:`expressions` writes one node as an expression;
* :mod:`functions` has the functions, in the kernel language, that expressions call;
* :mod:`nest` writes the loops around the expressions;
* :mod:`epilogue` writes the function that a library kernel calls on its results.
"""
