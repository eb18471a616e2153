"""The process that keeps a Ray cluster which a server has started, so that it outlives the owner of the engines.

Ray ends a cluster with the process that has started it. Where another process would own the engines next, that is one
which does nothing else. It holds a lock of a file with the cluster's address, and ends with the first process of the
server.
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from max._config import process_environment, set_missing_variables
from max.pipelines.core.exceptions import ConfigError
from max.serve.routers import lifeline

logger = logging.getLogger("max.serve")

START_S = 120.0
"""The longest time in seconds until a cluster has started."""
_NAME = "cluster"
_MODE = "RAY_AUTH_MODE"
_LOOK_S = 0.1
_LOCK_S = 2.0
_MOST_STARTS = 3


def start_options() -> dict[str, Any]:
    """How a server calls ``ray.init``, but for the address; sets the variables that Ray reads."""
    # else actors run after all other work of their machine
    set_missing_variables({"RAY_worker_niceness": "0"})
    return {"log_to_driver": False, "include_dashboard": False, "logging_level": logging.WARNING}


def kept_cluster(folder: str) -> str:
    """The address of a server's cluster; starts one if none is kept, unless Ray knows one of this machine.

    Sets the variable by which Ray, which is not imported yet, has the cluster's way to prove who asks: a process that
    starts a cluster sets it itself, and one that joins by an address does not.

    Args:
        folder: The folder of the server.

    Raises:
        ConfigError: None can be started.
    """
    path = Path(folder) / _NAME
    end = time.monotonic() + START_S
    process, starts = None, 0
    while time.monotonic() < end:
        # locked and empty: it starts
        if _is_locked(path) and (found := path.read_text().split()):
            address, *mode = found
            if mode:
                set_missing_variables({_MODE: mode[0]})
            return address
        if process is not None and not process.is_alive():
            process = None
            if starts == _MOST_STARTS:
                break
        if process is None and not _is_locked(path):
            starts += 1
            path.write_text("")  # that of one that is gone
            process = multiprocessing.get_context("spawn").Process(
                target=_keep,
                args=(str(path), lifeline.current_lifeline()),
                name="max cluster",
                daemon=True,
            )
            process.start()
        time.sleep(_LOOK_S)
    raise ConfigError(
        "no Ray cluster can be started on this machine",
        "Start one with `ray start --head`, which says why, and give --ray-address.",
    )


def _is_locked(path: Path) -> bool:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        return not _lock(file)
    finally:
        os.close(file)


def _lock(file: int) -> bool:
    """Whether this process has the lock now; it has it until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _keep(path: str, life: Connection) -> None:
    """The main function of the process."""
    # signals of a terminal reach all processes; the end of the first one is the sign
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    file = os.open(path, os.O_RDWR)
    end = time.monotonic() + _LOCK_S
    while not _lock(file):  # an owner looks
        if time.monotonic() > end:
            return  # another process keeps a cluster
        time.sleep(_LOOK_S / 4)
    import ray  # pyright: ignore[reportMissingImports]

    try:
        ray.init(**start_options())
    except Exception as error:  # as on a machine that is too busy for Ray
        logger.error("no Ray cluster is started or joined: %s", error)
        sys.exit(1)
    # an owner that ends in order ends its children; Ray's own handler prints stacks
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        address, mode = ray.get_runtime_context().gcs_address, process_environment().get(_MODE, "")
        os.pwrite(file, f"{address} {mode}".encode(), 0)
        wait([life])
    finally:
        ray.shutdown()
