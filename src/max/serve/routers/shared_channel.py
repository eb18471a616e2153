"""The channel of an engine with several users: its owner, which started it, and routers, which come and go.

The owner has the whole conversation of `max.pipelines.generation.process.events`. A router sends requests and
cancellations; it gets their events, the engine's first event, the load, and the pages of the prefix cache: all that
the cache has when the router connects, then the changes. A request is the connection's own: two routers may use the
same identifier. A router that does not read loses its connection, and holds up nobody.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from os import dup
from typing import Any

from max.pipelines.generation.process.channel import Channel, ConnectionChannel, MessageCodec
from max.pipelines.generation.process.commands import CancelRequest, GenerationRequest, Shutdown
from max.pipelines.generation.process.encoder_messages import (
    EncodeRequest,
    RankRequest,
    TextsEncoded,
)
from max.pipelines.generation.process.events import (
    HASH_BYTES,
    EngineReady,
    EngineStats,
    EngineStopped,
    PagesChanged,
    PromptStarted,
    RequestFailed,
    TokensGenerated,
)
from max.serve.remote.connections import cut

logger = logging.getLogger("max.serve")

MOST_UNREAD_BYTES = 64 << 20
"""The bytes that may wait for a router that does not read; beyond, its connection ends."""
_MARK = "|"
"""Ends the number of a connection before the identifiers of its requests; identifiers of servers have none."""
_LENGTH = struct.Struct("!i")
_LONG_LENGTH = struct.Struct("!iQ")
_OF_REQUESTS = (PromptStarted, TokensGenerated, RequestFailed, TextsEncoded)
_OF_ALL = (EngineReady, EngineStats, PagesChanged, EngineStopped)


class SharedChannel:
    """The engine's end of the channels of all its users; implements ``Channel``.

    Args:
        owner: The channel to the process that has started the engine.
    """

    def __init__(self, owner: Channel[Any, Any]) -> None:
        self._owner = owner
        self._incoming: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards what follows
        self._users: dict[str, _User] = {}
        self._last = 0
        self._ready: EngineReady | None = None
        self._stats = EngineStats()
        self._pages: dict[bytes, None] = {}
        self._salt_key = b""
        self._ends = False
        threading.Thread(target=self._read_owner, name="engine owner", daemon=True).start()

    def add(self, connection: Connection) -> None:
        """Adds a router.

        Args:
            connection: The connection to it.
        """
        with self._lock:
            if self._ends:
                connection.close()
                return
            self._last += 1
            user = _User(str(self._last), connection)
            self._users[user.number] = user
            if self._ready is not None:
                pages = PagesChanged(b"".join(self._pages), is_anew=True, salt_key=self._salt_key)
                user.send([self._ready, self._stats, pages])
        threading.Thread(
            target=self._read, args=(user,), name=f"router {user.number}", daemon=True
        ).start()

    def receive(self) -> Any:
        """Waits for the next message; to be called by one thread at a time.

        Raises:
            EOFError: The owner has closed its end.
        """
        message = self._incoming.get()
        if message is None:
            self._incoming.put(None)  # for later calls
            raise EOFError("the owner has closed the channel")
        return message

    def receive_all(self) -> Sequence[Any]:
        """Waits for the next message, as :meth:`receive`."""
        return [self.receive()]

    def send(self, message: Any) -> None:
        """Sends a message to those whom it concerns; thread-safe.

        Args:
            message: The message.

        Raises:
            OSError: The owner's end is closed.
        """
        self.send_all([message])

    def send_all(self, messages: Sequence[Any]) -> None:
        """Sends several messages, one frame to each of those whom they concern; thread-safe.

        Args:
            messages: The messages.

        Raises:
            OSError: The owner's end is closed.
        """
        with self._lock:
            frames: dict[str, list[Any]] = {}
            for message in messages:
                self._note(message)
                if isinstance(message, _OF_REQUESTS):
                    number, mark, name = message.request_id.partition(_MARK)
                    if mark:
                        frames.setdefault(number, []).append(_named(message, name))
                    else:
                        frames.setdefault("", []).append(message)
                    continue
                frames.setdefault("", []).append(message)
                if isinstance(message, _OF_ALL):
                    for number in self._users:
                        frames.setdefault(number, []).append(message)
            for number, frame in frames.items():
                if (user := self._users.get(number)) is not None:
                    user.send(frame)
            own = frames.get("", [])
        # without the lock: an owner that does not read holds up the engine, as without routers
        self._owner.send_all(own)

    def close(self) -> None:
        """Closes all ends."""
        self._end_users()
        self._owner.close()

    def _note(self, message: Any) -> None:
        """Keeps what a router that connects later is told."""
        match message:
            case EngineReady():
                self._ready = message
            case EngineStats():
                self._stats = message
            case PagesChanged(added, dropped, is_anew, salt_key):
                if is_anew:
                    self._pages.clear()
                for begin in range(0, len(dropped), HASH_BYTES):
                    self._pages.pop(dropped[begin : begin + HASH_BYTES], None)
                for begin in range(0, len(added), HASH_BYTES):
                    self._pages[added[begin : begin + HASH_BYTES]] = None
                self._salt_key = salt_key or self._salt_key

    def _read_owner(self) -> None:
        while True:
            try:
                message = self._owner.receive()
            except Exception as error:
                if not isinstance(error, EOFError):
                    logger.exception("the messages of the engine's owner cannot be read")
                self._end_users()
                self._incoming.put(None)
                return
            if isinstance(message, Shutdown):
                # requests of routers go on with other engines; the end of this one is no fault of theirs
                self._end_users()
            self._incoming.put(message)

    def _end_users(self) -> None:
        with self._lock:
            self._ends = True
            for user in self._users.values():
                user.send([EngineStopped()])
                user.end()

    def _read(self, user: _User) -> None:
        """Receives the messages of a router until it is gone; then its requests are cancelled."""
        while True:
            try:
                messages = user.channel.receive_all()
            except EOFError:
                break
            except Exception:
                logger.exception("the messages of a router cannot be read")
                break
            for message in messages:
                if not isinstance(
                    message, (GenerationRequest, CancelRequest, EncodeRequest, RankRequest)
                ):
                    # the end of a router's client is told by its connection
                    if not isinstance(message, Shutdown):
                        logger.error("a router has sent %s", type(message).__name__)
                    continue
                name = f"{user.number}{_MARK}{message.request_id}"
                if not isinstance(message, CancelRequest):
                    with self._lock:
                        user.open[message.request_id] = None
                self._incoming.put(replace(message, request_id=name))
        with self._lock:
            self._users.pop(user.number, None)
            names = list(user.open)
        user.close()
        for name in names:
            self._incoming.put(CancelRequest(f"{user.number}{_MARK}{name}"))


def _named(message: Any, name: str) -> Any:
    """A message of a request with another identifier of the request."""
    if type(message) is TokensGenerated:  # nearly all of them
        return TokensGenerated(name, message.tokens, message.status, message.log_probabilities)
    return replace(message, request_id=name)


class _User:
    """A router, as an engine knows it.

    Args:
        number: The number of its connection.
        connection: The connection.
    """

    def __init__(self, number: str, connection: Connection) -> None:
        self.number = number
        self._connection, self._codec = connection, MessageCodec()
        self.channel: ConnectionChannel[Any, Any] = ConnectionChannel(connection, MessageCodec())
        """Receives its messages."""
        self.open: dict[str, None] = {}
        """The requests that have not ended."""
        self._socket = socket.socket(fileno=dup(connection.fileno()))
        self._backlog: deque[bytes] = deque()
        self._unread = 0
        self._filled = threading.Condition()  # guards the two before
        self._is_closed = self._has_writer = False

    def send(self, messages: Sequence[Any]) -> None:
        """Sends messages as one frame; what the router does not take at once is sent by a thread."""
        for message in messages:
            if isinstance(message, (RequestFailed, TextsEncoded)) or (
                isinstance(message, TokensGenerated) and message.status.is_done
            ):
                self.open.pop(message.request_id, None)
        frame = self._codec.encode(messages)
        # as `Connection` writes it
        short = len(frame) <= 0x7FFFFFFF
        head = _LENGTH.pack(len(frame)) if short else _LONG_LENGTH.pack(-1, len(frame))
        data = head + frame
        with self._filled:
            if self._is_closed:
                return
            if not self._backlog:
                try:
                    data = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:
                    return  # the reader finds the end
            if data:
                self._queue(data)

    def _queue(self, data: bytes) -> None:
        """Leaves data to the thread; the lock is held."""
        self._backlog.append(data)
        self._unread += len(data)
        if self._unread > MOST_UNREAD_BYTES:
            logger.error("a router does not read; its connection to the engine is closed")
            self._backlog.clear()
            cut(self._connection)
        elif not self._has_writer:
            self._has_writer = True
            threading.Thread(target=self._write, name="router backlog", daemon=True).start()
        else:
            self._filled.notify()

    def _write(self) -> None:
        while True:
            with self._filled:
                while not self._backlog and not self._is_closed:
                    self._filled.wait()
                if not self._backlog:
                    return
                data = self._backlog[0]
            try:
                self._socket.sendall(data)
            except OSError:
                return  # the reader finds the end
            with self._filled:
                if self._backlog:
                    self._backlog.popleft()
                    self._unread -= len(data)

    def end(self) -> None:
        """Ends the connection after what was sent at once; the reader closes it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection."""
        with self._filled:
            self._is_closed = True
            self._filled.notify_all()
        self._connection.close()
        self._socket.close()
