"""Message channels between an engine and its users: connections, and the codecs of their frames."""

from __future__ import annotations

import pickle
import struct
import threading
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from max._lazy import lazy_module
from max.interfaces import GenerationStatus
from max.pipelines.generation.process.commands import (
    CancelRequest,
    ForgetPrefixes,
    GenerationRequest,
    KeepPrefixes,
    LoadAdapter,
    Shutdown,
    UnloadAdapter,
)
from max.pipelines.generation.process.encoder_messages import (
    EncodeRequest,
    RankRequest,
    TextsEncoded,
)
from max.pipelines.generation.process.events import (
    AdapterChanged,
    EngineReady,
    EngineStats,
    EngineStopped,
    OthersLoad,
    PagesChanged,
    PredictionVerified,
    PrefixesForgotten,
    PrefixesKept,
    PromptStarted,
    RequestFailed,
    TokenLogProbabilities,
    TokensGenerated,
)

if TYPE_CHECKING:
    import msgspec
else:
    # an optional package
    msgspec = lazy_module("msgspec")

In = TypeVar("In", covariant=True)
Out = TypeVar("Out", contravariant=True)
Received = TypeVar("Received")
Sent = TypeVar("Sent")


class Channel(Protocol[In, Out]):
    """One end of a channel that carries messages in both directions, in order per direction."""

    def send(self, message: Out) -> None:
        """Sends a message; thread-safe.

        Args:
            message: The message.

        Raises:
            OSError: The other end is closed.
        """
        ...

    def send_all(self, messages: Sequence[Out]) -> None:
        """Sends several messages as one frame; thread-safe.

        Args:
            messages: The messages; nothing is sent if there are none.

        Raises:
            OSError: The other end is closed.
        """
        ...

    def receive(self) -> In:
        """Waits for the next message; to be called by one thread at a time.

        Raises:
            EOFError: The other end is closed.
        """
        ...

    def receive_all(self) -> Sequence[In]:
        """Waits for the next frame and returns its messages; to be called by one thread at a time.

        Raises:
            EOFError: The other end is closed.
        """
        ...

    def close(self) -> None:
        """Closes this end."""
        ...


class Codec(Protocol):
    """Converts messages to bytes and back; both ends of a channel use the same codec."""

    def encode(self, messages: Sequence[Any]) -> bytes:
        """Encodes messages as one frame."""
        ...

    def decode(self, frame: bytes) -> list[Any]:
        """Decodes the messages of a frame."""
        ...


class PickleCodec:
    """Pickles lists of messages of any type; requires no further package."""

    def encode(self, messages: Sequence[Any]) -> bytes:
        """Encodes messages as one frame."""
        return pickle.dumps(list(messages), pickle.HIGHEST_PROTOCOL)

    def decode(self, frame: bytes) -> list[Any]:
        """Decodes the messages of a frame.

        Args:
            frame: The frame, from the other end of the channel.
        """
        return pickle.loads(frame)


# big-endian length before each frame; -1 announces one of 64 bits
_LENGTH, _LONG_LENGTH = struct.Struct("!i"), struct.Struct("!iQ")


def wire(frame: bytes) -> bytes:
    """A frame as ``Connection.send_bytes`` writes it to a socket.

    Args:
        frame: The frame.
    """
    size = len(frame)
    return (_LENGTH.pack(size) if size <= 0x7FFFFFFF else _LONG_LENGTH.pack(-1, size)) + frame


_TOKENS, _VALUES = 0, 1
_PLAIN: dict[int, type[Any]] = {
    2: GenerationRequest,
    3: CancelRequest,
    4: Shutdown,
    5: RequestFailed,
    6: EngineReady,
    7: EngineStats,
    8: EngineStopped,
    9: EncodeRequest,
    10: RankRequest,
    11: PromptStarted,
    12: ForgetPrefixes,
    13: PrefixesForgotten,
    14: LoadAdapter,
    15: UnloadAdapter,
    16: AdapterChanged,
    17: KeepPrefixes,
    18: PrefixesKept,
    19: PagesChanged,
    20: OthersLoad,
    21: PredictionVerified,
}
_TAGS = {TokensGenerated: _TOKENS, TextsEncoded: _VALUES} | {
    kind: tag for tag, kind in _PLAIN.items()
}
_Row: TypeAlias = tuple[
    str, tuple[int, ...], GenerationStatus, tuple[TokenLogProbabilities, ...] | None
]


def _plain_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a message has a {type(value).__name__}, which msgpack cannot hold")


class MessageCodec:
    """Encodes the messages of engines and encoders as msgpack, with the package msgspec; each end has its own.

    A frame is a list of ``[tag, body]``. Consecutive ``TokensGenerated``, nearly all of the traffic, share
    one entry whose body is a list of rows without field names; every other message has an entry of its own.
    """

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain_number)
        # `Raw`: a body stays undecoded until its tag is known
        self._frame = msgspec.msgpack.Decoder(list[tuple[int, msgspec.Raw]])
        self._rows = msgspec.msgpack.Decoder(list[_Row])
        self._values = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], bytes])
        self._plain = {tag: msgspec.msgpack.Decoder(kind) for tag, kind in _PLAIN.items()}

    def encode(self, messages: Sequence[Any]) -> bytes:
        """The frame of messages.

        Args:
            messages: The messages, of the types of `commands`, `events` and `encoder_messages`.

        Raises:
            TypeError: A message has another type.
        """
        entries: list[tuple[int, Any]] = []
        # neighbors only, so that the messages stay in order
        for kind, group in groupby(messages, type):
            tag = _TAGS.get(kind)
            if tag is None:
                raise TypeError(f"{kind.__name__} is no message of a worker")
            if tag == _TOKENS:
                rows = [(m.request_id, m.tokens, m.status, m.log_probabilities) for m in group]
                entries.append((tag, rows))
            elif tag == _VALUES:
                for message in group:
                    values = np.ascontiguousarray(message.values, np.float32)
                    body = (message.request_id, message.values.shape, values.tobytes())
                    entries.append((tag, body))
            else:
                entries += [(tag, message) for message in group]
        return self._encoder.encode(entries)

    def decode(self, frame: bytes) -> list[Any]:
        """The messages of a frame.

        Args:
            frame: The frame.

        Raises:
            msgspec.MsgspecError: It is no frame.
        """
        messages: list[Any] = []
        for tag, body in self._frame.decode(frame):
            if tag == _TOKENS:
                messages += [TokensGenerated(*row) for row in self._rows.decode(body)]
            elif tag == _VALUES:
                request_id, shape, data = self._values.decode(body)
                values = np.frombuffer(data, np.float32).reshape(shape)
                messages.append(TextsEncoded(request_id, values))
            else:
                messages.append(self._plain[tag].decode(body))
        return messages


class ConnectionChannel(Generic[Received, Sent]):
    """A channel over a connection of ``multiprocessing``.

    Args:
        connection: One end of a pipe or socket.
        codec: Encodes the messages; None: they are pickled.
    """

    def __init__(self, connection: Connection, codec: Codec | None = None) -> None:
        self._connection = connection
        self._codec: Codec = codec or PickleCodec()
        self._sending = threading.Lock()
        self._unread: deque[Received] = deque()  # the rest of a frame that receive() began

    def send(self, message: Sent) -> None:
        """Sends a message; thread-safe.

        Args:
            message: The message.

        Raises:
            OSError: The other end is closed.
        """
        self.send_all([message])

    def send_all(self, messages: Sequence[Sent]) -> None:
        """Sends several messages as one frame; thread-safe.

        Args:
            messages: The messages; nothing is sent if there are none.

        Raises:
            OSError: The other end is closed.
        """
        if messages:
            self.send_frame(self.frame(messages))

    def frame(self, messages: Sequence[Sent]) -> bytes:
        """Encodes messages for :meth:`send_frame`.

        Args:
            messages: The messages.

        Raises:
            Exception: The codec cannot encode a message.
        """
        return self._codec.encode(messages)

    @property
    def connection(self) -> Connection:
        """The end of the pipe or socket."""
        return self._connection

    def send_frame(self, frame: bytes) -> None:
        """Sends encoded messages; thread-safe.

        Args:
            frame: The bytes, from :meth:`frame`.

        Raises:
            OSError: The other end is closed.
        """
        with self._sending:
            self._connection.send_bytes(frame)

    def receive(self) -> Received:
        """Waits for the next message; to be called by one thread at a time.

        Raises:
            EOFError: The other end is closed.
        """
        # a frame may have no messages
        while not self._unread:
            self._unread.extend(self._next_frame())
        return self._unread.popleft()

    def receive_all(self) -> list[Received]:
        """Waits for the next frame and returns its messages; to be called by one thread at a time.

        Raises:
            EOFError: The other end is closed.
        """
        if not self._unread:
            return self._next_frame()
        messages = list(self._unread)
        self._unread.clear()
        return messages

    def _next_frame(self) -> list[Received]:
        """The messages of the next frame; a closed connection raises EOFError."""
        try:
            frame = self._connection.recv_bytes()
        except OSError as error:  # the connection was reset, or the other process was killed
            raise EOFError(str(error)) from error
        except TypeError as error:
            # a TypeError is expected only if another thread closed the connection, which then has no handle
            if not self._connection.closed:
                raise
            raise EOFError("the channel was closed") from error
        return self._codec.decode(frame)

    def close(self) -> None:
        """Closes this end."""
        self._connection.close()
