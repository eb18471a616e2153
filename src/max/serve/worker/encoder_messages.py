"""The messages between the server and a worker that makes vectors and scores of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


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
    values: npt.NDArray[Any]
