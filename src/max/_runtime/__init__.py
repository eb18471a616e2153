"""From kernels to running code: LLVM JIT, disk cache, worker pool, executor.

* :mod:`max._runtime.jit` compiles kernels to addresses, through the disk cache;
* :mod:`max._runtime.cache` keeps compiled code between processes;
* :mod:`max._runtime.pool` has the worker threads that run programs together;
* :mod:`max._runtime.program` walks a flat list of launches with them;
* :mod:`max._runtime.amx` decides whether kernels may use the processor's matrix tiles;
* :mod:`max._runtime.platform` is the only module with code for particular operating systems and processors.

docs/runtime.md explains how they work together.
"""
