"""What the runtimes of all devices share: programs, the disk cache, the memory of the host, interrupts.

* :mod:`max._runtime.program` has programs as plain data, and the errors of their kernels;
* :mod:`max._runtime.cache` keeps compiled code between processes;
* :mod:`max._runtime.interrupts` ends executions on signals and events;
* :mod:`max._runtime.platform` is the only module with code for particular operating systems and processors.

docs/runtime.md explains how they work together.
"""
