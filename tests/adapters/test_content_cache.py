"""Contents of adapters in a file without a name, against a dictionary, and adapters that are served from it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max.pipelines.adapters import content_cache
from max.pipelines.adapters import manager as adapter_manager
from max.pipelines.adapters.adapter import AdapterError
from max.pipelines.adapters.content_cache import ContentCache
from max.pipelines.generation.generation import Generation
from tests.adapters.test_pipelines import context, pipeline
from tests.adapters.tiny_chat import make_adapter


def pieces_of(contents: bytes | bytearray, count: int) -> list[memoryview]:
    """Bytes in pieces of several sizes, some of them empty."""
    cuts = sorted(np.random.default_rng(count).integers(0, len(contents) + 1, count).tolist())
    bounds = [0, *cuts, len(contents)]
    view = memoryview(contents)
    return [view[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def restored(kept: ContentCache, digest: str, size: int, count: int = 3) -> bytes | None:
    memory = bytearray(size)
    return bytes(memory) if kept.restore(digest, pieces_of(memory, count)) else None


def test_random_contents() -> None:
    """The least recently used contents are evicted first; kept ones are restored whole, however they are split."""
    rng, limit = np.random.default_rng(2), 4000
    kept, expected = ContentCache(limit), dict[str, bytes]()
    missing = 0
    for _ in range(600):
        digest = str(rng.integers(0, 14))
        if digest not in expected:
            contents = rng.bytes(int(rng.integers(1, 900)))
            kept.keep(digest, pieces_of(contents, int(rng.integers(0, 1500))))
            expected[digest] = contents
            assert kept.has(digest)
        elif rng.random() < 0.1:
            kept.forget(digest)
            del expected[digest]
            assert not kept.has(digest)
        else:
            size = len(expected[digest])
            found = restored(kept, digest, size, int(rng.integers(0, 1500)))
            missing += found is None
            assert found in (None, expected[digest])
            if found is None:
                del expected[digest]
    assert 0 < missing < 200
    assert kept._file is not None and kept._file.seek(0, 2) <= limit


def test_the_least_recently_used_go_first() -> None:
    kept = ContentCache(30)
    for name in "abc":
        kept.keep(name, [memoryview(name.encode() * 10)])
    assert restored(kept, "a", 10) == b"a" * 10
    kept.keep("b", [memoryview(b"x" * 10)])  # is there, and was used now
    kept.keep("d", [memoryview(b"d" * 7)])
    assert [kept.has(name) for name in "abcd"] == [True, True, False, True]
    kept.keep("e", [memoryview(b"e" * 31)])
    assert not kept.has("e") and kept.has("a")
    kept.keep("f", [memoryview(b"f" * 3)])
    assert all(kept.has(name) for name in "abdf")
    assert restored(kept, "b", 10) == b"b" * 10


def test_systems_that_write_no_pieces_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pwritev", "preadv"):
        monkeypatch.delattr(os, name)
    kept = ContentCache(1000)
    kept.keep("a", pieces_of(bytes(100), 2))
    assert not kept.has("a") and restored(kept, "a", 100) is None


def test_files_that_cannot_be_written_or_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(content_cache, "cache_dir", lambda: tmp_path / "file")
    kept = ContentCache(100)
    kept.keep("a", [memoryview(b"abc")])
    assert not kept.has("a") and restored(kept, "a", 3) is None
    monkeypatch.setattr(content_cache, "cache_dir", lambda: tmp_path / "new" / "folder")
    kept.keep("a", [memoryview(b"abc")])
    assert kept.has("a") and not list((tmp_path / "new" / "folder").iterdir())
    assert kept._file is not None
    kept._file.truncate(2)
    assert restored(kept, "a", 3) is None and not kept.has("a")


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [
        make_adapter(tmp_path / f"a{n}", n, rank, dora=n == 2) for n, rank in enumerate((4, 1, 3))
    ]


def text(of: Any, name: str) -> list[int]:
    (output,) = Generation.of(of).run([context([5, 6, 7, 8, 9], name)])
    return output.tokens


def test_adapters_are_not_read_again(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer slots than adapters, those that were loaded are served whatever happens to their files."""
    names = ["a0", "a1", "a2"]
    expected = [text(pipeline(folders), name) for name in names]
    own = pipeline(folders, slots=1)
    reads: list[str] = []
    monkeypatch.setattr(own.lora_manager, "_read_unchanged", lambda loaded: reads.append(loaded))
    for folder in folders:
        shutil.rmtree(folder)
    for _ in range(2):
        assert [text(own, name) for name in names] == expected
    for name in names:
        own.lora_manager.prepare(name)
    assert not reads
    assert all(not loaded.packed for loaded in own.lora_manager._by_name.values())


def test_equal_adapters_share_contents(folders: list[Path]) -> None:
    own = pipeline(folders, slots=1)
    manager, kept = own.lora_manager, own.lora_manager._kept
    manager.load("same", folders[1])
    digest = manager._by_name["a1"].digest
    assert kept.has(digest)
    manager.unload("same")
    assert kept.has(digest)
    manager.unload("a1")
    assert not kept.has(digest)


def test_without_room_files_are_read_again(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All checks are made again, and files that changed are refused."""
    monkeypatch.setattr(adapter_manager, "KEPT_BYTES", 0)
    own = pipeline(folders, slots=1)
    expected = [text(pipeline(folders), f"a{n}") for n in range(3)]
    assert [text(own, f"a{n}") for n in range(3)] == expected
    shutil.rmtree(folders[0])
    make_adapter(folders[0], 7, 4)
    with pytest.raises(AdapterError, match="the files of the adapter 'a0' have changed"):
        own.lora_manager.prepare("a0")
