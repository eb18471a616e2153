"""What requests of Anthropic's API ask for: tools, choices, edits, options, and the messages of blocks."""

from __future__ import annotations

from typing import Any

import pytest

from max.serve.anthropic.messages import (
    _blocks,
    _BlockWriter,
    _reason,
    error_body,
    template_options,
)
from max.serve.anthropic.schemas import CountBody, MessagesBody, choice_of, messages_of, tools_of
from max.serve.chat.run import Answer
from max.serve.chat.tools.definitions import ChoiceKind, Tool, ToolChoice
from max.serve.errors import CONTEXT_LENGTH_EXCEEDED, ApiError
from max.serve.requests.parts import ArgumentsPart, ContentPart, ToolCallPart

USER = {"role": "user", "content": "Where is it?"}
FIND = {"name": "find"}
RESULT = {"type": "tool_result", "tool_use_id": "t"}


def body(*messages: dict[str, Any], **more: Any) -> CountBody:
    return CountBody.model_validate({"messages": list(messages) or [USER], **more})


def texts(*names: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": name} for name in names]


def test_tools() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tools = [
        FIND,
        {"name": "look", "description": "Looks.", "input_schema": schema, "strict": True, "type": "custom"},
        {"name": "run", "allowed_callers": ["code_execution", "direct"], "strict": False, "description": None},
    ]  # fmt: skip
    empty = {"type": "object", "properties": {}}
    assert tools_of(body(tools=tools)) == (
        Tool("find", "", empty, False), Tool("look", "Looks.", schema, True), Tool("run", "", empty, False),
    )  # fmt: skip
    assert tools_of(body()) == () == tools_of(body(tools=[]))
    for more, place in (
        ({"type": "bash_20250124"}, "tools.1.type"),
        ({"allowed_callers": ["code_execution"]}, "tools.1.allowed_callers"),
        ({"allowed_callers": []}, "tools.1.allowed_callers"),
    ):
        with pytest.raises(ApiError, match=place) as raised:
            tools_of(body(tools=[FIND, {**FIND, **more}]))
        assert raised.value.param == place


def test_choices() -> None:
    def of(**choice: Any) -> ToolChoice:
        return choice_of(body(tools=[FIND], tool_choice=choice))

    assert choice_of(body()) == choice_of(body(tools=[])) == ToolChoice(ChoiceKind.NONE)
    assert choice_of(body(tools=[FIND])) == ToolChoice(ChoiceKind.AUTO)
    for kind, own in (("auto", "AUTO"), ("any", "REQUIRED"), ("none", "NONE")):
        assert of(type=kind) == ToolChoice(ChoiceKind[own], "", True)
        assert of(type=kind, disable_parallel_tool_use=True) == ToolChoice(ChoiceKind[own], "", False)  # fmt: skip
    assert of(type="tool", name="find") == ToolChoice(ChoiceKind.NAMED, "find", True)
    assert of(type="tool", name="find", disable_parallel_tool_use=True).parallel is False
    for name in (None, ""):
        with pytest.raises(ApiError, match="tool_choice.name is missing") as raised:
            of(type="tool", name=name)
        assert raised.value.param == "tool_choice.name"
    for kind in ("any", "tool"):
        for tools in (None, []):
            with pytest.raises(ApiError, match="there are no tools") as raised:
                choice_of(body(tools=tools, tool_choice={"type": kind}))
            assert raised.value.param == "tool_choice"
    for kind in ("auto", "none"):
        assert choice_of(body(tool_choice={"type": kind})) == ToolChoice(ChoiceKind.NONE)


def test_conversations_without_edits_stay_as_they_are() -> None:
    kept = {"type": "clear_thinking_20251015", "keep": "all"}
    for edits in ([], [kept]):
        assert messages_of(body(context_management={"edits": edits})) == [USER]
    assert messages_of(body(context_management={})) == [USER]


def test_calls_and_results_are_messages_of_their_own() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "find", "input": {"a": "ö"}}
    bare = {"type": "tool_use", "id": "t2", "name": None, "input": None}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "there"},
        {"type": "tool_result", "tool_use_id": "t2", "content": texts("a", "b")},
    ]
    thought = {"type": "thinking", "thinking": "hm"}
    found = messages_of(
        body(
            USER,
            {"role": "assistant", "content": [thought, *texts("I", "look."), call, thought, bare]},
            {"role": "user", "content": [*texts("So?"), *results]},
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": ""}, *texts("There.")]},
            system=texts("Be brief.", "Be right."),
        )
    )  # fmt: skip
    assert found == [
        {"role": "system", "content": "Be brief.\nBe right."},
        USER,
        {
            "role": "assistant", "content": "I\nlook.", "reasoning_content": "hm\nhm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "find", "arguments": '{"a": "ö"}'}},
                {"id": "t2", "type": "function", "function": {"name": "", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "there"},
        {"role": "tool", "tool_call_id": "t2", "content": "a\nb"},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "There."},
    ]  # fmt: skip
    assert messages_of(body(system="")) == [USER]
    (only,) = messages_of(body({"role": "assistant", "content": [call]}))
    assert only["content"] == "" and "reasoning_content" not in only


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "image", "source": {}}, "a block of type 'image'"),
        ({"type": "document", "source": {"type": "base64", "data": "x"}}, "a document of type 'base64'"),
        ({"type": "document", "source": "text"}, "a document of type 'text'"),
        ({"type": "document", "source": {"type": "text", "data": None}}, "is None; expected a text"),
        ({"type": "document", "source": {"type": "text", "data": "x"}, "citations": {"enabled": True}},
         "a document with citations"),
        ({**RESULT, "content": ["x"]}, "a block of type 'x'"),
        ({**RESULT, "content": [{"type": "image", "text": "x"}]}, "a block of type 'image'"),
        ({**RESULT, "content": [{"type": "text", "text": 3}]}, "a block of type 'text'"),
        ({**RESULT, "content": {"type": "text"}}, "expected a text, or blocks"),
    ],
)  # fmt: skip
def test_blocks_that_hold_no_text(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as raised:
        messages_of(body(USER, {"role": "user", "content": [block]}))
    assert raised.value.param == "messages.1.content"
    if block["type"] == "document" and "citations" not in block:
        with pytest.raises(ApiError, match=message):
            messages_of(body({"role": "user", "content": [{**block, "citations": {"enabled": False}}]}))  # fmt: skip


def test_documents_have_their_title_and_context() -> None:
    for source, text in (
        ({"type": "text", "data": "a page"}, "a page"),
        ({"type": "content", "content": texts("a", "b")}, "a\nb"),
        ({"type": "content", "content": "a"}, "a"),
    ):
        for heads, shown in (
            ({}, ""), ({"title": "T"}, "T\n"), ({"context": "C", "title": "T"}, "T\nC\n"),
            ({"title": 3, "context": ""}, ""),
        ):  # fmt: skip
            block = {"type": "document", "source": source, **heads}
            assert messages_of(body({"role": "user", "content": [block]})) == [
                {"role": "user", "content": shown + text}
            ]


def test_reasoning_and_effort() -> None:
    for thinking, effort in ((None, None), ("disabled", "low"), ("adaptive", "high"), ("enabled", None)):  # fmt: skip
        more: dict[str, Any] = {} if thinking is None else {"thinking": {"type": thinking}}
        more |= {} if effort is None else {"output_config": {"effort": effort}}
        options = template_options(body(**more))
        assert options.get("enable_thinking") is (None if thinking is None else thinking != "disabled")  # fmt: skip
        assert options.get("reasoning_effort") == effort


def test_errors_and_reasons() -> None:
    kinds = {
        400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
        418: "invalid_request_error", 429: "rate_limit_error", 500: "api_error", 501: "api_error",
        503: "overloaded_error", 504: "timeout_error",
    }  # fmt: skip
    for status, kind in kinds.items():
        assert error_body(ApiError("wrong", status=status)) == {
            "type": "error",
            "error": {"type": kind, "message": "wrong"},
        }
    long = error_body(ApiError("9 tokens", code=CONTEXT_LENGTH_EXCEEDED))
    assert long["error"]["message"] == "prompt is too long: 9 tokens"
    for finish, stop, reason in (
        ("stop", None, "end_turn"), ("length", None, "max_tokens"), ("tool_calls", None, "tool_use"),
        ("cancelled", None, "refusal"), (None, None, "end_turn"), ("stop", "", "stop_sequence"),
        ("stop", "x", "stop_sequence"),
    ):  # fmt: skip
        assert _reason(finish, stop) == reason


def test_the_last_message_goes_on() -> None:
    assert not body(USER).continues
    assert body(USER, {"role": "assistant", "content": "In"}).continues
    whole = MessagesBody.model_validate({"messages": [USER], "max_tokens": 1})
    assert not whole.continues


def test_each_block_of_a_stream_has_a_begin_and_an_end() -> None:
    writer = _BlockWriter(True)
    parts = [
        ContentPart("a"), ContentPart("b"), ToolCallPart(0, "t0", "find"), ArgumentsPart(0, "{"), ArgumentsPart(0, "}"),
        ToolCallPart(1, "t1", "find"), ArgumentsPart(1, "{}"), ContentPart("c"),
    ]  # fmt: skip
    events = b"".join([*map(writer.write, parts), writer.end(), writer.end()]).decode()
    mark = "event: content_block_"
    names = [line.removeprefix(mark) for line in events.splitlines() if line.startswith(mark)]
    text, call = ["start", "delta", "delta", "stop"], ["start", "delta", "stop"]
    assert names == [*text, *text, *call, *call]
    assert _blocks(Answer(), True) == []


def test_fields_without_a_value() -> None:
    none = {"type": "text", "text": None}
    thoughts = [{"type": "thinking", "thinking": None}, {"type": "thinking", "thinking": "hm"}]
    summaries = [{"type": "compaction", "content": each} for each in ("", None, ["x"], {"a": 1})]
    said = {"role": "assistant", "content": [*texts("a"), *thoughts, none, *summaries]}
    assert messages_of(body(USER, said)) == [
        USER,
        {"role": "assistant", "content": "a\n", "reasoning_content": "\nhm"},
    ]
    alone = {"role": "assistant", "content": thoughts[1:]}
    assert messages_of(body(USER, alone)) == [
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    ]
