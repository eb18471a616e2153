"""What region writers of backends and epilogues share: the text of values in the kernel language.

`max._backends.regions` describes a region as plain data: an iteration space, leaves, nodes, results.

* :mod:`expressions` writes one node as an expression;
* :mod:`functions` has the functions of the kernel language that expressions call;
* :mod:`values` writes the values of a region as assignments;
* :mod:`centering` puts variances around exact means;
* :mod:`epilogue` writes the function that a library kernel calls on its results.
"""
