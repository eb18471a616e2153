"""Parts of OpenAI's answers: identifiers, usage, log-probabilities, events."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import msgspec

from max.pipelines.tokenization.text_stream import TokenLog
from max.serve.errors import ApiError
from max.serve.models.vocabulary import Vocabulary
from max.serve.requests.request_context import current_request

encode_json = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


def new_id(prefix: str) -> str:
    """A new identifier.

    Args:
        prefix: What it begins with.
    """
    return f"{prefix}-{secrets.token_hex(14)}"


def event(data: object, is_long: bool = False) -> bytes:
    """An event of a stream.

    Args:
        data: Its data, encoded as JSON.
        is_long: Whether it has long lists.
    """
    return b"data: " + (encode_in_steps(data) if is_long else encode_json(data)) + b"\n\n"


_STEP = 4096


def encode_in_steps(data: object) -> bytes:
    """JSON of data with long lists, made in steps: while it encodes, other threads wait for Python's lock.

    Args:
        data: The data. Lists and dicts of lists are encoded in parts of `_STEP` elements.
    """
    parts: list[bytes] = []
    _add_json(data, parts)
    return b"".join(parts)


def _add_json(data: object, parts: list[bytes]) -> None:
    if isinstance(data, dict):
        separator = b"{"
        for name, value in cast("dict[str, object]", data).items():
            parts += [separator, encode_json(name), b":"]
            _add_json(value, parts)
            separator = b","
        parts.append(b"}" if data else b"{}")
    elif isinstance(data, list) and len(cast("list[object]", data)) > _STEP:
        items = cast("list[object]", data)
        for start in range(0, len(items), _STEP):
            parts.append(b"," if start else b"[")
            # without the brackets of the step's own list
            parts.append(encode_json(items[start : start + _STEP])[1:-1])
        parts.append(b"]")
    # a long list may be within one of the objects
    elif isinstance(data, list) and any(
        isinstance(item, dict) for item in cast("list[object]", data)
    ):
        separator = b"["
        for item in cast("list[object]", data):
            parts.append(separator)
            _add_json(item, parts)
            separator = b","
        parts.append(b"]")
    else:
        parts.append(encode_json(data))


HOLE = "\x00hole\x00"
"""The placeholder of a text in the data of an event that is encoded once for many texts."""


def around_hole(data: object) -> list[bytes]:
    """The parts of an event around its text, which stands in one place or several; the JSON of a text joins them.

    Args:
        data: The data, with :data:`HOLE` in place of the text.
    """
    # JSON escapes NUL, and no other text of an event has one
    return event(data).split(encode_json(HOLE))


class Chunks:
    """The events of a streamed completion, which differ in their choice.

    Args:
        head: The fields that all of them have.
        with_usage: Whether a last event has the numbers of tokens; the field is then null in the others.
    """

    def __init__(self, head: dict[str, Any], with_usage: bool) -> None:
        self._head, self._with_usage = head, with_usage

    def event(
        self,
        choice: dict[str, Any],
        totals: dict[str, Any] | None = None,
        is_long: bool = False,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        """The event of a choice.

        Args:
            choice: Its fields.
            totals: The numbers of tokens so far; None: the event does not have them.
            is_long: Whether it has long lists.
            more: Fields of this event beside the choice.
        """
        data = {**self._data(choice), **more}
        return event(data if totals is None else {**data, "usage": totals}, is_long)

    def around_hole(self, choice: dict[str, Any]) -> list[bytes]:
        """The parts of the event of a choice around its text.

        Args:
            choice: Its fields; the text is ``HOLE``.
        """
        return around_hole(self._data(choice))

    def end(self, totals: dict[str, Any]) -> bytes:
        """The last events.

        Args:
            totals: The numbers of tokens, from :func:`usage`.
        """
        if not self._with_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": totals}) + DONE

    def _data(self, choice: dict[str, Any]) -> dict[str, Any]:
        data = {**self._head, "choices": [choice]}
        # where usage is asked for, the chunks before the last have the field too
        return {**data, "usage": None} if self._with_usage else data


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that an error ends."""
    return event(error.body())


def usage(prompt: int, completion: int, has_prediction: bool = False) -> dict[str, Any]:
    """The numbers of tokens of the running request.

    Args:
        prompt: Those of the prompt.
        completion: Those that were generated.
        has_prediction: Whether the request has a prediction, whose tokens are counted too.
    """
    request, details = current_request(), dict[str, Any]()
    if has_prediction:
        details["completion_tokens_details"] = {
            "accepted_prediction_tokens": request.accepted_predictions,
            "rejected_prediction_tokens": request.rejected_predictions,
        }
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": request.cached_tokens},
        **details,
    }


def chat_logprobs(logs: Iterable[TokenLog], top: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """The log-probabilities of a chat completion.

    Args:
        logs: Those of the tokens.
        top: The number of likeliest tokens to show.
        vocabulary: The tokens' names and bytes.
    """

    def entry(token: int, log_probability: float) -> dict[str, Any]:
        return {
            "token": vocabulary.name(token),
            "logprob": log_probability,
            "bytes": list(vocabulary.token_bytes(token)),
        }

    content = [
        {
            **entry(log.token, log.log_probability),
            "top_logprobs": [entry(*likely) for likely in log.top[:top]],
        }
        for log in logs
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokens: Sequence[int], logs: Sequence[TokenLog], top: int, vocabulary: Vocabulary
) -> list[dict[str, Any] | None]:
    """vLLM's log-probabilities of a prompt: for each token but the first the likeliest ones, and the token itself.

    Args:
        tokens: The prompt.
        logs: The log-probabilities of its tokens from the second.
        top: The number of likeliest tokens to show.
        vocabulary: The tokens' bytes.
    """
    entries: list[dict[str, Any] | None] = [None]
    # nothing predicts the first token
    for token, log in zip(tokens[1:], logs, strict=False):
        # the token itself may be outside of the likeliest ones, and has no rank then
        ranks = {likely: rank for rank, (likely, _) in enumerate(log.top[:top], 1)}
        values = dict(log.top[:top]) | {token: log.log_probability}
        entries.append(
            {
                str(each): {
                    "logprob": value,
                    "rank": ranks.get(each),
                    "decoded_token": vocabulary.text(each),
                }
                for each, value in values.items()
            }
        )
    return entries


def completion_logprobs(
    logs: Iterable[TokenLog], top: int, vocabulary: Vocabulary, offset: int
) -> dict[str, Any]:
    """The log-probabilities of a completion.

    Args:
        logs: Those of the tokens; a log-probability that is NaN stands for none.
        top: The number of likeliest tokens to show.
        vocabulary: The tokens' names.
        offset: Added to the places of the tokens in the text.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for log in logs:
        # NaN differs from itself
        is_number = log.log_probability == log.log_probability
        tokens.append(vocabulary.name(log.token))
        values.append(log.log_probability if is_number else None)
        # the token itself is among them, as in OpenAI's API
        chosen = {log.token: log.log_probability}
        likely = {**dict(log.top[:top]), **(chosen if top else {})}
        tops.append({vocabulary.name(t): p for t, p in likely.items()} if is_number else None)
        offsets.append(offset + log.offset)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops if top else None,
        "text_offset": offsets,
    }
