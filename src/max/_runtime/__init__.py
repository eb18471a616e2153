"""From kernels to running code: LLVM JIT, disk cache, worker pool, executor.

* :mod:`max._runtime.jit` compiles kernels to addresses, through the disk cache;
* :mod:`max._runtime.cache` keeps compiled code between processes;
* :mod:`max._runtime.pool` has the worker threads that run programs together;
* :mod:`max._runtime.program` walks a flat list of launches with them;
* :mod:`max._runtime.amx` says whether the matrix tiles of the processor may be used;
* :mod:`max._runtime.platform` is the one module that knows operating systems and processors apart.

docs/runtime.md explains how they work together.
"""
