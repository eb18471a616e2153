"""Blocks of Anthropic's conversations that hold text in other forms, and reasoning that clients leave out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from max.serve.anthropic.messages import _blocks, _BlockWriter
from max.serve.anthropic.schemas import CountBody, messages_of
from max.serve.chat.run import Answer
from max.serve.errors import ApiError
from max.serve.requests.parts import ContentPart, ReasoningPart

USER = {"role": "user", "content": "Where is it?"}
FOUND = {
    "type": "search_result",
    "source": "https://example.org/oslo",
    "title": "Oslo",
    "content": [{"type": "text", "text": "Oslo is in Norway."}, {"type": "text", "text": "It is cold."}],
}  # fmt: skip
SHOWN = "Oslo\nhttps://example.org/oslo\nOslo is in Norway.\nIt is cold."


def read(*messages: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return messages_of(CountBody.model_validate({"messages": list(messages), **more}))


def test_search_results_are_text() -> None:
    assert read({"role": "user", "content": [FOUND, {"type": "text", "text": "So?"}]}) == [
        {"role": "user", "content": f"{SHOWN}\nSo?"}
    ]
    call = {"type": "tool_use", "id": "t1", "name": "find", "input": {}}
    document = {"type": "document", "source": {"type": "text", "data": "a page"}, "title": "P"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [FOUND, document]}
    *_, answer = read(
        USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}
    )
    assert answer["role"] == "tool" and answer["content"] == f"{SHOWN}\nP\na page"


@pytest.mark.parametrize(
    ("content", "is_error", "shown"),
    [
        ("no such file", True, "Error: no such file"),
        ("no such file", False, "no such file"),
        ("no such file", None, "no such file"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], True, "Error: a\nb"),
        ("", True, "Error: the tool failed"),
        (None, True, "Error: the tool failed"),
        (None, False, ""),
        # those that say it are as they were
        ("\nERROR 5", True, "\nERROR 5"),
        ("<error>x</error>", True, "<error>x</error>"),
        ("<tool_use_error>x</tool_use_error>", True, "<tool_use_error>x</tool_use_error>"),
        ("an error", True, "Error: an error"),
    ],
)
def test_the_model_is_told_that_a_tool_failed(
    content: Any, is_error: bool | None, shown: str
) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "find", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": content, "is_error": is_error}
    *_, answer = read(
        USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}
    )
    assert answer == {"role": "tool", "tool_call_id": "t1", "content": shown}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"citations": {"enabled": True}}, "a search_result with citations"),
        ({"content": [{"type": "image"}]}, "image"),
        ({"content": 5}, "expected a text, or blocks"),
    ],
)
def test_search_results_that_are_no_text(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        read({"role": "user", "content": [{**FOUND, **more}]})
    assert caught.value.param == "messages.0.content"


def test_a_compaction_stands_for_what_is_before_it() -> None:
    text = {"type": "text", "text": "And now?"}
    old = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, text]}
    block = {"type": "compaction", "content": "They went north."}
    last = {"role": "assistant", "content": [{"type": "text", "text": "gone"}, block, text]}
    summary = {"role": "user", "content": "The conversation so far, in short:\nThey went north."}
    kept = [summary, {"role": "assistant", "content": "And now?"}, USER]
    assert read(USER, old, USER, last, USER) == kept
    assert read(USER, last, USER, system="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        *kept,
    ]
    # without a summary nothing is dropped
    none = {"role": "assistant", "content": [{**block, "content": None}, text]}
    assert read(USER, none) == [USER, {"role": "assistant", "content": "And now?"}]


def test_reasoning_that_a_client_leaves_out() -> None:
    answer = Answer(content="four", reasoning="two and two")
    for shown, thought in ((True, "two and two"), (False, "")):
        thinking, text = _blocks(answer, shown)
        assert thinking == {"type": "thinking", "thinking": thought, "signature": ""}
        assert text == {"type": "text", "text": "four"}
        writer = _BlockWriter(shown)
        events = writer.write(ReasoningPart("two and ")) + writer.write(ReasoningPart("two"))
        events += writer.write(ContentPart("four")) + writer.end()
        data = [
            json.loads(line[6:]) for line in events.decode().splitlines() if line[:5] == "data:"
        ]
        deltas = [each["delta"] for each in data if "delta" in each]
        assert "".join(each.get("thinking", "") for each in deltas) == thought
        assert deltas[-1] == {"type": "text_delta", "text": "four"}
        kinds = [each["content_block"]["type"] for each in data if "content_block" in each]
        assert kinds == ["thinking", "text"]
        assert [each["index"] for each in data if each["type"].endswith("stop")] == [0, 1]
