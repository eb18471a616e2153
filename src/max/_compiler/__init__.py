"""The graph compiler: from a module of `mo` to a program of kernel launches.

:mod:`max._compiler.pipeline` lists the passes and runs them; docs/compiler.md explains them. The folders are in the
order of a compilation: `passes` rewrite `mo` and group it into regions (`mok`), with the facts of `analysis`;
`lowering` makes launches of ops, with the text that `codegen` writes; `program` plans memory and emits a program.
"""
