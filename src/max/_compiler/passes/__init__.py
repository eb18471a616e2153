"""The passes, a file each; :mod:`max._compiler.pipeline` has their order.

A pass is a frozen dataclass with a name and a ``run`` method that changes a module in place: a valid module goes in and
a valid module comes out. The work is done by a plain function over one graph, so that it can be read and tested alone.
"""
