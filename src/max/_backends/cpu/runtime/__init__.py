"""From kernels to running code on the CPU: LLVM JIT, worker pool, executor.

* :mod:`max._backends.cpu.runtime.jit` compiles kernels to addresses, through the disk cache;
* :mod:`max._backends.cpu.runtime.pool` has the worker threads that run programs together;
* :mod:`max._backends.cpu.runtime.executor` walks a flat list of launches with them;
* :mod:`max._backends.cpu.runtime.amx` decides whether kernels may use the processor's matrix tiles.

docs/runtime.md explains how they work together.
"""
