"""The process and the operating system that it runs in: what every layer may use, whatever device it works for.

* :mod:`max._host.machine`: the system, the CPUs and the memory that affinity and control groups leave to the process;
* :mod:`max._host.process_caches`: caches that live as long as the process, in an owner that tests make anew;
* :mod:`max._host.reentry`: locks, and what signal handlers, finalizers and forks may interrupt;
* :mod:`max._host.garbage`: fewer passes of Python's garbage collector;
* :mod:`max._host.threads`, :mod:`max._host.interrupts`: threads that signal handlers may start; signals and events that
  end an execution;
* :mod:`max._host.host_memory`, :mod:`max._host.reserve`, :mod:`max._host.guard`: blocks of memory, blocks whose pages
  are requested early, blocks between guard pages;
* :mod:`max._host.cache_folders`, :mod:`max._host.private_folder`, :mod:`max._host.disk_cache`: the folders of the
  cache, who may write to them, and files by content hash.

What native code needs of the system is the backend's: `max._backends.cpu.runtime.platform`.
"""
