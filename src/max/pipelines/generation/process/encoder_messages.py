"""The messages between the server and a worker process that runs an encoder.

Requests are answered as in :mod:`max.pipelines.generation.process.events`, whose ``CancelRequest``, ``Shutdown``,
``EngineReady``, ``RequestFailed`` and ``EngineStopped`` they share. The last event of a request, and its only one, is
:class:`TextsEncoded` or ``RequestFailed``. A cancelled request may end without an event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from max.pipelines.generation.process.commands import CancelRequest, Shutdown
from max.pipelines.generation.process.events import EngineReady, EngineStopped, RequestFailed


@dataclass(frozen=True)
class EncodeRequest:
    """Asks for the vectors of texts.

    Args:
        request_id: Identifies the request.
        texts: The texts, or their tokens.
        prompt_name: The name of a prompt of the model that is put before each text; None: its default.
    """

    request_id: str
    texts: tuple[str | tuple[int, ...], ...]
    prompt_name: str | None = None


@dataclass(frozen=True)
class RankRequest:
    """Asks for the scores of texts.

    Args:
        request_id: Identifies the request.
        query: The query.
        texts: The texts.
    """

    request_id: str
    query: str
    texts: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class TextsEncoded:
    """The only event of a request that has not failed.

    Args:
        request_id: The request.
        values: float32: vectors ``[texts, size]``, or scores ``[texts]``.
    """

    request_id: str
    values: npt.NDArray[np.float32]


EncoderCommand: TypeAlias = EncodeRequest | RankRequest | CancelRequest | Shutdown
"""What the worker of an encoder receives."""
EncoderEvent: TypeAlias = EngineReady | TextsEncoded | RequestFailed | EngineStopped
"""What the worker of an encoder sends."""
