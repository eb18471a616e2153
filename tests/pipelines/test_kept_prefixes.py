"""Cached prefixes are kept on the disk for the next engine with the same model."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from max.interfaces import PipelineTask, SamplingParams
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.core import ConfigError
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.process import prefix_keeper, service
from max.pipelines.generation.process.channel import ConnectionChannel
from max.pipelines.generation.process.commands import ForgetPrefixes, GenerationRequest, Shutdown
from max.pipelines.generation.process.events import (
    EngineReady,
    EngineStats,
    EngineStopped,
    PrefixesForgotten,
    TokensGenerated,
)
from max.pipelines.generation.process.prefix_keeper import PrefixKeeper
from max.pipelines.generation.process.service import serve
from max.pipelines.kv_cache import prefix_file, prefix_store
from max.pipelines.kv_cache.page_pool import PagePool
from max.pipelines.kv_cache.prefix_file import (
    PageGroup,
    read_pages,
    remove_abandoned_parts,
    write_pages,
)
from max.pipelines.kv_cache.prefix_journal import is_in_use, is_journal, read_journal
from max.pipelines.kv_cache.prefix_store import PrefixWrite

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
SIZES = (40, 24)


def write(path: Path, seed: int, key: str = "key") -> dict[tuple[int, bytes], bytes]:
    """Writes two groups of random pages, and returns them."""
    rng = random.Random(seed)
    pages = [
        {rng.randbytes(32): rng.randbytes(size) for _ in range(rng.randrange(4))} for size in SIZES
    ]
    groups = [
        PageGroup(size, list(group), lambda place, group=group: list(group.values())[place])
        for size, group in zip(SIZES, pages, strict=True)
    ]
    assert write_pages(path, key, groups) == sum(map(len, pages))
    return {(i, h): content for i, group in enumerate(pages) for h, content in group.items()}


def read(path: Path, key: str = "key", sizes=SIZES) -> dict[tuple[int, bytes], bytes]:
    return {
        (group, page_hash): content for group, page_hash, content in read_pages(path, key, sizes)
    }


@given(seed=st.integers(0, 99), at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_damaged_file_gives_sound_pages_or_none(tmp_path_factory, seed, at, bit) -> None:
    path = tmp_path_factory.mktemp("kept") / "file"
    pages = write(path, seed)
    assert read(path) == pages
    assert read(path, "other") == {} == read(path, sizes=(40, 25)) == read(path, sizes=(40,))
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[int(at * len(whole))] ^= 1 << bit
    path.write_bytes(damaged)
    found = read(path)
    assert found.items() <= pages.items() and len(found) < max(len(pages), 1)
    path.write_bytes(whole[: int(at * len(whole))])
    assert read(path).items() <= pages.items()
    path.unlink()
    assert read(path) == {} == read(path.parent)


def test_what_is_left_out_is_said(tmp_path: Path, caplog) -> None:
    path = tmp_path / "file"
    assert read(path) == {} and not caplog.text, "a file that is absent is none that is damaged"
    pages = write(path, 3)
    assert read(path) == pages and not caplog.text

    def said() -> str:
        caplog.clear()
        read(path)
        return caplog.text

    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert f"1 of {len(pages)} pages of {path} are damaged" in said()
    path.write_bytes(whole[:-30] + bytes([whole[-30] ^ 1]) + whole[-29:])
    assert f"1 of {len(pages)} pages of {path} are damaged" in said()
    for content in (b"", b"something else", whole[:40], whole.replace(b'"key"', b'"kez"')):
        path.write_bytes(content)
        assert f"{path} are not used: the file is damaged, or not of this model" in said()
    write(path, 3, "other")
    assert "not of this model" in said()
    path.unlink()
    path.mkdir()
    assert f"{path} is no file" in said()
    path.rmdir()
    os.mkfifo(path)
    assert f"{path} is no file" in said()
    path.unlink()
    path.symlink_to(path)
    assert str(path) in said()


def with_header(path: Path, text: bytes) -> Path:
    """Writes a file whose header has a length and a digest that fit it, and one page."""
    digest = hashlib.blake2b(text, digest_size=16).digest()
    length = len(text).to_bytes(8, "little")
    path.write_bytes(b"max cached prefixes 1\n" + length + digest + text + b"x" * 40)
    return path


def sound_header() -> Any:
    digest = hashlib.blake2b(b"x" * 40, digest_size=16).hexdigest()
    return {
        "key": "key",
        "groups": [
            {"page_bytes": 40, "pages": [["ab", digest]]},
            {"page_bytes": 24, "pages": []},
        ],
    }


STRANGE: list[Any] = [
    None,
    True,
    -1,
    2**64,
    40.5,
    "",
    "zz",
    "ab",
    [],
    [[]],
    [["ab"]],
    [["ab", 3]],
    {},
    {"a": 1},
]


@given(data=st.data())
def test_headers_of_other_forms(tmp_path_factory, data: st.DataObject) -> None:
    """Digests tell damage, not who wrote the file: whatever the header says, a page has its size or is left out."""
    header = sound_header()
    places = [(header, k) for k in header]
    for group in header["groups"]:
        places += [(header["groups"], header["groups"].index(group)), *((group, k) for k in group)]
        places += [(group["pages"], i) for i in range(len(group["pages"]))]
        places += [(page, i) for page in group["pages"] for i in range(2)]
    container, place = data.draw(st.sampled_from(places))
    container[place] = data.draw(st.sampled_from(STRANGE))
    text = json.dumps(data.draw(st.sampled_from([header, *STRANGE]))).encode()
    pages = read(with_header(tmp_path_factory.mktemp("kept") / "file", text))
    assert set(pages.values()) <= {b"x" * 40}


def test_headers_of_extreme_forms(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert read(with_header(path, json.dumps(sound_header()).encode())) == {(0, b"\xab"): b"x" * 40}
    for text in (b"[" * 200_000, b"{", b"\xff", b"[[]]", b"NaN", b"0"):
        assert read(with_header(path, text)) == {}
    if hasattr(os, "mkfifo"):
        path.unlink()
        os.mkfifo(path)
        assert read(path) == {}


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A header of a sound form in which one thing is changed."""
    header = sound_header()
    change(header)
    return json.dumps(header).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.update(key="other"),
        lambda header: header.update(groups=3),
        lambda header: header.update(groups={"page_bytes": 40}),
        lambda header: header.update(groups=[3, 4]),
        lambda header: header["groups"][1].update(page_bytes=25),
        lambda header: header["groups"].pop(),
        lambda header: header["groups"][1].update(pages=[["ab"]]),
        lambda header: header["groups"][1].update(pages=[["ab", 3]]),
        lambda header: header["groups"][0]["pages"][0].__setitem__(0, "no hex"),
        lambda header: header["groups"][0]["pages"][0].__setitem__(1, "00" * 16),
    ],
)  # fmt: skip
def test_a_header_that_does_not_fit_gives_no_page(tmp_path: Path, change) -> None:
    assert read(with_header(tmp_path / "file", changed(change))) == {}


def test_a_group_without_pages_leaves_the_others(tmp_path: Path) -> None:
    text = changed(lambda header: header["groups"][1].update(pages=3))
    assert len(read(with_header(tmp_path / "file", text))) == 1


def test_the_digest_of_a_short_page_does_not_make_it_a_page(tmp_path: Path) -> None:
    """It would be copied into the cache, whose pages are longer."""
    digest = hashlib.blake2b(b"x" * 40, digest_size=16).hexdigest()
    text = changed(lambda header: header["groups"][0].update(page_bytes=48))
    assert digest in text.decode()
    assert read(with_header(tmp_path / "file", text), sizes=(48, 24)) == {}


def test_the_longest_header(tmp_path: Path, monkeypatch) -> None:
    path = with_header(tmp_path / "file", text := json.dumps(sound_header()).encode())
    monkeypatch.setattr(prefix_file, "_MOST_HEADER_BYTES", len(text))
    assert len(read(path)) == 1
    monkeypatch.setattr(prefix_file, "_MOST_HEADER_BYTES", len(text) - 1)
    assert read(path) == {}


@pytest.mark.parametrize("left_out", [(0,), (1,), (3,), (0, 3), (1, 2), (2, 3), (0, 1, 2, 3)])
def test_pages_that_are_no_longer_cached_are_left_out(tmp_path: Path, left_out) -> None:
    pages = [(bytes([n]), bytes([65 + n]) * SIZES[n // 2]) for n in range(4)]
    groups = [
        PageGroup(
            SIZES[g],
            [pages[2 * g + place][0] for place in range(2)],
            lambda place, g=g: None if 2 * g + place in left_out else pages[2 * g + place][1],
        )
        for g in range(2)
    ]
    path = tmp_path / "file"
    assert write_pages(path, "key", groups) == 4 - len(left_out)
    assert read(path) == {(n // 2, pages[n][0]): pages[n][1] for n in range(4) if n not in left_out}


def test_only_parts_that_nobody_writes_are_removed(tmp_path: Path, monkeypatch) -> None:
    now = time.time()
    ages = {"a.part": 599, "b.part": 601, "c.prefixes": 9999, "d.part": 9999}
    for name, age in ages.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now - age, now - age))
    remove_abandoned_parts(tmp_path / "absent")
    unlink = Path.unlink

    def removed_by_another(path: Path, *arguments: bool) -> None:
        unlink(path)
        unlink(path, *arguments)

    monkeypatch.setattr(Path, "unlink", removed_by_another)
    monkeypatch.setattr(time, "time", lambda: now)
    remove_abandoned_parts(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.part", "c.prefixes"]


def test_a_file_takes_the_place_of_another_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    first = write(path, 3)

    def fail(place: int) -> bytes:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_pages(path, "key", [PageGroup(40, [b"a"], fail), PageGroup(24, [], fail)])
    assert read(path) == first and [p.name for p in path.parent.iterdir()] == ["file"]

    def remove_and_fail(place: int) -> bytes:
        for part in path.parent.glob("*.part"):
            part.unlink()  # as another process does when it finds the part old
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_pages(path, "key", [PageGroup(40, [b"a"], remove_and_fail)])
    second = write(path, 4)
    assert read(path) == second != first
    assert path.stat().st_mode & 0o077 == 0


def test_pages_are_filled_while_empty_ones_are_free() -> None:
    pool = PagePool(3)
    used = pool.take()
    assert pool.fill(b"a") is not None and pool.fill(b"a") is None
    assert pool.fill(b"b") is not None and pool.fill(b"c") is None, "no cached page is lost for it"
    assert [page_hash for page_hash, _ in pool.cached_contents()] == [b"a", b"b"]
    pool.check([used])
    assert pool.hold([b"a"]) != pool.hold([b"b"]) and pool.cached_contents() == []


def pipeline_of(folder: Path | None, **values: Any) -> Any:
    config = PipelineConfig(
        model_path=TINY, max_length=512, max_batch_size=2, kv_cache_page_size=16, kv_cache_folder=folder,
        **{"quantization_encoding": "float32", **values},
    )  # fmt: skip
    return PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]


def ask(channel, prompts: list[list[int]]) -> tuple[list[list[int]], EngineStats]:
    """Has a running engine answer prompts, one after the other."""
    tokens: list[list[int]] = []
    stats = EngineStats()
    for prompt in prompts:
        params = SamplingParams(temperature=0, ignore_eos=True)
        one = TextContext(
            max_length=len(prompt) + 6, tokens=np.array(prompt), sampling_params=params
        )
        channel.send(GenerationRequest.of(one))
        tokens.append([])
        while True:
            event = channel.receive()
            if isinstance(event, EngineStats):
                stats = event
            elif isinstance(event, TokensGenerated):
                tokens[-1] += event.tokens
                if event.status.is_done:
                    break
    return tokens, stats


def answers(pipeline, prompts: list[list[int]]) -> tuple[list[list[int]], EngineStats]:
    """Runs an engine for the prompts, from its start to its end."""
    here, there = (ConnectionChannel(end) for end in multiprocessing.get_context("spawn").Pipe())
    engine = threading.Thread(target=serve, args=(pipeline, limits_of(pipeline), there, 0.0))
    engine.start()
    assert isinstance(here.receive(), EngineReady)
    tokens, stats = ask(here, prompts)
    here.send(Shutdown())
    while not isinstance(event := here.receive(), EngineStopped):
        stats = event if isinstance(event, EngineStats) else stats
    assert event.error is None
    engine.join(60)
    pipeline.kv_managers[0].pages.check()
    return tokens, stats


PROMPTS = [np.random.default_rng(i).integers(5, 300, 100).tolist() for i in range(3)]


@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
def test_the_next_engine_reuses_them(tmp_path: Path, encoding: str) -> None:
    alone, stats = answers(pipeline_of(None, quantization_encoding=encoding), PROMPTS)
    assert stats.reused_tokens == 0
    values = {"quantization_encoding": encoding}
    first, stats = answers(pipeline_of(tmp_path, **values), PROMPTS)
    assert first == alone and stats.reused_tokens == 0
    (file,) = tmp_path.iterdir()
    again, stats = answers(pipeline_of(tmp_path, **values), PROMPTS)
    assert again == alone and stats.reused_tokens == 3 * 96
    assert [p.name for p in tmp_path.iterdir()] == [file.name]
    # another form of the model has other keys and values
    _, stats = answers(pipeline_of(tmp_path, **values, kv_cache_format="float16"), PROMPTS[:1])
    assert stats.reused_tokens == 0 and len(list(tmp_path.iterdir())) == 2
    # a damaged file costs the pages that it damages
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    again, stats = answers(pipeline_of(tmp_path, **values), PROMPTS)
    assert again == alone and 0 < stats.reused_tokens < 3 * 96


def test_the_folder_is_bounded(tmp_path: Path) -> None:
    pipeline = pipeline_of(tmp_path)
    page = sum(pipeline.kv_managers[0].page_sizes())
    (tmp_path / "old.prefixes").write_bytes(bytes(8 * page))
    (tmp_path / "another.file").write_bytes(bytes(8 * page))
    _, stats = answers(pipeline_of(tmp_path, kv_cache_folder_gb=8.5 * page / 2**30), PROMPTS)
    assert stats.reused_tokens == 0
    (file,) = tmp_path.glob("*.prefixes")
    assert file.stat().st_size < 9 * page and (tmp_path / "another.file").exists()
    # the beginnings of the prefixes that were used last
    _, stats = answers(pipeline_of(tmp_path), PROMPTS[::-1])
    assert stats.reused_tokens == 8 * 16
    with pytest.raises(ConfigError, match="kv_cache_folder_gb is 0"):
        pipeline_of(tmp_path, kv_cache_folder_gb=0)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("no folder")
    _, stats = answers(pipeline_of(tmp_path / "file"), PROMPTS[:1])
    assert stats.prompt_tokens == 100 and "cannot be kept" in caplog.text


def serve_in_child(folder: Path, end: Connection) -> None:
    pipeline = pipeline_of(folder)
    serve(pipeline, limits_of(pipeline), ConnectionChannel(end), 0.0)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_engine_has_kept_what_it_read_before_it_idled(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=serve_in_child, args=(tmp_path, there), daemon=True)
    child.start()
    channel = ConnectionChannel(here)
    assert isinstance(channel.receive(), EngineReady)
    alone = []
    for number, prompt in enumerate(PROMPTS):
        alone += ask(channel, [prompt])[0]
        wait_until(lambda: len(appended(tmp_path)) >= 6 * (number + 1))  # noqa: B023
    (journal,) = tmp_path.iterdir()
    assert child.pid is not None and is_in_use(journal)
    os.kill(child.pid, signal.SIGKILL)
    child.join(60)
    assert not is_in_use(journal)
    again, stats = answers(pipeline_of(tmp_path), PROMPTS)
    assert again == alone and stats.reused_tokens == 3 * 96
    (file,) = tmp_path.iterdir()  # at its end the engine has joined them
    assert len(read(file, file.stem, [file_page_bytes()])) == 3 * 6


def test_an_engine_that_is_killed_while_it_answers_has_kept_its_prompt(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=serve_in_child, args=(tmp_path, there), daemon=True)
    child.start()
    channel = ConnectionChannel(here)
    assert isinstance(channel.receive(), EngineReady)
    for _ in range(20):  # more answers than are read before the kill
        params = SamplingParams(temperature=0, ignore_eos=True)
        one = TextContext(max_length=500, tokens=np.array(PROMPTS[0]), sampling_params=params)
        channel.send(GenerationRequest.of(one))
    while len(appended(tmp_path)) < 6:
        channel.receive()
    # the first pages are written first: those of the prompt
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(60)
    _, stats = answers(pipeline_of(tmp_path), PROMPTS[:1])
    assert stats.reused_tokens == 96


def appended(folder: Path) -> list[bytes]:
    """The hashes of the pages in all journals of a folder."""
    return [
        record.hash
        for path in sorted(folder.glob("*.prefixes"))
        if is_journal(path)
        for record in read_journal(path, path.name.split(".")[0], [file_page_bytes()])
    ]


def file_page_bytes() -> int:
    (size,) = pipeline_of(None).kv_managers[0].page_sizes()
    return size


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "a.prefixes1.part", tmp_path / "b.prefixes2.part"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 3600,) * 2)
    pipeline_of(tmp_path).load_prefixes()
    assert list(tmp_path.iterdir()) == [new]


def run(write: PrefixWrite | None) -> None:
    assert write is not None
    write.run(lambda page_bytes: True)


def test_new_pages_are_appended_and_journals_of_ended_engines_are_joined(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(prefix_store, "MOST_ADDITIONS", 2)
    for engine in range(3):
        pipeline = pipeline_of(tmp_path)
        pipeline.load_prefixes()
        pool = pipeline.kv_managers[0].pages.pools[0]
        assert pipeline.new_prefixes() is None
        for number in range(3):
            assert pool.fill(bytes([engine, number])) is not None
            run(pipeline.new_prefixes())
            assert pipeline.new_prefixes() is None
        if engine < 2:
            assert appended(tmp_path) == [
                bytes([i, n]) for i in range(engine + 1) for n in range(3)
            ]
            assert len(list(tmp_path.iterdir())) == engine + 1
        store = pipeline._prefixes
        assert store is not None
        store._close()  # killed
    # two journals of ended engines: the third engine joined them at its first write
    assert store._path.exists() and len(read(store._path, store._key, [file_page_bytes()])) == 7
    assert appended(tmp_path) == [bytes([2, 1]), bytes([2, 2])]
    again = pipeline_of(tmp_path)
    again.load_prefixes()
    assert len(again.kv_managers[0].pages.pools[0].cached_contents()) == 9
    assert again.new_prefixes() is None
    again.forget_prefixes()
    assert not list(tmp_path.iterdir()) and again.new_prefixes() is None


def test_engines_of_one_folder_share_what_they_read(tmp_path: Path, monkeypatch) -> None:
    """While both run; neither removes what the other still writes."""
    monkeypatch.setattr(prefix_store, "SHARED_S", 0.0)
    first, second = pipeline_of(tmp_path), pipeline_of(tmp_path)
    pools = [pipeline.kv_managers[0].pages.pools[0] for pipeline in (first, second)]
    for number in range(4):
        assert pools[number % 2].fill(bytes([number])) is not None
        run((first, second)[number % 2].new_prefixes())
        (second, first)[number % 2].read_shared_prefixes()
        for pool in pools:
            assert {page_hash for page_hash, _ in pool.cached_contents()} == {
                bytes([n]) for n in range(number + 1)
            }
    assert first.new_prefixes() is None and second.new_prefixes() is None
    first.save_prefixes()  # the other engine still writes: nothing is joined
    assert len(appended(tmp_path)) == 4 and len(list(tmp_path.iterdir())) == 2
    second.save_prefixes()
    (file,) = tmp_path.iterdir()
    assert len(read(file, file.stem, [file_page_bytes()])) == 4


def test_additions_leave_the_folder_bounded(tmp_path: Path) -> None:
    size = file_page_bytes()
    pipeline = pipeline_of(tmp_path, kv_cache_folder_gb=8.5 * size / 2**30)
    pool = pipeline.kv_managers[0].pages.pools[0]
    for number in range(20):
        assert pool.fill(bytes([number])) is not None
        run(pipeline.new_prefixes())
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 9.5 * size
    kept = pipeline_of(tmp_path)
    kept.load_prefixes()
    hashes = [page_hash for page_hash, _ in kept.kv_managers[0].pages.pools[0].cached_contents()]
    assert hashes == [bytes([number]) for number in range(20 - len(hashes), 20)]
    assert len(hashes) >= 6


def test_a_page_that_is_taken_meanwhile_is_left_out(tmp_path: Path) -> None:
    """The writer reads pages beside the engine: one with another content must not be under the old hash."""
    pipeline = pipeline_of(tmp_path)
    pool = pipeline.kv_managers[0].pages.pools[0]
    hashes = [bytes([number]) * 16 for number in range(pool.num_pages)]
    for page_hash in hashes:
        assert pool.fill(page_hash) is not None
    write = pipeline.new_prefixes()
    assert write is not None
    calls = 0

    def take_others(page_bytes: int) -> bool:
        nonlocal calls
        calls += 1
        if calls == 2:
            for _ in range(3):  # those that were used first, which are written last
                pool.take()
        return True

    write.run(take_others)
    assert calls == len(hashes)
    (file,) = tmp_path.iterdir()
    assert file.is_file() and set(appended(tmp_path)) == set(hashes[3:])


def test_a_write_is_slow_while_requests_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(prefix_store, "BYTES_PER_S", 1 << 40)
    monkeypatch.setattr(prefix_keeper, "BUSY_BYTES_PER_S", 1)
    pipeline = pipeline_of(tmp_path)
    pool = pipeline.kv_managers[0].pages.pools[0]
    read_pages_of: list[int] = []
    keeper = PrefixKeeper()
    for number in range(4):
        assert pool.fill(bytes([number])) is not None
    write = pipeline.new_prefixes()
    assert write is not None
    (group,) = write._groups

    def content(place: int) -> bytes | None:
        read_pages_of.append(place)
        if place == 2:
            keeper.pause()
        return bytes(group.page_bytes)

    write._groups = [PageGroup(group.page_bytes, group.hashes, content)]
    keeper.resume()
    keeper.start(write)
    wait_until(lambda: len(read_pages_of) == 2)
    time.sleep(0.1)
    assert read_pages_of == [3, 2] and keeper.writes
    assert len(appended(tmp_path)) == 2, "a page is found as soon as it is written"
    keeper.resume()
    wait_until(lambda: not keeper.writes)
    assert read_pages_of == [3, 2, 1, 0]
    kept = appended(tmp_path)
    # a write that is stopped leaves what it wrote
    assert pool.fill(b"other") is not None
    keeper.pause()
    write = pipeline.new_prefixes()
    assert write is not None
    keeper.start(write)
    keeper.stop()
    assert appended(tmp_path) == kept


def test_an_engine_that_never_idles_keeps_what_it_reads(tmp_path: Path, monkeypatch) -> None:
    """Also pages that running requests hold: a prefix that all share is never free under load."""
    monkeypatch.setattr(service, "KEEP_INTERVAL_S", 0.0)
    pipeline = pipeline_of(tmp_path)
    here, there = (ConnectionChannel(end) for end in multiprocessing.get_context("spawn").Pipe())
    engine = threading.Thread(target=serve, args=(pipeline, limits_of(pipeline), there))
    engine.start()
    assert isinstance(here.receive(), EngineReady)
    one = TextContext(
        max_length=500, tokens=np.array(PROMPTS[0]), sampling_params=SamplingParams(temperature=0, ignore_eos=True)
    )  # fmt: skip
    here.send(GenerationRequest.of(one))
    while len(appended(tmp_path)) < 6:  # the pages of its prompt
        event = here.receive()
        assert isinstance(event, TokensGenerated) and not event.status.is_done
    here.send(Shutdown())
    while not isinstance(here.receive(), EngineStopped):
        pass
    engine.join(60)


def test_an_engine_that_idles_while_a_write_is_open_keeps_the_rest_after_it(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(service, "KEEP_DELAY_S", 0.01)
    goes_on, looks = threading.Event(), threading.Semaphore(0)
    run_write, is_open_of = PrefixWrite.run, PrefixKeeper.writes.fget
    assert is_open_of is not None

    def gated(write: PrefixWrite, go_on: Callable[[int], bool]) -> None:
        run_write(write, go_on)
        assert goes_on.wait(60)

    def counted(keeper: PrefixKeeper) -> bool:
        is_open = is_open_of(keeper)
        if is_open:
            looks.release()
        return is_open

    monkeypatch.setattr(PrefixWrite, "run", gated)
    monkeypatch.setattr(PrefixKeeper, "writes", property(counted))
    pipeline = pipeline_of(tmp_path)
    here, there = (ConnectionChannel(end) for end in multiprocessing.get_context("spawn").Pipe())
    engine = threading.Thread(target=serve, args=(pipeline, limits_of(pipeline), there))
    engine.start()
    assert isinstance(here.receive(), EngineReady)
    ask(here, PROMPTS[:1])
    wait_until(lambda: len(appended(tmp_path)) >= 6)
    ask(here, PROMPTS[1:2])
    assert looks.acquire(timeout=60), "the engine idles, and the first write is open"
    goes_on.set()
    wait_until(lambda: len(appended(tmp_path)) >= 12)
    here.send(Shutdown())
    engine.join(60)


def test_forgotten_prefixes_do_not_come_back(tmp_path: Path) -> None:
    pipeline = pipeline_of(tmp_path)
    here, there = (ConnectionChannel(end) for end in multiprocessing.get_context("spawn").Pipe())
    engine = threading.Thread(target=serve, args=(pipeline, limits_of(pipeline), there))
    engine.start()
    assert isinstance(here.receive(), EngineReady)
    ask(here, PROMPTS[:2])
    wait_until(lambda: bool(list(tmp_path.glob("*.prefixes"))))
    here.send(ForgetPrefixes(7))
    assert here.receive() == PrefixesForgotten(7) and not list(tmp_path.iterdir())
    ask(here, PROMPTS[2:])
    here.send(Shutdown())
    engine.join(60)
    (file,) = tmp_path.iterdir()
    assert len(read(file, file.stem, [file_page_bytes()])) == 6
