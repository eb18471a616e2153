"""The bytes of events."""

from __future__ import annotations

import json

import pytest

from max.serve.openai.wire import HOLE, around_hole, encode_json, event

TEXTS = [
    "",
    "plain",
    'quotes " and \\ back',
    "lines\n\r\t\x00\x1f\u2028",
    "ünï 漢字 🙂",
    "data: x\n\n",
    HOLE,
]


@pytest.mark.parametrize("text", TEXTS)
def test_templates_equal_encoded_events(text) -> None:
    def data(content: str) -> dict:
        return {"model": 'a"b', "choices": [{"index": 0, "delta": {"content": content}, "n": None}]}

    filled = encode_json(text).join(around_hole(data(HOLE)))
    assert filled == event(data(text))
    assert filled.count(b"\n") == 2 and json.loads(filled[6:]) == data(text)
