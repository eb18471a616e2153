"""The cache on disk against damage, foreign entries, races and lack of room."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from max._config import flags
from max._host.disk_cache import (
    WEIGHTS_FOLDER,
    Cache,
    _sources,  # pyright: ignore[reportPrivateUsage]
    content_key,
    default_cache,
    source_fingerprint,
)


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


@given(payload=st.binary(max_size=4096), key=st.text("0123456789abcdef", min_size=1, max_size=64))
def test_what_is_put_comes_back(tmp_path_factory, payload, key):
    folder = tmp_path_factory.mktemp("cache")
    assert Cache(folder).get("object", key) is None
    assert Cache(folder).put("object", key, payload)
    assert Cache(folder).get("object", key) == payload
    assert Cache(folder).get("program", key) is None


@given(data=st.data())
def test_a_damaged_entry_counts_as_absent_and_is_rewritten(tmp_path_factory, data):
    cache = Cache(tmp_path_factory.mktemp("cache"))
    payload = data.draw(st.binary(min_size=1, max_size=200))
    cache.put("object", "abc", payload)
    path = cache.path("object", "abc")
    whole = bytearray(path.read_bytes())
    how = data.draw(st.sampled_from(["flip", "cut", "extend"]))
    if how == "flip":
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    else:
        whole += data.draw(st.binary(min_size=1, max_size=10))
    path.write_bytes(whole)
    assert cache.get("object", "abc") is None
    assert cache.stats.num_damaged == 1
    assert cache.put("object", "abc", payload) and cache.get("object", "abc") == payload


def test_an_entry_of_another_key_is_foreign(cache):
    cache.put("object", "aaaa", b"right")
    cache.path("object", "aabb").write_bytes(cache.path("object", "aaaa").read_bytes())
    assert cache.get("object", "aabb") is None


def test_an_entry_that_is_a_folder_is_ignored(cache, caplog):
    cache.path("object", "abcd").mkdir(parents=True)
    assert cache.get("object", "abcd") is None
    assert not cache.put("object", "abcd", b"x")


@pytest.mark.parametrize("name", ["", "../etc", "a/b", ".hidden", "x" * 200, "nul\0"])
def test_names_that_leave_the_folder_are_refused(cache, name):
    with pytest.raises(ValueError, match="is no name of an entry"):
        cache.put("object", name, b"")
    with pytest.raises(ValueError, match="is no name of an entry"):
        cache.get(name, "key")


def test_a_folder_that_cannot_be_written_warns_once(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    cache = Cache(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING, "max.runtime"):
        for key in ("a", "b", "c"):
            assert not cache.put("object", key, b"x")
            assert cache.get("object", key) is None
    assert len(caplog.records) == 1 and "MAX_CACHE_DIR" in caplog.text


def test_entries_used_least_recently_go_first(tmp_path):
    cache = Cache(tmp_path, limit_bytes=50_000)
    for i in range(10):
        cache.put("object", f"k{i}", bytes(5000))
        os.utime(cache.path("object", f"k{i}"), (1000 + i, 1000 + i))
        if i == 5:
            # a hit makes the oldest entry young again
            assert cache.get("object", "k0") == bytes(5000)
    left = {i for i in range(10) if cache.get("object", f"k{i}") is not None}
    assert {0, 9} <= left and 1 not in left and cache.stats.num_evicted > 0
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) <= 50_000


def test_a_new_process_sees_what_others_left(tmp_path):
    for i in range(20):
        Cache(tmp_path, limit_bytes=20_000).put("object", f"k{i}", bytes(5000))
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) <= 20_000


def test_writers_and_readers_at_once_see_whole_entries(cache):
    payloads = [bytes([i]) * 50_000 for i in range(4)]
    wrong = []

    def work(mine):
        for _ in range(50):
            cache.put("object", "same", mine)
            if cache.get("object", "same") not in payloads:
                wrong.append(mine[:1])

    threads = [threading.Thread(target=work, args=(p,)) for p in payloads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and cache.stats.num_damaged == 0
    assert [p.name for p in cache.folder.rglob("*") if p.is_file()] == ["same"]


def test_default_cache_follows_the_flags(tmp_path, caplog):
    caplog.set_level(logging.INFO, "max.runtime")
    with flags.override(MAX_CACHE_DIR=tmp_path / "x", MAX_CACHE_SIZE=7):
        assert default_cache().folder == tmp_path / "x"
        assert default_cache().limit_bytes == 7 << 20
        assert default_cache() is default_cache()
    assert not caplog.records  # no process has left anything


def test_content_keys_tell_lists_of_parts_apart():
    keys = [
        content_key(*parts) for parts in (("ab",), ("a", "b"), ("b", "a"), ("", "ab"), ("ab", ""))
    ]
    assert len(set(keys)) == len(keys) and content_key("ab") == content_key(b"ab")
    assert {len(key) for key in keys} == {40}


def test_the_fingerprint_is_stable_between_processes():
    code = "from max._host.disk_cache import source_fingerprint as f; print(f('_host'))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == source_fingerprint("_host") != source_fingerprint("dtype")


def test_a_tenth_of_the_limit_is_free_after_entries_are_evicted(tmp_path):
    keys = [f"{number:04}" for number in range(11)]
    other = Cache(tmp_path / "other")
    other.put("object", keys[0], bytes(100))
    size = other.path("object", keys[0]).stat().st_size
    tmp_path = tmp_path / "cache"
    cache = Cache(tmp_path, 10 * size)
    # these have a limit of their own
    (tmp_path / WEIGHTS_FOLDER).mkdir(parents=True)
    (tmp_path / WEIGHTS_FOLDER / "packed").write_bytes(bytes(20 * size))
    for age, key in enumerate(keys):
        cache.put("object", key, bytes(100))
        os.utime(cache.path("object", key), (age, age))
    assert [cache.has("object", key) for key in keys] == [False] * 2 + [True] * 9
    assert (cache.stats.num_written, cache.stats.num_evicted) == (11, 2)
    assert (tmp_path / WEIGHTS_FOLDER / "packed").exists()


def test_the_sources_of_a_package_are_those_of_all_folders(tmp_path):
    for name in ("a.py", "inner/b.py", "inner/deep/c.py", "__pycache__/d.py", "inner/e.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "inner" / "link").symlink_to(tmp_path)  # not followed: there may be no end
    found = sorted(os.path.relpath(path, tmp_path) for path in _sources(str(tmp_path)))
    assert found == ["a.py", "inner/b.py", "inner/deep/c.py"]


def test_a_flipped_bit_of_the_payload_is_damage(cache):
    cache.put("object", "abc", b"payload")
    path = cache.path("object", "abc")
    whole = bytearray(path.read_bytes())
    assert whole[-7:] == b"payload"
    whole[-1] ^= 1
    path.write_bytes(whole)
    assert cache.get("object", "abc") is None and cache.stats.num_damaged == 1


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_only_the_owner_reads_entries(cache):
    cache.put("object", "abc", b"payload")
    assert cache.path("object", "abc").stat().st_mode & 0o777 == 0o600


def test_long_names_and_the_place_of_an_entry(cache):
    """The checksum takes the end of a long name; entries are spread over folders of two characters."""
    names = ("k" * 120, "a" * 120), ("object", "b" * 63), ("object", "b" * 64), ("a.b", "c_d-e")
    for kind, key in names:
        assert cache.put(kind, key, b"data") and cache.get(kind, key) == b"data"
    with pytest.raises(ValueError, match="no name of an entry"):
        cache.path("object", "a" * 121)
    assert cache.path("object", "abcdef") == cache.folder / "object" / "ab" / "abcdef"
    assert cache.limit_bytes == 4 << 30


def test_an_entry_with_the_end_of_another_name_is_foreign(cache):
    """The checksum takes the last 64 characters of a name only."""
    cache.put("object", "a" * 100, b"data")
    other = cache.path("object", "b" + "a" * 99)
    other.parent.mkdir(parents=True)
    other.write_bytes(cache.path("object", "a" * 100).read_bytes())
    os.chmod(other, 0o600)
    assert cache.get("object", "b" + "a" * 99) is None and cache.stats.num_damaged == 1


def test_an_entry_of_another_format_is_none(cache):
    cache.put("object", "abc", b"payload")
    path = cache.path("object", "abc")
    whole = bytearray(path.read_bytes())
    assert whole[8:12] == (1).to_bytes(4, "little")
    whole[8] = 2
    path.write_bytes(whole)
    assert cache.get("object", "abc") is None


def test_a_hit_renews_an_entry_at_most_once_an_hour(cache, monkeypatch):
    cache.put("object", "k", b"data")
    path, now = cache.path("object", "k"), int(time.time())
    monkeypatch.setattr(time, "time", lambda: float(now))
    for age, renewed in ((3600, False), (3600.5, True)):
        os.utime(path, (now - age, now - age))
        assert cache.get("object", "k") == b"data"
        assert (path.stat().st_mtime > now - 100) == renewed


def test_entries_that_fill_the_limit_stay(tmp_path, monkeypatch):
    """The folder is read for the first entry, and when entries are evicted."""
    other = Cache(tmp_path / "other")
    other.put("object", "k0", bytes(100))
    size = other.path("object", "k0").stat().st_size
    cache, entries, reads = Cache(tmp_path / "cache", 2 * size), Cache._entries, []
    monkeypatch.setattr(Cache, "_entries", lambda one: reads.append(one) or entries(one))
    counts = []
    for index in range(4):
        assert cache.put("object", f"k{index}", bytes(100))
        os.utime(cache.path("object", f"k{index}"), (1000 + index, 1000 + index))
        counts.append((len(reads), cache.stats.num_evicted))
    # two are beyond 90 % of the limit
    assert counts == [(1, 0), (1, 0), (2, 2), (2, 2)]
    assert [cache.has("object", f"k{index}") for index in range(4)] == [False, False, True, True]


def test_files_that_are_being_written_are_not_evicted(tmp_path, monkeypatch):
    """An old one is, also where the entries that are older still made enough room."""
    cache, now = Cache(tmp_path, limit_bytes=10_000), int(time.time())
    for name, age in (("fresh", 3599.5), ("stale", 3600)):
        (tmp_path / f".{name}.tmp").write_bytes(bytes(100))
        os.utime(tmp_path / f".{name}.tmp", (now - age, now - age))
    monkeypatch.setattr(time, "time", lambda: float(now))
    for index in range(4):
        cache.put("object", f"k{index}", bytes(4000))
        os.utime(cache.path("object", f"k{index}"), (1000 + index, 1000 + index))
    assert [path.name for path in tmp_path.glob(".*.tmp")] == [".fresh.tmp"]
    assert cache.stats.num_evicted == 3


def test_a_write_that_fails_leaves_nothing(cache, monkeypatch, caplog):
    def full(source, target):
        raise OSError(28, "No space left on device")

    assert cache.put("object", "k", b"old")
    monkeypatch.setattr(os, "replace", full)
    assert not cache.put("object", "k", b"new")
    assert cache.get("object", "k") == b"old"
    assert [path.name for path in cache.path("object", "k").parent.iterdir()] == ["k"]
    assert "No space left on device" in caplog.text


def test_the_order_of_names_does_not_matter_for_what_is_evicted(tmp_path):
    cache = Cache(tmp_path, limit_bytes=20_000)
    for index, key in enumerate(["d", "b", "c", "a", "e"]):
        cache.put("object", key, bytes(4500))
        if cache.path("object", key).exists():
            os.utime(cache.path("object", key), (1000 + index, 1000 + index))
    assert [key for key in "abcde" if cache.get("object", key)] == ["a", "c", "e"]
