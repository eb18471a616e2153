"""The cache holds code, so that other users must not be able to write to it."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from max._host import private_folder as private_folders
from max._host.cache_folders import cache_dir
from max._host.disk_cache import Cache
from max._host.private_folder import is_private, make_private, private_folder

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX users")


class _Stat:
    def __init__(self, uid: int, mode: int) -> None:
        self.st_uid, self.st_mode = uid, mode


def test_what_other_users_own_or_can_write_is_not_private(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    for _ in range(300):
        me, uid, mode = draw.choice([0, 7, 1000]), draw.choice([0, 7, 1000]), draw.randrange(0o1000)
        monkeypatch.setattr(os, "geteuid", lambda me=me: me)
        expected = uid in {0, me} and not (mode & 0o020 or mode & 0o002)
        assert is_private(_Stat(uid, mode)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o775, 0o757, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_replaced(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("MAX_CACHE_DIR", str(folder))
    used = cache_dir()
    assert used == cache_dir()
    if mode & 0o022:
        assert used != folder and stat.S_IMODE(used.stat().st_mode) == 0o700
        assert "can be written by other users" in caplog.text and "chmod go-w" in caplog.text
        used.rmdir()
    else:
        assert used == folder and not caplog.text


def test_a_folder_of_another_user_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        private_folders.os, "geteuid", lambda: tmp_path.stat().st_uid + 41, raising=True
    )
    if tmp_path.stat().st_uid == 0:  # the administrator's files are trusted
        os.chown(tmp_path, 12345, -1)
    used = private_folder(tmp_path)
    assert used != tmp_path and "belongs to user" in caplog.text
    used.rmdir()
    absent = tmp_path / "absent"
    assert private_folder(absent) == absent and not absent.exists()


def test_files_and_folders_of_a_cache_are_for_its_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache = Cache(tmp_path / "a" / "b")
        assert cache.put("object", "0123", b"code") and cache.put("object", "0199", b"more")
    finally:
        os.umask(before)
    assert cache.get("object", "0123") == b"code"
    for path in (cache.folder, *cache.folder.rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    make_private(cache.folder, cache.folder)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_an_entry_that_others_may_have_written_is_ignored(tmp_path: Path, mode: int) -> None:
    cache = Cache(tmp_path)
    assert cache.put("object", "0123", b"code")
    cache.path("object", "0123").chmod(mode)
    assert cache.get("object", "0123") is None
    assert cache.put("object", "0123", b"code") and cache.get("object", "0123") == b"code"


def test_a_process_with_an_unsafe_folder_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    folder, temporary = tmp_path / "cache", tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o777)
    temporary.mkdir()
    script = """
import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
with Graph("add", input_types=[TensorType(DType.float32, ["n"], DeviceRef.CPU())]) as graph:
    graph.output(graph.inputs[0].tensor + 1.0)
print(InferenceSession(devices=[CPU()]).load(graph).execute(np.ones(2, np.float32))[0].to_numpy())
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"MAX_CACHE_DIR": str(folder), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "[2. 2.]" in done.stdout
    assert done.stderr.count("can be written by other users") == 1
    assert not list(folder.iterdir()) and not list(temporary.iterdir())
