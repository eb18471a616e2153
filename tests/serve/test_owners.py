"""The owner of the engines is lost: who ends, who goes on, what the next one takes over. No tensors."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from max.pipelines.generation.process.channel import ConnectionChannel, MessageCodec
from max.pipelines.generation.process.commands import GenerationRequest, Shutdown
from max.pipelines.generation.process.events import (
    EngineReady,
    EngineStats,
    PagesChanged,
    TokensGenerated,
)
from max.pipelines.generation.process.service import serve
from max.pipelines.scheduler import SchedulerLimits
from max.serve.process.settings import WorkerSettings
from max.serve.remote.connections import Acceptor, close_listener, connect, listen
from max.serve.routers import shared_channel
from max.serve.routers.address import DoorAddress
from max.serve.routers.adopted import AdoptedProcess
from max.serve.routers.door import Door
from max.serve.routers.handover import Handover, KnownEngine, KnownModel, KnownRouter
from max.serve.routers.lifeline import can_be_taken_over
from max.serve.worker.life_signs import LifeSigns
from tests.pipelines.counting_pipeline import CountingPipeline, expected

pytestmark = pytest.mark.skipif(not can_be_taken_over(), reason="needs pidfd_open")


class Guarded:
    """An engine in threads of this process, whose owner may be lost; without a pipe as on another machine."""

    def __init__(self, folder: str, has_pipe: bool = True) -> None:
        self.door = DoorAddress.in_folder(folder)
        self.first, there = Pipe()
        self.users: list[Any] = []
        self._life, self.kept = Pipe(duplex=False)
        self._there, self._has_pipe = there, has_pipe
        if has_pipe:
            self._opened = Door.at(self.door)
        else:
            listener = listen(self.door.host)
            acceptor = Acceptor(listener, self.door.key)
            self._opened = Door(acceptor, partial(close_listener, listener), outlives_owner=True)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        signs = LifeSigns(5.0)
        channel = self._opened.open(self._there, signs, self._life if self._has_pipe else None)
        limits = SchedulerLimits(max_batch_size=8, max_num_steps=1)
        serve(CountingPipeline(400, prefix=True, seconds=0.002), limits, channel, 0.05, signs)
        self._opened.close()
        channel.close()

    def user(self, purpose: str) -> ConnectionChannel[Any, Any]:
        self.users.append(connect(self.door.host, 0, self.door.key, purpose))
        return ConnectionChannel(self.users[-1], MessageCodec())


@pytest.fixture(params=["pipe"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    monkeypatch.setattr(shared_channel, "ALONE_S", 1.0)
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are too long for a socket
        engine = Guarded(folder, request.param == "pipe")
        yield engine
        for each in (engine.kept, engine.first, *engine.users):
            each.close()
        engine.thread.join(20)
        assert not engine.thread.is_alive()


def request(name: str, length: int) -> GenerationRequest:
    return GenerationRequest(name, (7, 8, 9), 3 + length)


def read(channel: ConnectionChannel[Any, Any], kind: type, name: str | None = None) -> Any:
    """The next message of a type, of a request."""
    while True:
        message = channel.receive()
        if isinstance(message, kind) and name in (None, getattr(message, "request_id", None)):
            return message


def tokens_of(channel: ConnectionChannel[Any, Any], name: str) -> list[int]:
    """All tokens of a request."""
    found: list[int] = []
    while True:
        event = read(channel, TokensGenerated, name)
        found += event.tokens
        if event.status.is_done:
            return found


both_machines = pytest.mark.parametrize("engine", ["pipe", "other machine"], indirect=True)


@both_machines
def test_requests_of_routers_outlive_the_owner(engine: Guarded) -> None:
    owner = ConnectionChannel[Any, Any](engine.first, MessageCodec())
    router = engine.user("commands")
    read(owner, EngineReady)
    owner.send(request("owners", 390))
    router.send(request("routers", 200))
    read(owner, TokensGenerated)
    begin = list(read(router, TokensGenerated, "routers").tokens)
    engine.first.close()
    time.sleep(0.05)
    following = engine.user("owner")
    # what a router is told that connects
    assert isinstance(following.receive(), EngineReady)
    assert isinstance(following.receive(), EngineStats)
    assert following.receive().is_anew
    assert begin + tokens_of(router, "routers") == expected((7, 8, 9), 200)
    # its name is free again, and the request of the lost owner does not run
    following.send(request("owners", 20))
    tokens = tokens_of(following, "owners")
    # the end of the lost owner's request comes first where its loss is noticed after the other one came
    if len(tokens) < 20:
        tokens = tokens_of(following, "owners")
    assert tokens == expected((7, 8, 9), 20)
    while (stats := read(following, EngineStats)).running + stats.waiting:
        pass
    following.send(Shutdown(True))
    engine.thread.join(20)
    assert not engine.thread.is_alive()


@both_machines
def test_the_owner_before_is_none_any_more(engine: Guarded) -> None:
    """One that hangs while another one takes over, and goes on then, ends nothing."""
    owner = ConnectionChannel[Any, Any](engine.first, MessageCodec())
    read(owner, EngineReady)
    following = engine.user("owner")
    read(following, PagesChanged)
    with contextlib.suppress(OSError):
        owner.send(Shutdown(False))
    with pytest.raises(EOFError):
        while True:
            owner.receive()
    following.send(request("a", 30))
    assert tokens_of(following, "a") == expected((7, 8, 9), 30)


@pytest.mark.parametrize("first", ["owner", "lifeline"])
def test_without_owner_and_first_process_an_engine_ends(engine: Guarded, first: str) -> None:
    read(ConnectionChannel(engine.first, MessageCodec()), EngineReady)
    ends = [engine.first, engine.kept]
    for each in ends if first == "owner" else ends[::-1]:
        assert engine.thread.is_alive()
        each.close()
        time.sleep(0.1)
    engine.thread.join(5)
    assert not engine.thread.is_alive()


@pytest.mark.parametrize("engine", ["other machine"], indirect=True)
def test_an_engine_of_another_machine_waits_while_there_are_routers(
    engine: Guarded,
) -> None:
    owner = ConnectionChannel[Any, Any](engine.first, MessageCodec())
    router = engine.user("commands")
    read(owner, EngineReady)
    read(router, EngineReady)
    engine.first.close()
    engine.kept.close()  # no sign to this engine
    engine.thread.join(2.0)
    router.send(request("a", 20))
    assert tokens_of(router, "a") == expected((7, 8, 9), 20)
    router.close()
    begin = time.monotonic()
    engine.thread.join(10)
    assert not engine.thread.is_alive() and time.monotonic() - begin > 0.2


def test_what_is_handed_over(tmp_path: Path) -> None:
    assert Handover.read(str(tmp_path)) is None
    door = DoorAddress("/a", 0, random.randbytes(32))
    engine = KnownEngine(3, WorkerSettings({"model_path": "m"}, cores=(1,)), door)
    model = KnownModel((engine,), {"a": "/p"}, {"a": "/p", "b": None})
    handover = Handover(
        (model,), (KnownRouter(5, 2, door, True),), (1, {"t": 2}), {("c", "200"): 4.0}, ("n",)
    )
    handover.write(str(tmp_path))
    assert Handover.read(str(tmp_path)) == handover
    Handover().write(str(tmp_path))
    assert Handover.read(str(tmp_path)) == Handover()
    (tmp_path / "handover").write_bytes(pickle.dumps("of another version"))
    assert Handover.read(str(tmp_path)) is None


def test_a_process_behind_a_connection() -> None:
    with tempfile.TemporaryDirectory() as folder:
        code = (
            "import sys\nfrom max.serve.remote.connections import Acceptor, listen\n"
            "acceptor = Acceptor(listen(sys.argv[1]), b'k' * 32)\nprint(flush=True)\nacceptor.next()\n"
            "import time\ntime.sleep(60)"
        )
        command = [sys.executable, "-c", code, f"{folder}/s"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            adopted = AdoptedProcess.behind(connect(f"{folder}/s", 0, b"k" * 32, "link"))
            assert adopted.pid == process.pid and adopted.is_alive()
            adopted.join(0.01)
            assert adopted.is_alive()
            adopted.kill()
            adopted.join(10)
            assert not adopted.is_alive()
            assert process.wait(10) == -signal.SIGKILL
            adopted.kill()  # once more, of a process that is no more
        with pytest.raises(ProcessLookupError):
            AdoptedProcess(process.pid)


GUARDED = """
import multiprocessing, os, signal, socket, sys, threading, time
from max.serve.routers import guardian
from max.serve.routers.handover import Handover

class Direct(guardian.Guarded):
    def ready(self):
        self._beats.send_bytes(b".")

guardian.Guarded = Direct
guardian.BEAT_S = 0.1

def left_over():
    time.sleep(60)

def main(folder, guard):
    count = len(os.listdir(folder))
    open(f"{folder}/{count}", "w").write(str(os.getpid()))
    print("owner", count, flush=True)
    {body}

if __name__ == "__main__":
    sys.exit(guardian.Guardian(main, (sys.argv[1],), sys.argv[1], {restart}).run())
"""


@contextlib.contextmanager
def guarded(tmp_path: Path, body: str, restart: float = 0) -> Iterator[subprocess.Popen[str]]:
    """A first process with owners that run lines of code."""
    program, folder = tmp_path / "program.py", tmp_path / "folder"
    folder.mkdir()
    code = GUARDED.replace("{restart}", str(restart))
    program.write_text(code.replace("    {body}", textwrap.indent(textwrap.dedent(body), "    ")))
    command = [sys.executable, str(program), str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_an_owner_that_is_lost_has_a_successor(tmp_path: Path) -> None:
    body = """
    if count == 0:
        guard.ready()
        child = multiprocessing.get_context("spawn").Process(target=left_over, daemon=True)
        child.start()
        print("child", child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if count == 1:
        return 3  # before it is ready
    guard.ready()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("stays", flush=True)
    time.sleep(60)
    """
    with guarded(tmp_path, body) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        seen = []
        for line in lines:
            seen.append(line.strip())
            if line == "stays\n":
                break
        assert [line for line in seen if line.startswith("owner")] == [
            "owner 0", "owner 1", "owner 2",
        ]  # fmt: skip
        child = next(int(line.split()[1]) for line in seen if line.startswith("child"))
        # what a lost owner has started is a child of the first process, which ends it
        assert Path(f"/proc/{child}/stat").read_text().split()[3] == str(process.pid)
        os.kill(child, signal.SIGKILL)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert not Path(f"/proc/{child}").exists()


def test_an_owner_that_was_never_ready_has_none(tmp_path: Path) -> None:
    with guarded(tmp_path, "return 2") as process:
        assert process.wait(20) == 2
        assert process.stdout is not None and process.stdout.read() == "owner 0\n"


def test_an_owner_that_hangs_is_ended(tmp_path: Path) -> None:
    body = """
    guard.ready()
    if count:
        return 0
    os.kill(os.getpid(), signal.SIGSTOP)
    """
    with guarded(tmp_path, body, restart=0.5) as process:
        assert process.wait(20) == 0
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
        assert [line for line in lines if line.startswith("owner")] == ["owner 0", "owner 1"]


def test_the_end_of_the_first_process_ends_its_owner_which_leaves_nothing(tmp_path: Path) -> None:
    body = """
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    guard.ready()
    while not ended.wait(0.01): pass
    return 0
    """
    with guarded(tmp_path, body) as process:
        assert process.stdout is not None and process.stdout.readline() == "owner 0\n"
        pid = int((tmp_path / "folder" / "0").read_text())
        time.sleep(0.05)
        owner = AdoptedProcess(pid)
        process.kill()
        owner.join(10)
        assert not owner.is_alive()
    assert not (tmp_path / "folder").exists()
