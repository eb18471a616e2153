"""The graph compiler: from a module of `mo` to a program of kernel launches.

:mod:`max._compiler.pipeline` has the list of passes and the function that runs everything; docs/compiler.md explains
it.
"""
