"""The process that keeps a Ray cluster of a server, with a package `ray` that only notes its calls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from max.pipelines.core.exceptions import ConfigError
from max.serve.remote import ray_keeper
from max.serve.remote.ray_keeper import kept_cluster
from max.serve.routers import lifeline

RAY = """
import os, types
folder = os.environ["NOTED_CALLS"]

def note(name):
    with open(f"{folder}/{name}", "a") as file:
        file.write(f"{os.getpid()}\\n")

def init(**options):
    assert "address" not in options
    note("init")
    os.environ["RAY_AUTH_MODE"] = "token"  # as Ray does
    if os.path.exists(f"{folder}/fails"):
        raise RuntimeError("no machine")

def shutdown():
    note("shutdown")

def get_runtime_context():
    return types.SimpleNamespace(gcs_address=f"10.0.0.1:{os.getpid()}")
"""


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    """The end of the first process; its close ends what it keeps."""
    (tmp_path / "ray.py").write_text(RAY)
    monkeypatch.setenv("NOTED_CALLS", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "")  # so that it is as before in the end
    monkeypatch.delenv("RAY_AUTH_MODE")
    read, kept = Pipe(duplex=False)
    lifeline.hold(read)
    yield kept
    lifeline.hold(None)
    kept.close()
    read.close()


def calls(folder: Path, name: str) -> list[int]:
    """The processes that have called a function."""
    path = folder / name
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(holds: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():  # pyright: ignore[reportCallIssue]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_cluster_is_kept_for_the_next_owner(life: Connection, tmp_path: Path) -> None:
    address = kept_cluster(str(tmp_path))
    (keeper,) = calls(tmp_path, "init")
    assert address == f"10.0.0.1:{keeper}" and keeper != os.getpid()
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert kept_cluster(str(tmp_path)) == address
    # one that is gone is not joined
    os.kill(keeper, signal.SIGKILL)
    until(lambda: not ray_keeper._is_locked(tmp_path / "cluster"))
    second = kept_cluster(str(tmp_path))
    assert second != address and len(calls(tmp_path, "init")) == 2
    assert not calls(tmp_path, "shutdown")
    life.close()
    until(lambda: calls(tmp_path, "shutdown") == calls(tmp_path, "init")[1:])


def test_a_cluster_that_cannot_be_started(life: Connection, tmp_path: Path) -> None:
    (tmp_path / "fails").touch()
    with pytest.raises(ConfigError, match="no Ray cluster can be started"):
        kept_cluster(str(tmp_path))
    assert len(calls(tmp_path, "init")) == 3 and not calls(tmp_path, "shutdown")
