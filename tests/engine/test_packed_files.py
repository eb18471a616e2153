"""Files of packed weights without models: what is part of their name, their contents, room on the disk, the writer."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from max._backends.backend import HOST
from max._compiler.program.code import FixedBuffer, LaunchCode, ProgramCode, SlotCode
from max._config import flags
from max._host import machine
from max.driver import Tensor
from max.dtype import DType
from max.engine.load import packed_weights
from max.engine.load.packed_weights import LEAST_BYTES, LEAST_IN_FILE, MOST_HASHED, PackedCopy
from max.graph.weights import LaterCast

pytestmark = [
    pytest.mark.any_target,
    pytest.mark.skipif(sys.platform != "linux", reason="copies are written on Linux only"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with flags.override(MAX_CACHE_DIR=tmp_path, MAX_WEIGHT_CACHE_SIZE=64):
        yield tmp_path / packed_weights.WEIGHTS_FOLDER


class Files:
    """The mapped files of the process: an identity for a range of addresses."""

    known: dict[tuple[int, int], str] = {}

    def identity(self, address: int, num_bytes: int) -> str | None:
        return self.known.get((address, num_bytes))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a copy is of: two weights, a constant of a file, and a constant whose contents count."""
    w = Tensor.from_numpy(np.ones((3, 4), np.float32))
    half = Tensor.from_numpy(np.ones(5, np.float16))
    table, few = np.ones(LEAST_IN_FILE + 1, np.int8), np.arange(7, dtype=np.int16)
    files = {
        (w._ptr, 48): "file of w", (half._ptr, 10): "file of half", (table.ctypes.data, table.nbytes): "file of table",
    }  # fmt: skip
    monkeypatch.setattr(Files, "known", files)
    monkeypatch.setattr(packed_weights, "host_memory", SimpleNamespace(MappedFiles=Files))
    monkeypatch.setattr(packed_weights, "machine", SimpleNamespace(boot_id=lambda: made.boot))
    buffers = [
        FixedBuffer("weight", 48, "w"), FixedBuffer("constant", table.nbytes, "table"), FixedBuffer("kept", 100),
        FixedBuffer("weight", 10, "half"), FixedBuffer("constant", 14), FixedBuffer("weight", 8, "unused"),
    ]  # fmt: skip
    slots = tuple(SlotCode(0, 0, number) for number in (4, 0, 2, 3, 1, -1))
    part = ProgramCode(device=HOST, launches=[LaunchCode("k", slots, False, False, "pack")])
    made = SimpleNamespace(
        program="program", boot="boot", num_bytes=LEAST_BYTES, files=files,
        compiled=SimpleNamespace(once=[part], guarded=False, fixed_buffers=buffers),
        weights={"w": w, "half": LaterCast(half, DType.float32, lambda: w)}, constants={1: table, 4: few},
    )  # fmt: skip
    return made


def copy_of(model: Any) -> PackedCopy | None:
    return PackedCopy.of(
        model.program, model.compiled, model.num_bytes, model.weights, model.constants
    )


def name_of(model: Any) -> str:
    copy = copy_of(model)
    assert copy is not None and copy._num_bytes == model.num_bytes
    return copy._path.name


def test_the_limits_are_those_of_the_docs() -> None:
    page = Path(__file__).parents[2] / "docs" / "runtime.md"
    text = re.sub(r"\s+", " ", page.read_text("utf-8"))
    for stated in (
        f"if they take {LEAST_BYTES / 2**20:g} MiB or more",
        f"the contents, of up to {MOST_HASHED / 2**20:g} MiB",
        f"{packed_weights.WAIT_SECONDS:g} s after the load",
        f"waits {packed_weights.EXIT_SECONDS:g} s for it",
    ):
        assert stated in text


def test_all_that_is_packed_is_part_of_the_name(model: Any, folder: Path) -> None:
    copy = copy_of(model)
    assert copy is not None and copy._path.parent == folder
    names = [copy._path.name]
    for field, value in (("program", "other"), ("num_bytes", LEAST_BYTES + 1)):
        before = getattr(model, field)
        setattr(model, field, value)
        names.append(name_of(model))
        setattr(model, field, before)
    for place in list(model.files):
        before = model.files[place]
        model.files[place] = "changed"
        names.append(name_of(model))
        model.files[place] = before
    few = model.constants[4]
    for other in (few + 1, few.view(np.uint16), few[::-1]):
        model.constants[4] = other
        names.append(name_of(model))
    model.constants[4] = few
    # another dtype of the same bytes
    w = model.weights["w"]
    model.weights["w"] = w.view(DType.int32, (3, 4))
    names.append(name_of(model))
    model.weights["w"] = w
    # files that are swapped
    model.files.update(
        zip(model.files, ["file of half", "file of w", "file of table"], strict=True)
    )
    names.append(name_of(model))
    model.files.update(
        zip(model.files, ["file of w", "file of half", "file of table"], strict=True)
    )
    assert len(set(names)) == len(names) == 11 and name_of(model) == names[0]
    # what only the copies' dtype reads, or nothing, does not count
    model.weights["unused"] = object()
    assert name_of(model) == names[0]


def test_contents_count_where_a_constant_is_in_no_file(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = model.constants[1]
    in_file = name_of(model)
    table[0] = 2
    assert name_of(model) == in_file, "the file's identity stands for its contents"
    del model.files[table.ctypes.data, table.nbytes]
    names = [in_file, name_of(model)]
    table[0] = 3
    names.append(name_of(model))
    assert len(set(names)) == 3
    # few bytes, and those that are not in order, are not looked for in files
    for array in (np.ones(LEAST_IN_FILE, np.int8), np.ones((2, LEAST_IN_FILE), np.int8).T):
        model.constants[1] = array
        name = name_of(model)
        model.files[array.ctypes.data, array.nbytes] = "a file"
        assert name_of(model) == name
    monkeypatch.setattr(packed_weights, "MOST_HASHED", 5000)
    for size, is_kept in ((5000, True), (5001, False)):
        model.constants[1] = np.zeros(size, np.int8)
        assert (copy_of(model) is not None) is is_kept
    assert MOST_HASHED > LEAST_IN_FILE


def test_what_has_no_copy(model: Any) -> None:
    def without(target: Any, **values: Any) -> bool:
        before = {name: getattr(target, name) for name in values}
        for name, value in values.items():
            setattr(target, name, value)
        found = copy_of(model)
        for name, value in before.items():
            setattr(target, name, value)
        return found is None

    part, limit = model.compiled.once[0], 64 << 20
    assert without(model, program=None) and without(model, boot=None)
    assert without(model.compiled, guarded=True)
    assert without(model.compiled, once=[]) and without(model.compiled, once=[part, part])
    assert without(part, device=HOST + 1)
    for size, has_none in (
        (LEAST_BYTES - 1, True),
        (LEAST_BYTES, False),
        (limit, False),
        (limit + 1, True),
    ):
        assert without(model, num_bytes=size) is has_none
    with flags.override(MAX_WEIGHT_CACHE_SIZE=0):
        assert copy_of(model) is None
    w, half = list(model.files)[:2]
    for place in (w, half):
        before = model.files.pop(place)
        assert copy_of(model) is None
        model.files[place] = before
    assert copy_of(model) is not None


@pytest.mark.parametrize("chunk", [1, 3, 10, 11, packed_weights.CHUNK])
def test_a_file_holds_the_bytes_and_is_read_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(packed_weights, "CHUNK", chunk)
    packed = np.arange(12, dtype=np.uint8)
    copy = PackedCopy(folder / "key", 10)
    assert copy.map_file() is None
    # memory that was reserved may be greater than the results
    assert copy.write(packed) is True
    assert [path.name for path in folder.iterdir()] == ["key"]
    assert (folder / "key").read_bytes() == (
        bytes(range(10)) + b"SUPREMUM PACKED 2 key " + str(machine.boot_id()).encode()
    )
    os.utime(folder / "key", (1, 1))
    mapped = copy.map_file()
    assert mapped is not None and mapped.dtype == np.uint8 and mapped.tolist() == list(range(10))
    assert not mapped.flags.writeable
    assert (folder / "key").stat().st_mtime > 1, "it was used"
    # a file of another size, or of another key
    assert PackedCopy(folder / "key", 9).map_file() is None
    (folder / "key").rename(folder / "yek")
    assert PackedCopy(folder / "yek", 10).map_file() is None
    assert copy.write(packed) and copy.write(packed), "the folder and the file are there"
    assert PackedCopy(folder / "no" / "folders" / "key", 10).write(packed)


def test_a_copy_that_cannot_be_written_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = np.zeros(10, np.uint8)
    monkeypatch.setattr(packed_weights, "CHUNK", 4)
    copy = PackedCopy(folder / "key", 10)
    for expired in ([True], [False, True], [False, False, True]):
        answers = iter(expired)
        assert copy.write(packed, lambda answers=answers: next(answers)) is False
        assert not list(folder.iterdir())
    answers = iter([False] * 3)
    assert copy.write(packed, lambda: next(answers)) is True
    (folder / "key").unlink()
    monkeypatch.setattr(PackedCopy, "_make_room", lambda self: False)
    assert copy.write(packed) is False and not list(folder.iterdir())
    with flags.override(MAX_CACHE_DIR=folder / "key"):
        (folder / "key").write_bytes(b"a file where a folder should be")
        assert PackedCopy(folder / "key" / "weights" / "key", 10).write(packed) is False


def test_half_of_the_free_space_stays_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    for blocks, has_room in ((5, False), (6, True)):
        room = SimpleNamespace(f_bavail=blocks, f_frsize=4, f_bfree=99, f_bsize=99)
        monkeypatch.setattr(packed_weights.os, "statvfs", lambda path, room=room: room)
        assert PackedCopy(folder / "key", 10)._make_room() is has_room


def test_the_least_recently_used_files_beyond_the_limit_go(folder: Path) -> None:
    folder.mkdir()
    limit = 1 << 20
    for mine, kept in ((0, "abc"), (limit // 2, "bc"), (limit // 2 + 1, "c"), (limit, "")):
        for seconds, name in enumerate("abc"):
            (folder / name).write_bytes(bytes(limit // 4 if name != "a" else limit // 2))
            os.utime(folder / name, (seconds, seconds))
        with flags.override(MAX_WEIGHT_CACHE_SIZE=1):
            PackedCopy(folder / "new", mine)._make_room()
        assert sorted(path.name for path in folder.iterdir()) == list(kept)


def test_a_file_may_be_deleted_by_another_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    (folder / "old").write_bytes(bytes(2 << 20))
    stat = Path.stat

    def last_look(path: Path, **options: Any) -> os.stat_result:
        found = stat(path, **options)
        # no other file: a failure looks at many while this is in place
        if path == folder / "old":
            path.unlink(missing_ok=True)
        return found

    with monkeypatch.context() as patch, flags.override(MAX_WEIGHT_CACHE_SIZE=1):
        patch.setattr(Path, "stat", last_look)
        has_room = PackedCopy(folder / "new", 10)._make_room()
    assert has_room and not list(folder.iterdir())


def test_the_writer_writes_what_is_alive_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Any] = []
    waits: list[float] = []
    threads: list[Any] = []
    clock = [50.0]
    time = SimpleNamespace(monotonic=lambda: clock[0], sleep=waits.append)
    monkeypatch.setattr(packed_weights, "time", time)
    monkeypatch.setattr(packed_weights.atexit, "register", registered.append)

    class Thread:
        def __init__(self, target: Any, name: str) -> None:
            threads.append(target)

        def start(self) -> None:
            if len(threads) == 2:
                raise RuntimeError("no thread")

    monkeypatch.setattr(packed_weights, "DaemonThread", Thread)
    writer = packed_weights._Writer()
    monkeypatch.setattr(packed_weights, "_writer", writer)
    arrays = [np.full(4, number, np.uint8) for number in range(3)]
    for number, array in enumerate(arrays):
        PackedCopy(folder / str(number), 4).write_later(array)
    assert registered == [writer.at_exit] and len(threads) == 3 and not folder.exists()
    del arrays[1], array
    threads[0]()
    assert waits == [packed_weights.WAIT_SECONDS]
    assert sorted(path.name for path in folder.iterdir()) == ["0", "2"]
    assert (folder / "2").read_bytes()[:4] == b"\2" * 4
    (folder / "2").unlink()
    packed_weights.write_now()
    assert not (folder / "2").exists(), "nothing waits"
    # at the end there is a time after which writing ends
    monkeypatch.setattr(packed_weights, "CHUNK", 2)
    for passed, is_written in ((0.0, True), (0.1, False)):
        # the deadline, then a look before each part
        looks = itertools.chain(
            [clock[0]], itertools.repeat(clock[0] + packed_weights.EXIT_SECONDS + passed)
        )
        time.monotonic = looks.__next__
        PackedCopy(folder / "3", 4).write_later(arrays[0])
        writer.at_exit()
        assert (folder / "3").exists() is is_written
        (folder / "3").unlink(missing_ok=True)
    writer._deadline = np.inf
    PackedCopy(folder / "4", 4).write_later(arrays[0])
    packed_weights.write_now()
    assert (folder / "4").exists()
    assert cast("Any", writer)._jobs == []
