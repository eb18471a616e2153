"""Engines behind a router that are cut off, slow or send garbage: each answer is that of one engine, or an error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import struct
import threading
import time
from multiprocessing import Pipe
from typing import Any

import pytest

from max.interfaces import GenerationStatus
from max.pipelines.generation.process.channel import ConnectionChannel, MessageCodec
from max.pipelines.generation.process.commands import GenerationRequest
from max.pipelines.generation.process.events import TokensGenerated
from max.pipelines.generation.process.service import serve
from max.pipelines.scheduler import SchedulerLimits
from max.serve.remote.connections import shut_down
from max.serve.worker.client import EngineClient
from max.serve.worker.engine_state import EngineLostError
from max.serve.worker.queued_channel import QueuedChannel
from tests.pipelines.counting_pipeline import CountingPipeline, expected
from tests.serve.test_engine_client import _all, until

GARBAGE = (
    b"",
    b"\xc1",  # no msgpack
    b"\x91\x92\xcc\xc8\xc0",  # an unknown kind
    b"\x91\x92\x00\x91\x93\xa1x\x91\xa1y\x00",  # tokens that are no numbers
    b"\x91\x92\x00\x92\x94",  # it ends too early
    bytes(range(256)),
)
EMPTY = b"\x90"
"""A frame without messages."""
STRANGER = MessageCodec().encode([TokensGenerated("nobody", (1, 2), GenerationStatus.ACTIVE)])
"""Tokens of a request that the server does not have."""


class FaultyEngine:
    """An engine in threads of this process, behind a relay that disturbs what it sends.

    Args:
        draw: The random numbers of its faults.
        faults: The kinds of faults; none: it does what it should.
    """

    exit_reason = "it was cut off"
    pid = signs = None

    def __init__(self, draw: random.Random, faults: tuple[str, ...]) -> None:
        self._draw, self._faults = draw, faults
        ends: list[Any] = [*Pipe(), *Pipe()]
        self._here, self._relayed, self._engine, self._there = ends
        self.channel = QueuedChannel(ConnectionChannel(self._here, MessageCodec()))
        runs = (self._serve, self._send_events, self._send_commands)
        self._threads = [threading.Thread(target=run, daemon=True) for run in runs]
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        pipeline = CountingPipeline(400, prefix=True, seconds=0.001)
        limits = SchedulerLimits(max_batch_size=6, max_num_steps=1)
        channel = ConnectionChannel(self._there, MessageCodec())
        with contextlib.suppress(OSError, EOFError):
            serve(pipeline, limits, channel, 0.05)
        channel.close()

    def _send_commands(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                self._engine.send_bytes(self._relayed.recv_bytes())
        self._cut(self._engine)

    def _send_events(self) -> None:
        number, first = 0, self._draw.randrange(3, 40)
        with contextlib.suppress(OSError, EOFError):
            while True:
                frame = self._engine.recv_bytes()
                number += 1
                # the first frame says that it is ready
                if self._faults and number >= first:
                    first = number + self._draw.randrange(3, 60)
                    if not self._disturb(self._draw.choice(self._faults), frame):
                        break
                self._relayed.send_bytes(frame)
        self._cut(self._relayed)
        self._cut(self._engine)

    def _disturb(self, fault: str, frame: bytes) -> bool:
        """Does a fault before a frame is sent; returns whether it is sent."""
        match fault:
            case "cut":
                return False
            case "half":  # the connection ends within a frame
                data = struct.pack("!i", len(frame)) + frame
                with contextlib.suppress(OSError):
                    os.write(self._relayed.fileno(), data[: self._draw.randrange(len(data))])
                return False
            case "slow":
                time.sleep(self._draw.uniform(0, 0.1))
            case "garbage":
                self._relayed.send_bytes(self._draw.choice(GARBAGE))
            case "stranger":
                self._relayed.send_bytes(STRANGER)
            case "empty":
                self._relayed.send_bytes(EMPTY)
        return True

    @staticmethod
    def _cut(end: Any) -> None:
        with contextlib.suppress(OSError):
            shut_down(end)

    def join(self, timeout: float | None = None) -> None:
        # one that sent garbage goes on until it is killed
        for thread in self._threads:
            thread.join(0.1)

    def kill(self) -> None:
        for end in (self._here, self._relayed, self._engine):
            self._cut(end)
        self.channel.close()
        for thread in self._threads:
            thread.join(10)


@pytest.mark.parametrize("seed", [3, *(pytest.param(n, marks=pytest.mark.long) for n in range(3))])
def test_answers_of_a_server_with_faulty_engines(seed: int) -> None:
    draw, started = random.Random(seed), list[FaultyEngine]()
    kinds = ("cut", "half", "slow", "garbage", "stranger", "empty")

    def start() -> FaultyEngine:
        # engines that are started late do what they should, so that the test ends
        faults = kinds if len(started) < 14 else ()
        started.append(FaultyEngine(random.Random(f"{seed} {len(started)}"), faults))
        return started[-1]

    prefixes = [tuple(draw.choices(range(9), k=draw.randrange(20))) for _ in range(3)]
    requests: list[GenerationRequest] = []
    for number in range(50):
        prompt = (*draw.choice(prefixes), number, *draw.choices(range(9), k=draw.randrange(6)))
        requests.append(
            GenerationRequest(f"r{number}", prompt, len(prompt) + draw.randrange(1, 60))
        )
    leaving = set(draw.sample(range(50), 6))

    async def read(client: EngineClient, number: int) -> list[int] | Exception:
        await asyncio.sleep(random.Random(number).uniform(0, 0.4))
        each = requests[number]
        if number in leaving:
            with client.open([each]) as subscription:
                await subscription.next_events()
            return []
        try:
            events = await _all(client, each)
        except EngineLostError as error:  # three died while they had it, whoever was the cause
            return error
        return [t for event in events if isinstance(event, TokensGenerated) for t in event.tokens]

    async def whole() -> list[list[int] | Exception]:
        client = EngineClient(start)
        for _ in range(2):
            client.add_replica(start)
        client.start()
        try:
            async with asyncio.timeout(100):
                await until(lambda: client.ready is not None)
                return await asyncio.gather(*(read(client, number) for number in range(50)))
        finally:
            await client.close(finish=False, timeout=0.1)
            assert client.open_requests == 0

    answers = asyncio.run(whole())
    right = 0
    for number, (each, answer) in enumerate(zip(requests, answers, strict=True)):
        if isinstance(answer, list) and number not in leaving:
            assert answer == expected(each.tokens, each.max_length - len(each.tokens)), each
            right += 1
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    assert right >= 25, errors


def test_an_engine_that_sends_frames_without_messages_is_not_lost() -> None:
    async def whole() -> None:
        client = EngineClient(lambda: FaultyEngine(random.Random(1), ("empty", "stranger")))
        client.start()
        try:
            async with asyncio.timeout(60):
                await client.wait_ready()
                for number in range(6):
                    events = await _all(client, GenerationRequest(f"r{number}", (number,), 31))
                    tokens = [t for e in events if isinstance(e, TokensGenerated) for t in e.tokens]
                    assert tokens == expected((number,), 30)
            assert client.restarts == 0
        finally:
            await client.close(finish=False, timeout=0.1)

    asyncio.run(whole())


def test_a_frame_without_messages_ends_no_reader() -> None:
    """A server whose reader has ended would wait for answers for ever."""
    ends: list[Any] = [*Pipe()]
    here, there = ends
    channel = ConnectionChannel(here, MessageCodec())
    for frame in (EMPTY, STRANGER, EMPTY, EMPTY, STRANGER):
        there.send_bytes(frame)
    assert channel.receive_all() == [] and channel.receive().request_id == "nobody"
    assert channel.receive().tokens == (1, 2)
    there.close()
    with pytest.raises(EOFError):
        channel.receive()
    channel.close()
