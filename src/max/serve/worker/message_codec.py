"""Messages between server and worker as msgpack: one frame a step.

A frame is a list of ``[tag, body]``. Consecutive ``TokensGenerated``, nearly all of the traffic, share
one entry whose body is a list of rows without field names; every other message has an entry of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

import msgspec
import numpy as np

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
from max.pipelines.generation.process.events import (
    AdapterChanged,
    EngineReady,
    EngineStats,
    EngineStopped,
    PagesChanged,
    PrefixesForgotten,
    PrefixesKept,
    PromptStarted,
    RequestFailed,
    TokenLogProbabilities,
    TokensGenerated,
)
from max.serve.worker.encoder_messages import EncodeRequest, RankRequest, TextsEncoded

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
    """Encodes the messages of workers; each end of a channel has its own."""

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
            messages: The messages, of the types of ``generation.process`` and ``encoder_messages``.

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
