"""The channel of an engine with several users: its owner, which started it, and routers, which come and go.

The owner has the whole conversation of `max.pipelines.generation.process.events`. A router sends requests and
cancellations; it gets their events, the engine's first event, the load, and the pages of the prefix cache: all that
the cache has when the router connects, then the changes. A request is the connection's own: two routers may use the
same identifier. A user that does not read loses its connection, and holds up nobody.

Each user is told how many requests the others have sent, and how much is to be read for them, so that two routers do
not choose the same engine.

If the owner is lost, its requests are cancelled, and those of the routers go on. The engine waits for the next owner,
which gets what a router gets, as long as the first process of the server runs. An engine on another machine does not
see that process; it waits as long as there are routers, which end with that process, and some time more.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from max.pipelines.generation.process.channel import ConnectionChannel, MessageCodec
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
    OthersLoad,
    PagesChanged,
    PredictionVerified,
    PromptStarted,
    RequestFailed,
    TokensGenerated,
)
from max.serve.remote.connections import shut_down
from max.serve.routers.lifeline import has_ended
from max.serve.worker.send_queue import SendQueue

logger = logging.getLogger("max.serve")

MOST_UNREAD_BYTES = 64 << 20
"""The bytes that may wait for a user that does not read; beyond, its connection ends."""
NEXT_OWNER_S = 300.0
"""Seconds that engines and routers wait for the next owner, which may wait for a cluster itself."""
ALONE_S = 30.0
"""Seconds that an engine without a pipe to the first process waits for the next owner while there is no router."""
LOAD_S = 0.01
"""The shortest time in seconds between two reports of the load of the others."""
_LOOK_S = 0.5
_FLUSH_S = 5.0
_MARK = "|"
"""Ends the number of a connection before the identifiers of its requests; identifiers of servers have none."""
_OF_REQUESTS = (PromptStarted, PredictionVerified, TokensGenerated, RequestFailed, TextsEncoded)
_OF_ALL = (EngineReady, EngineStats, PagesChanged, EngineStopped)
_REQUESTS = (GenerationRequest, EncodeRequest, RankRequest)


class SharedChannel:
    """The engine's end of the channels of all its users; implements ``Channel``.

    Args:
        owner: The connection to the process that has started the engine.
        lifeline: The pipe that ends with the first process of the server; None: there is none to this machine.
        outlives_owner: Whether the engine waits for the next owner where there is no such pipe.
    """

    def __init__(
        self,
        owner: Connection,
        lifeline: Connection | None = None,
        outlives_owner: bool = False,
    ) -> None:
        self._lifeline, self._outlives_owner = lifeline, outlives_owner
        self._incoming: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._found = threading.Condition(self._lock)  # guards what follows
        self._users: dict[str, _User] = {}
        self._last = 0
        self._ready: EngineReady | None = None
        self._stats = EngineStats()
        self._pages: dict[bytes, None] = {}
        self._salt_key = b""
        self._ends = False
        self._open = self._unread = 0
        """The requests of all users that have not ended, and the tokens to read for them."""
        self._owner = _User("", owner)
        self._follow_owner(self._owner)

    def add_owner(self, connection: Connection) -> None:
        """Takes another process as the owner; the earlier one is none any more.

        Args:
            connection: The connection to it.
        """
        with self._found:
            if self._ends:
                connection.close()
                return
            earlier, self._owner = self._owner, _User("", connection)
            self._tell_all(self._owner)
            self._found.notify_all()
        earlier.end()
        self._follow_owner(self._owner)

    def _follow_owner(self, owner: _User) -> None:
        threading.Thread(
            target=self._read_owner, args=(owner,), name="engine owner", daemon=True
        ).start()

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
            # numbers are never used again: late events of an earlier user reach nobody
            user = _User(str(self._last), connection)
            self._users[user.number] = user
            self._tell_all(user)
        threading.Thread(
            target=self._read, args=(user,), name=f"router {user.number}", daemon=True
        ).start()

    def _tell_all(self, user: _User) -> None:
        """Tells a new user what the others know already; the lock is held."""
        if self._ready is not None:
            # [pages * 16] bytes: the hashes one after another
            pages = PagesChanged(b"".join(self._pages), is_anew=True, salt_key=self._salt_key)
            user.send([self._ready, self._stats, pages])
            self._tell_loads(user)

    def receive(self) -> Any:
        """Waits for the next message; to be called by one thread at a time.

        Raises:
            EOFError: The owner has closed its end, and there is no next one.
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
        """
        self.send_all([message])

    def send_all(self, messages: Sequence[Any]) -> None:
        """Sends several messages, one frame to each of those whom they concern; thread-safe.

        Args:
            messages: The messages.
        """
        with self._lock:
            frames: dict[str, list[Any]] = {}
            for message in messages:
                self._note(message)
                if isinstance(message, _OF_REQUESTS):
                    # no mark: the owner's own request
                    number, mark, name = message.request_id.partition(_MARK)
                    if not mark:
                        number, name = "", number
                    else:
                        message = _with_request_id(message, name)
                    frames.setdefault(number, []).append(message)
                    if (user := self._user(number)) is not None:
                        self._note_progress(user, message, name)
                    continue
                frames.setdefault("", []).append(message)
                if isinstance(message, _OF_ALL):
                    for number in self._users:
                        frames.setdefault(number, []).append(message)
            for number, frame in frames.items():
                if (user := self._user(number)) is not None:
                    user.send(frame)
            # with the last report before an engine is idle the load is told in any case
            self._tell_loads(at_once=any(isinstance(each, EngineStats) for each in messages))

    def flush(self) -> None:
        """Waits until the owner has taken what was sent, for some time; nothing is sent after it."""
        self._owner.flush(_FLUSH_S)

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

    def _user(self, number: str) -> _User | None:
        return self._users.get(number) if number else self._owner

    def _begin(self, user: _User, request: Any) -> None:
        """Notes a request that a user has sent."""
        with self._lock:
            self._change(user, request.request_id, unread_tokens(request))
            self._tell_loads(but=user)

    def _change(self, user: _User, name: str, unread: int | None) -> None:
        """Notes the tokens that are to be read for a request of a user; None: it has ended. The lock is held."""
        before = user.open.pop(name, None)
        opened = (unread is not None) - (before is not None)
        read = (unread or 0) - (before or 0)
        if unread is not None:
            user.open[name] = unread
        self._open += opened
        self._unread += read
        user.unread += read

    def _forget(self, user: _User) -> None:
        """Takes the requests of a user that is gone out of the load; the lock is held."""
        for name in list(user.open):
            self._change(user, name, None)
        self._tell_loads()

    def _note_progress(self, user: _User, message: Any, name: str) -> None:
        """Notes what an event says of its request; the lock is held."""
        unread = user.open.get(name)
        # drafts are verified beside tokens, which say the rest
        if unread is None or isinstance(message, PredictionVerified):
            return
        if isinstance(message, PromptStarted):
            if unread:
                # not 0, which stands for a prompt that was read
                self._change(user, name, max(unread - message.cached_tokens, 1))
        elif not isinstance(message, TokensGenerated) or message.status.is_done:
            self._change(user, name, None)
        elif unread:
            self._change(user, name, 0)

    def _tell_loads(self, *users: _User, but: _User | None = None, at_once: bool = False) -> None:
        """Tells users what the others have sent, if it has changed and the last time was before; the lock is held.

        Args:
            users: The users; none: all.
            but: A user who is not told.
            at_once: Whether it does not matter when the last time was.
        """
        now = time.monotonic()
        for user in users or (self._owner, *self._users.values()):
            load = OthersLoad(self._open - len(user.open), self._unread - user.unread)
            if load != user.told and user is not but and (at_once or now - user.told_at >= LOAD_S):
                user.told, user.told_at = load, now
                user.send([load])

    def _read_owner(self, owner: _User) -> None:
        """Receives the messages of an owner until it is gone; then waits for the next one, or ends all."""
        for message in owner.messages("the engine's owner"):
            if owner is not self._owner:
                break  # it has hung, and what it says now does not count
            if isinstance(message, Shutdown):
                # requests of routers go on with other engines; the end of this one is no fault of theirs
                self._end_users()
            elif isinstance(message, _REQUESTS):
                self._begin(owner, message)
            self._incoming.put(message)
        with self._lock:
            names = list(owner.open)
            self._forget(owner)
        owner.close()
        for name in names:
            self._incoming.put(CancelRequest(name))
        if not self._has_next(owner):
            self._end_users()
            self._incoming.put(None)

    def _has_next(self, owner: _User) -> bool:
        """Waits for the owner after one that is lost; whether there is one."""
        if self._lifeline is None and not self._outlives_owner:
            return False
        alone_since = time.monotonic()
        end = alone_since + NEXT_OWNER_S
        with self._found:
            while self._owner is owner and not self._ends:
                now = time.monotonic()
                if self._users:
                    alone_since = now
                # an engine of another machine
                if self._lifeline is None:
                    is_over = now - alone_since > ALONE_S
                else:
                    is_over = has_ended(self._lifeline)
                if is_over or now > end:
                    return False
                self._found.wait(_LOOK_S)
            return self._owner is not owner

    def _end_users(self) -> None:
        with self._lock:
            self._ends = True
            for user in self._users.values():
                user.send([EngineStopped()])
                user.end()

    def _read(self, user: _User) -> None:
        """Receives the messages of a router until it is gone; then its requests are cancelled."""
        for message in user.messages("a router"):
            if not isinstance(message, (*_REQUESTS, CancelRequest)):
                # the end of a router's client is told by its connection
                if not isinstance(message, Shutdown):
                    logger.error("a router has sent %s", type(message).__name__)
                continue
            name = f"{user.number}{_MARK}{message.request_id}"
            if not isinstance(message, CancelRequest):
                self._begin(user, message)
            self._incoming.put(replace(message, request_id=name))
        with self._lock:
            self._users.pop(user.number, None)
            names = list(user.open)
            self._forget(user)
        user.close()
        for name in names:
            self._incoming.put(CancelRequest(f"{user.number}{_MARK}{name}"))


def unread_tokens(request: Any) -> int:
    """The tokens that are to be read for a request; those of a text are estimated by its characters."""
    if isinstance(request, GenerationRequest):
        return len(request.tokens) + len(request.generated_tokens)
    # about four characters are one token
    characters = sum(len(text) for text in request.texts if isinstance(text, str))
    return characters // 4 + sum(len(text) for text in request.texts if not isinstance(text, str))


def _with_request_id(message: Any, name: str) -> Any:
    """A message of a request with another identifier of the request."""
    if type(message) is TokensGenerated:  # nearly all of them
        return TokensGenerated(name, message.tokens, message.status, message.log_probabilities)
    return replace(message, request_id=name)


class _User:
    """A router or the owner, as an engine knows it.

    Args:
        number: The number of its connection; empty: it is the owner.
        connection: The connection.
    """

    def __init__(self, number: str, connection: Connection) -> None:
        self.number = number
        self._connection, self._codec = connection, MessageCodec()
        self.channel: ConnectionChannel[Any, Any] = ConnectionChannel(connection, MessageCodec())
        """Receives its messages."""
        self.open: dict[str, int] = {}
        """The requests that have not ended, with the tokens that are to be read for them."""
        self.unread = 0
        """The sum of these."""
        self.told, self.told_at = OthersLoad(), 0.0
        """The load of the others that it was told last, and when."""
        self._sends = SendQueue(connection, f"to router {number}" if number else "to owner")
        self._lock = threading.Lock()
        self._is_closed = False  # guarded by it

    def messages(self, name: str) -> Iterator[Any]:
        """Its messages, until it is gone.

        Args:
            name: What it is called if they cannot be read.
        """
        while True:
            try:
                messages = self.channel.receive_all()
            except EOFError:
                return
            except Exception:
                if not self._is_closed:  # not by this side
                    logger.exception("the messages of %s cannot be read", name)
                return
            yield from messages

    def send(self, messages: Sequence[Any]) -> None:
        """Sends messages as one frame, without a wait; beyond `MOST_UNREAD_BYTES` the connection ends."""
        with contextlib.suppress(OSError):  # the reader finds the end
            if self._sends.send(self._codec.encode(messages)) > MOST_UNREAD_BYTES:
                logger.error("a router or the owner does not read; its connection is closed")
                self._sends.end()
                self.end()

    def flush(self, timeout: float) -> None:
        """Waits until all was sent.

        Args:
            timeout: The longest time in seconds.
        """
        self._sends.flush(timeout)

    def end(self) -> None:
        """Ends the connection after what was sent at once; the reader closes it."""
        with self._lock:
            if not self._is_closed:
                shut_down(self._connection)

    def close(self) -> None:
        """Closes the connection; what waits to be sent still is."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._sends.end()
            # a thread that still reads would keep the connection open
            shut_down(self._connection, socket.SHUT_RD)
            self._connection.close()
