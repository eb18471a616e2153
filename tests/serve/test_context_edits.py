"""Anthropic's `context_management`: what its edits take out of a conversation, and what the answers say of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import anthropic
import pytest

from max.serve.anthropic.blocks import Message
from max.serve.anthropic.context_edits import CLEARED, ContextManagement, check_edits, edit_messages
from max.serve.errors import ApiError

USES, THOUGHTS = "clear_tool_uses_20250919", "clear_thinking_20251015"


def turns(count: int, names: Sequence[str] = ("read",), thought: str = "Hm.") -> list[Any]:
    """A conversation with calls t0, t1, ... of tools by turns, each after a thought."""
    made: list[Any] = [{"role": "user", "content": "Mend it."}]
    for number in range(count):
        name, call = names[number % len(names)], f"t{number}"
        blocks = [
            {"type": "thinking", "thinking": f"{thought} {number}", "signature": ""},
            {"type": "tool_use", "id": call, "name": name, "input": {"path": f"file {number}"}},
        ]
        result = {"type": "tool_result", "tool_use_id": call, "content": f"text {number} " * 9}
        made += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    return made


def edit(
    messages: list[Any], *edits: dict[str, Any]
) -> tuple[Sequence[Message], list[dict[str, Any]]]:
    """The messages without what edits take out, whose tokens are their words, and the report."""

    async def count(messages: Sequence[Message]) -> int:
        return len(json.dumps(messages).split())

    before = json.dumps(messages)
    management = ContextManagement.model_validate({"edits": list(edits)})
    check_edits(management)
    found = asyncio.run(edit_messages(messages, management, count))
    assert json.dumps(messages) == before
    return found


def blocks(messages: Sequence[Any], kind: str) -> list[dict[str, Any]]:
    listed = [m["content"] for m in messages if isinstance(m["content"], list)]
    return [block for content in listed for block in content if block["type"] == kind]


def cleared(messages: Sequence[Any]) -> list[int]:
    """The numbers of the results that were taken out."""
    results = blocks(messages, "tool_result")
    return [number for number, each in enumerate(results) if each["content"] == CLEARED]


def uses(count: int) -> dict[str, Any]:
    return {"type": "tool_uses", "value": count}


def tokens(count: int) -> dict[str, Any]:
    return {"type": "input_tokens", "value": count}


@pytest.mark.parametrize("kept", [0, 1, 3, 5, 9])
def test_the_oldest_results_are_cleared(kept: int) -> None:
    given = turns(5)
    made, report = edit(given, {"type": USES, "trigger": uses(1), "keep": uses(kept)})
    old = list(range(max(5 - kept, 0)))
    assert cleared(made) == old
    if not old:
        assert not report and made == given
        return
    (applied,) = report
    # 18 words become four
    assert applied == {
        "type": USES,
        "cleared_tool_uses": len(old),
        "cleared_input_tokens": 14 * len(old),
    }
    # what the model said stays, and so does what was kept
    assert [m for m in made if m["role"] == "assistant"] == given[1::2]
    assert made[2 * len(old) + 1 :] == given[2 * len(old) + 1 :]


def test_three_uses_are_kept_by_default_and_above_100000_tokens() -> None:
    long = turns(5)
    assert edit(long, {"type": USES}) == (long, [])
    long[0]["content"] = "word " * 100_000
    made, report = edit(long, {"type": USES})
    assert cleared(made) == [0, 1] and report[0]["cleared_tool_uses"] == 2


@pytest.mark.parametrize("unit", ["tool_uses", "input_tokens"])
def test_an_edit_begins_above_its_trigger(unit: str) -> None:
    given = turns(4)
    size = 4 if unit == "tool_uses" else len(json.dumps(given).split())
    for value, begins in ((size, False), (size - 1, True)):
        trigger = {"type": unit, "value": value}
        made, report = edit(given, {"type": USES, "trigger": trigger, "keep": uses(1)})
        assert cleared(made) == ([0, 1, 2] if begins else []) and bool(report) is begins


def test_less_than_the_least_is_not_cleared() -> None:
    given = turns(4)
    whole = {"type": USES, "trigger": uses(0), "keep": uses(2)}
    for least, taken in ((28, [0, 1]), (29, [])):
        made, report = edit(given, {**whole, "clear_at_least": tokens(least)})
        assert cleared(made) == taken and bool(report) is bool(taken)


def test_results_of_some_tools_stay() -> None:
    given = turns(6, ("read", "memory"))
    whole = {"type": USES, "trigger": uses(0), "keep": uses(1)}
    made, report = edit(given, {**whole, "exclude_tools": ["memory"]})
    assert cleared(made) == [0, 2, 4] and report[0]["cleared_tool_uses"] == 3
    assert edit(given, {**whole, "exclude_tools": ["memory", "read"]}) == (given, [])


@pytest.mark.parametrize(
    ("inputs", "empty"), [(None, []), (False, []), (True, [0, 1, 2]), (["memory"], [1]), ([], [])]
)
def test_inputs_of_cleared_calls(inputs: Any, empty: list[int]) -> None:
    given = turns(4, ("read", "memory"))
    whole = {"type": USES, "trigger": uses(0), "keep": uses(1), "clear_tool_inputs": inputs}
    made, _ = edit(given, whole)
    found = [number for number, each in enumerate(blocks(made, "tool_use")) if not each["input"]]
    assert found == empty and cleared(made) == [0, 1, 2]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (None, [2]),
        ("all", [0, 1, 2]),
        ({"type": "all"}, [0, 1, 2]),
        *(({"type": "thinking_turns", "value": n}, [0, 1, 2][-n:]) for n in (1, 2, 3, 4)),
    ],
)
def test_old_reasoning_is_cleared(keep: Any, left: list[int]) -> None:
    given = turns(3)
    made, report = edit(given, {"type": THOUGHTS, "keep": keep})
    assert [each["thinking"] for each in blocks(made, "thinking")] == [f"Hm. {n}" for n in left]
    assert blocks(made, "tool_use") == blocks(given, "tool_use")
    if len(left) == 3:
        assert not report
    else:
        (applied,) = report
        assert applied["cleared_thinking_turns"] == 3 - len(left)
        assert applied["type"] == THOUGHTS and applied["cleared_input_tokens"] > 0


def test_edits_are_applied_one_after_another() -> None:
    """Each reports what it has taken itself."""
    given = turns(5, thought="long " * 50)
    later = {"type": USES, "trigger": tokens(200), "keep": uses(1)}
    made, report = edit(given, {"type": THOUGHTS}, later)
    assert [each["type"] for each in report] == [THOUGHTS, USES]
    # without the reasoning the conversation is below the trigger
    made, report = edit(given, {"type": THOUGHTS}, {**later, "trigger": tokens(400)})
    assert [each["type"] for each in report] == [THOUGHTS] and not cleared(made)


@pytest.mark.parametrize(
    ("edits", "named"),
    [
        ([{"type": "compact_20260112"}], "edits.0"),
        ([{"type": USES, "keep": tokens(3)}], "edits.0.keep"),
        ([{"type": USES, "keep": "all"}], "edits.0.keep"),
        ([{"type": USES, "clear_at_least": uses(3)}], "edits.0.clear_at_least"),
        ([{"type": USES, "trigger": {"type": "thinking_turns", "value": 1}}], "edits.0.trigger"),
        ([{"type": THOUGHTS, "keep": uses(1)}], "edits.0.keep"),
        ([{"type": THOUGHTS, "trigger": uses(1)}], "edits.0.trigger"),
        ([{"type": THOUGHTS, "exclude_tools": ["a"]}], "edits.0.exclude_tools"),
        ([{"type": USES}, {"type": USES, "order": "newest"}], "edits.1.order"),
        ([{"type": USES}, {"type": THOUGHTS}], "edits.1"),
    ],
)
def test_edits_that_are_wrong(edits: list[dict[str, Any]], named: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_edits(ContextManagement.model_validate({"edits": edits}))
    assert caught.value.status == 400 and caught.value.param == f"context_management.{named}"


def test_the_model_reads_what_is_left(server) -> None:
    """The counts of tokens are those of the conversation as a client would have shortened it."""
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    given = turns(4)
    shorter: Any = json.loads(json.dumps(given))
    for message in shorter[2:6:2]:
        message["content"][0]["content"] = CLEARED
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    tools: Any = [{"name": "read", "description": "Reads.", "input_schema": schema}]
    common: Any = {"model": "tiny", "tools": tools}
    count = client.messages.count_tokens
    whole = count(messages=given, **common).input_tokens
    left = count(messages=shorter, **common).input_tokens
    assert left < whole
    edits: Any = {"edits": [{"type": USES, "trigger": uses(3), "keep": uses(2)}]}
    counted = client.beta.messages.count_tokens(messages=given, context_management=edits, **common)
    assert counted.input_tokens == left and counted.context_management is not None
    assert counted.context_management.original_input_tokens == whole

    wanted = {"type": USES, "cleared_tool_uses": 2, "cleared_input_tokens": whole - left}
    common |= {"max_tokens": 4, "messages": given}
    answer = client.beta.messages.create(context_management=edits, **common)
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == left
    assert answer.context_management is not None
    assert [each.to_dict() for each in answer.context_management.applied_edits] == [wanted]
    with client.beta.messages.stream(context_management=edits, **common) as stream:
        (last,) = [event for event in stream if event.type == "message_delta"]
    assert last.context_management is not None
    assert [each.to_dict() for each in last.context_management.applied_edits] == [wanted]
    # an edit that has nothing to do is none, and without edits there is no report
    few: Any = {"edits": [{"type": USES, "trigger": uses(9)}]}
    answer = client.beta.messages.create(context_management=few, **common)
    assert answer.context_management is not None
    assert answer.context_management.applied_edits == []
    assert "context_management" not in client.messages.create(**common).to_dict()
