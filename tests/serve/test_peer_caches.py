"""Caches of other machines: what one has compiled and packed, another one takes; peers that are wrong cost little."""

from __future__ import annotations

import json
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from max._config import flags
from max._host.disk_cache import Cache, default_cache
from max.engine.load.packed_weights import PackedCopy
from max.serve.remote import cache_messages, peer_caches, shared_cache
from max.serve.remote.cache_messages import ABSENT, CODE_BYTES, REQUEST, SIZE, answer_code
from max.serve.remote.connections import Acceptor, close_listener, connect, listen
from max.serve.remote.peer_caches import PeerCaches
from max.serve.remote.ray_cluster import RayCluster
from max.serve.remote.ray_engine import EngineAddress
from max.serve.remote.shared_cache import SharedCache
from max.serve.routers.address import DoorAddress

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are written on Linux only")
KEY = b"k" * 32
WEIGHTS = "0123456789" * 4


def name() -> str:
    return secrets.token_hex(20)


class Process:
    """A process with a cache of its own, which it hands out."""

    def __init__(self, folder: Path, *others: Process, model: Path | None = None) -> None:
        words = [] if model is None else [str(model)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.cache_at_address", *words],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "MAX_CACHE_DIR": str(folder), "MAX_GUARD": "0"},
            text=True,
        )
        assert self.process.stdin and self.process.stdout
        doors = [other.said["door"] for other in others]
        self.process.stdin.write(json.dumps(doors) + "\n")
        self.process.stdin.flush()
        self.said = json.loads(self.process.stdout.readline())
        host, port, key = self.said["door"]
        self.door = DoorAddress(host, port, bytes.fromhex(key))

    def end(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@contextmanager
def processes() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(*args: Any, **kwargs: Any) -> Process:
        started.append(Process(*args, **kwargs))
        return started[-1]

    try:
        yield start
    finally:
        for each in started:
            each.end()


def test_a_second_machine_compiles_and_packs_nothing(tmp_path: Path) -> None:
    arrays = {
        "w": np.random.default_rng(1).standard_normal((96, 160)).astype(np.float32),
    }
    model = tmp_path / "model.safetensors"
    save_file(arrays, model)
    with processes() as start:
        first = start(tmp_path / "one", model=model)
        assert first.said["kernels"] > 0 and first.said["start"]["fetched_entries"] == 0
        assert (
            first.said["start"]["packed_weights"] == 1 and first.said["start"]["compiled_parts"] > 0
        )
        second = start(tmp_path / "two", first, model=model)
        assert (second.said["kernels"], second.said["modules"]) == (0, 0)
        counts = second.said["start"]
        assert (counts["compiled_parts"], counts["packed_weights"]) == (0, 0)
        assert counts["fetched_entries"] > 2 and counts["fetched_bytes"] > arrays["w"].nbytes
        assert second.said["result"] == first.said["result"]
        # from the second one when the first is gone, and from its own folder without anybody
        first.end()
        third = start(tmp_path / "three", first, second, model=model)
        assert third.said["start"] == counts and third.said["result"] == first.said["result"]
        again = start(tmp_path / "three", model=model)
        assert again.said["start"] == dict.fromkeys(counts, 0)
        assert again.said["result"] == first.said["result"]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that other work shares may be slow; the tests of times set others."""
    monkeypatch.setattr(peer_caches, "GRACE_S", 60.0)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cache]:
    """The cache of this process, without an entry."""
    with flags.override(MAX_CACHE_DIR=tmp_path / "own"):
        yield default_cache()
        ask(default_cache())


def ask(cache: Cache, *doors: DoorAddress) -> None:
    """Lets a cache ask others from now on, and no longer those of before."""
    if isinstance(cache.remote, PeerCaches):
        cache.remote.close()
    cache.remote = PeerCaches(doors) if doors else None


@contextmanager
def shared(folder: Path) -> Iterator[DoorAddress]:
    """A cache that is handed out by threads of this process."""
    patch = pytest.MonkeyPatch()
    there = Cache(folder)
    patch.setattr(shared_cache, "default_cache", lambda: there)
    patch.setattr(shared_cache, "cache_dir", lambda: folder)
    cache = SharedCache("127.0.0.1")
    try:
        yield DoorAddress("127.0.0.1", cache.port, cache.key)
    finally:
        cache.close()
        patch.undo()


def weights_in(folder: Path, size: int, key: str = WEIGHTS) -> np.ndarray:
    """Writes packed weights."""
    packed = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert PackedCopy(folder / "weights" / key, size).write(packed)
    return packed


def fetched(cache: Cache, size: int, key: str = WEIGHTS) -> np.ndarray | None:
    return PackedCopy(cache.folder / "weights" / key, size).map_file()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_entries_come_as_they_are(tmp_path: Path, own: Cache) -> None:
    draw, there = random.Random(0), Cache(tmp_path / "there")
    payloads = {name(): draw.randbytes(size) for size in (0, 1, 4095, 3 << 20)}
    for key, payload in payloads.items():
        there.put("object", key, payload)
    there.put("limits", WEIGHTS, b"measured there")
    with shared(tmp_path / "there") as door:
        ask(own, door)
        for key, payload in payloads.items():
            assert own.has("object", key) and own.get("object", key) == payload
            assert own.get("program", key) is None and not own.has("program", key)
        # what a machine has measured is its own
        assert own.get("limits", WEIGHTS) is None
    ask(own)
    assert {key: own.get("object", key) for key in payloads} == payloads
    assert own.path("object", next(iter(payloads))).stat().st_mode & 0o077 == 0
    assert own.stats.num_fetched == 4 and own.stats.num_made == 0
    assert own.stats.fetched_bytes > sum(map(len, payloads.values()))


@pytest.mark.parametrize("size", [1, cache_messages.RANGE, 5 * cache_messages.RANGE + 12_345])
def test_weights_come_in_ranges(tmp_path: Path, own: Cache, size: int) -> None:
    packed = weights_in(tmp_path / "there", size)
    with shared(tmp_path / "there") as door:
        # one that cannot be reached, and one that has nothing
        with listen("127.0.0.1") as nobody:
            gone = DoorAddress("127.0.0.1", nobody.getsockname()[1], KEY)
        ask(own, gone, door)
        assert fetched(own, size, "f" * 40) is None
        assert fetched(own, size + 1) is None
        np.testing.assert_array_equal(fetched(own, size), packed)
    ask(own)
    np.testing.assert_array_equal(fetched(own, size), packed)
    assert files(own.folder) == [WEIGHTS] and own.stats.fetched_bytes == size


def test_weights_of_another_start_of_the_machine_are_not_handed_out(
    tmp_path: Path, own: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights_in(tmp_path / "there", 1000)
    with shared(tmp_path / "there") as door:
        ask(own, door)
        with monkeypatch.context() as patch:
            patch.setattr("max._host.machine.boot_id", lambda: "later")
            assert fetched(own, 1000) is None
        assert fetched(own, 1000) is not None


def test_a_damaged_entry_there_is_none_here(tmp_path: Path, own: Cache) -> None:
    there, key = Cache(tmp_path / "there"), name()
    there.put("object", key, b"x" * 1000)
    path = there.path("object", key)
    with shared(tmp_path / "there") as door:
        ask(own, door)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert own.get("object", key) is None and own.stats.num_damaged == 1
        path.chmod(0o666)  # others may have written it
        assert own.get("object", key) is None
    assert files(own.folder) == []


# peers that are wrong --------------------------------------------------------------------------


def silent(there: socket.socket, request: bytes, key: bytes) -> None:
    time.sleep(2)


def ends(there: socket.socket, request: bytes, key: bytes) -> None:
    there.close()


def huge(there: socket.socket, request: bytes, key: bytes) -> None:
    there.sendall(SIZE.pack(1 << 62) + b"x" * 100_000)


def garbage(there: socket.socket, request: bytes, key: bytes) -> None:
    there.sendall(random.Random(3).randbytes(100_000))


def most(request: bytes) -> int:
    return min(REQUEST.unpack(request)[4], 100_000)


def right(request: bytes, key: bytes, data: bytes) -> bytes:
    code = answer_code(key, request)
    code.update(SIZE.pack(len(data)) + data)
    return SIZE.pack(len(data)) + data + code.digest()


def cut(there: socket.socket, request: bytes, key: bytes) -> None:
    there.sendall(right(request, key, bytes(most(request)))[:-50])
    there.close()


def changed(there: socket.socket, request: bytes, key: bytes) -> None:
    answer = bytearray(right(request, key, bytes(most(request))))
    answer[-100] ^= 1
    there.sendall(answer)


def of_another_key(there: socket.socket, request: bytes, key: bytes) -> None:
    there.sendall(right(request, b"other", bytes(most(request))))


def of_another_request(there: socket.socket, request: bytes, key: bytes) -> None:
    there.sendall(right(bytes(len(request)), key, bytes(most(request))))


def absent_without_a_code(there: socket.socket, request: bytes, key: bytes) -> None:
    there.sendall(SIZE.pack(ABSENT) + bytes(32))


def drop_by_drop(there: socket.socket, request: bytes, key: bytes) -> None:
    for byte in right(request, key, bytes(most(request))):
        there.sendall(bytes([byte]))
        time.sleep(0.02)


WRONG = [
    silent, ends, huge, garbage, cut, changed, of_another_key, of_another_request, absent_without_a_code, drop_by_drop,
]  # fmt: skip


@contextmanager
def peer(answer: Callable[[socket.socket, bytes, bytes], None]) -> Iterator[DoorAddress]:
    """A peer that knows the key and answers each request in its way."""
    listener = listen("127.0.0.1")
    acceptor = Acceptor(listener, KEY)

    def serve(there: socket.socket) -> None:
        with there:
            try:
                while request := there.recv(REQUEST.size, socket.MSG_WAITALL):
                    answer(there, request, KEY)
            except OSError:
                pass

    def take() -> None:
        while True:
            try:
                _, connection = acceptor.next()
            except OSError:
                return
            there = socket.socket(fileno=os.dup(connection.fileno()))
            connection.close()
            threading.Thread(target=serve, args=(there,), daemon=True).start()

    threading.Thread(target=take, daemon=True).start()
    try:
        yield DoorAddress("127.0.0.1", listener.getsockname()[1], KEY)
    finally:
        close_listener(listener)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_peer_costs_a_bounded_time_and_no_entry(
    tmp_path: Path, own: Cache, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_caches, "GRACE_S", 0.4)
    key, size = name(), 100_000
    with peer(wrong) as door:
        ask(own, door)
        begin = time.monotonic()
        for _ in range(20):
            assert own.get("object", name()) is None
        assert fetched(own, size) is None
        assert time.monotonic() - begin < 4
        assert files(own.folder) == []
    # beside a right one only time is lost
    there = Cache(tmp_path / "there")
    there.put("object", key, b"right")
    packed = weights_in(tmp_path / "there", size)
    is_slow = wrong in (silent, drop_by_drop)
    monkeypatch.setattr(peer_caches, "GRACE_S", 3.0 if is_slow else 60.0)
    with peer(wrong) as door, shared(tmp_path / "there") as good:
        ask(own, door, good)
        assert own.get("object", key) == b"right"
        np.testing.assert_array_equal(fetched(own, size), packed)


def test_what_a_peer_knows_by_its_key_is_still_checked(own: Cache) -> None:
    """A right code of bytes that are no entry, or one of another name."""

    def answer(there: socket.socket, request: bytes, key: bytes) -> None:
        there.sendall(right(request, key, random.Random(4).randbytes(most(request))))

    with peer(answer) as door:
        ask(own, door)
        for _ in range(3):
            assert own.get("program", name()) is None
    assert files(own.folder) == [] and own.stats.num_damaged == 3


def test_who_does_not_know_the_key_gets_nothing(tmp_path: Path, own: Cache) -> None:
    there, key = Cache(tmp_path / "there"), name()
    there.put("object", key, b"code")
    with shared(tmp_path / "there") as door:
        begin = time.monotonic()
        ask(own, DoorAddress(door.host, door.port, b"x" * 32))
        assert own.get("object", key) is None
        assert time.monotonic() - begin < 20
        with pytest.raises(OSError, match="does not know the key"):
            connect(door.host, door.port, b"y" * 32, cache_messages.PURPOSE)


def test_requests_that_are_none_end_the_connection(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "there").mkdir()
    good = WEIGHTS.encode()
    requests = [
        REQUEST.pack(bytes(16), 9, good, 0, 10),
        REQUEST.pack(bytes(16), 0, b"../../secret".ljust(40, b"/"), 0, 10),
        REQUEST.pack(bytes(16), 0, good.upper()[:-1] + b"G", 0, 10),
        REQUEST.pack(bytes(16), 0, good, 0, 1 << 40),
        REQUEST.pack(bytes(16), 3, good, 1 << 63, 10),
        random.Random(5).randbytes(REQUEST.size),
    ]
    weights_in(tmp_path / "there", 100)
    with shared(tmp_path / "there") as door:
        for request in requests:
            with connect(door.host, door.port, door.key, cache_messages.PURPOSE) as connection:
                with socket.socket(fileno=os.dup(connection.fileno())) as own:
                    own.settimeout(10)
                    own.sendall(request)
                    assert len(own.recv(100, socket.MSG_WAITALL)) < 41
        # another purpose, and one that says nothing more
        with connect(door.host, door.port, door.key, "commands") as other:
            assert other.poll(10)
        # those who come when all places are taken are sent away, and places become free again
        with ExitStack() as held:
            # clients whose connections were made at once get their places in any order
            take_places(door, shared_cache.MOST_READERS, held)
            with connect(door.host, door.port, door.key, cache_messages.PURPOSE) as late:
                assert not is_served(late)
        with ExitStack() as held:
            take_places(door, shared_cache.MOST_READERS, held)


def is_served(connection: Connection) -> bool:
    """Whether a cache answers a request; False: it closes the connection."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.settimeout(60)
        try:
            own.sendall(REQUEST.pack(bytes(16), 0, WEIGHTS.encode(), 0, 10))
            answer = own.recv(SIZE.size + CODE_BYTES, socket.MSG_WAITALL)
        except ConnectionError:
            return False
        return len(answer) == SIZE.size + CODE_BYTES


def take_places(door: DoorAddress, count: int, held: ExitStack) -> None:
    """Connects until a number of connections is served; those before them may still leave their places."""
    end = time.monotonic() + 60
    while count:
        assert time.monotonic() < end, "no place is free"
        connection = connect(door.host, door.port, door.key, cache_messages.PURPOSE)
        if is_served(connection):
            held.enter_context(connection)
            count -= 1
        else:
            connection.close()


def test_a_peer_that_is_killed_while_it_sends(
    tmp_path: Path, own: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 6 * cache_messages.RANGE
    folder = tmp_path / "there"
    packed = weights_in(folder, size)
    real, lock = os.pwrite, threading.Lock()
    alive: list[Process] = []

    def write(file: int, piece: memoryview, at: int) -> int:
        """Kills the peer after its first piece has come."""
        with lock:
            if alive:
                alive.pop().end()
        return real(file, piece, at)

    monkeypatch.setattr(os, "pwrite", write)
    with processes() as start:
        first = start(folder)
        alive.append(first)
        ask(own, first.door)
        assert fetched(own, size) is None
        assert not alive and files(own.folder) == []
        # another one brings what the killed one has not
        first, second = start(folder), start(folder)
        alive.append(first)
        ask(own, first.door, second.door)
        np.testing.assert_array_equal(fetched(own, size), packed)
        assert not alive


def test_whose_caches_an_engine_asks() -> None:
    """One of each other machine, at most four, first those of the same model."""

    class Engine:
        def __init__(self, node: str, config: dict[str, Any]) -> None:
            self.config = config
            door = DoorAddress(f"{node}-{config}", 1, KEY)
            self.found = EngineAddress(node, 2, node, door) if node else None

    cluster = RayCluster.__new__(RayCluster)
    same, other = {"model": "same"}, {"model": "other"}
    engines = [Engine(f"n{i}", other) for i in range(6)] + [Engine("", same), Engine("here", same)]
    cluster._engines = {*engines, Engine("n5", same)}  # pyright: ignore[reportAttributeAccessIssue]
    caches = cluster._caches("here", same)
    assert len(caches) == 4 and len({each.host[:2] for each in caches}) == 4
    assert caches[0].host == f"n5-{same}" and not any("here" in each.host for each in caches)
    cluster._engines = {Engine("here", same)}  # pyright: ignore[reportAttributeAccessIssue]
    assert cluster._caches("here", same) == ()
