"""The graph compiler: from a module of `mo` to a program of kernel launches.

:mod:`max._compiler.pipeline` lists the passes and runs them; docs/compiler.md explains them.
"""
