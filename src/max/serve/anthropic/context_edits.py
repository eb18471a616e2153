"""``context_management`` of Anthropic's API: old results of tools and old reasoning are left out of a prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from max.serve.anthropic.blocks import Message
from max.serve.errors import ApiError, short_text
from max.serve.openai.fields import FIRST_ERROR, StrictBody

CLEARED = "[Old tool result content cleared]"
"""Stands in the place of a result that was taken out."""
TOOL_USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Names = Annotated[list[str], Field(max_length=1024), FIRST_ERROR]


class Limit(StrictBody):
    """A number of tokens, of uses of tools, or of turns with reasoning."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns", "all"]
    value: _Count = 0


class ContextEdit(StrictBody):
    """What is taken out of a long conversation."""

    type: str
    keep: Limit | Literal["all"] | None = None
    trigger: Limit | None = None
    clear_at_least: Limit | None = None
    exclude_tools: _Names | None = None
    clear_tool_inputs: bool | _Names | None = None


class ContextManagement(StrictBody):
    """The changes of a conversation before the model reads it."""

    edits: Annotated[list[ContextEdit], Field(max_length=64), FIRST_ERROR] = []


_UNITS = {
    TOOL_USES: {
        "trigger": ("input_tokens", "tool_uses"),
        "keep": ("tool_uses",),
        "clear_at_least": ("input_tokens",),
    },
    THINKING: {"keep": ("thinking_turns", "all")},
}
"""The limits of each edit, and what they may count."""
# the defaults of Anthropic's API
_TRIGGER, _KEPT_USES, _KEPT_TURNS = Limit(type="input_tokens", value=100_000), 3, 1


def check_edits(management: ContextManagement | None) -> None:
    """Checks that a conversation is read as the client wants it.

    Args:
        management: The field of the request.

    Raises:
        ApiError: An edit is unknown, or a limit of it counts something else.
    """
    for number, edit in enumerate(management.edits if management else ()):
        where = f"context_management.edits.{number}"
        units = _UNITS.get(edit.type)
        if units is None:
            raise ApiError(
                f"{where} is {short_text(edit.type)}; this server knows {TOOL_USES} and {THINKING}",
                param=where,
                code="unsupported_parameter",
            )
        if number and edit.type == THINKING:
            raise ApiError(f"{where} is {THINKING}; it comes first", param=where)
        known: set[str] = {"type", *units}
        if edit.type == TOOL_USES:
            known |= {"exclude_tools", "clear_tool_inputs"}
        for name in sorted(edit.model_fields_set | (edit.model_extra or {}).keys()):
            value = getattr(edit, name)
            if name not in known and value is not None:
                raise ApiError(
                    f"{where}.{name} is no field of {edit.type}", param=f"{where}.{name}"
                )
            form = value if value == "all" else getattr(value, "type", None)
            if name in units and value is not None and form not in units[name]:
                raise ApiError(
                    f"{where}.{name} is of type {short_text(form)}; it must be {' or '.join(units[name])}",
                    param=f"{where}.{name}",
                )


async def edit_messages(
    messages: Sequence[Message],
    management: ContextManagement | None,
    count: Callable[[Sequence[Message]], Awaitable[int]],
) -> tuple[Sequence[Message], list[dict[str, Any]]]:
    """A conversation without what its edits take out, and what each of these has taken.

    Args:
        messages: The messages.
        management: The edits, which were checked.
        count: Counts the tokens of a prompt with such messages.
    """
    applied: list[dict[str, Any]] = []
    for edit in management.edits if management else ():
        changed, cleared = (
            _without_results(messages, edit)
            if edit.type == TOOL_USES
            else _without_thoughts(messages, edit)
        )
        # of the conversation as earlier edits have left it
        uses = sum(block["type"] == "tool_use" for block in _blocks(messages))
        trigger = edit.trigger or _TRIGGER
        by_tokens = edit.type == TOOL_USES and trigger.type == "input_tokens"
        if not cleared or (
            edit.type == TOOL_USES and trigger.type == "tool_uses" and uses <= trigger.value
        ):
            continue
        # only where something would go: counting renders and encodes the whole conversation
        tokens = await count(messages)
        if by_tokens and tokens <= trigger.value:
            continue
        saved = tokens - await count(changed)
        if edit.clear_at_least is not None and saved < edit.clear_at_least.value:
            continue
        messages = changed
        what = "cleared_tool_uses" if edit.type == TOOL_USES else "cleared_thinking_turns"
        applied.append({"type": edit.type, what: cleared, "cleared_input_tokens": max(saved, 0)})
    return messages, applied


def _blocks(messages: Sequence[Message]) -> Iterator[Any]:
    """The blocks of all messages."""
    for message in messages:
        if not isinstance(message["content"], str):
            yield from message["content"]


def _without_results(messages: Sequence[Message], edit: ContextEdit) -> tuple[list[Message], int]:
    """The messages with a short text for each old result of a tool, and the number of these results."""
    names = {b.get("id"): b.get("name") for b in _blocks(messages) if b["type"] == "tool_use"}
    results = [b.get("tool_use_id") for b in _blocks(messages) if b["type"] == "tool_result"]
    kept = edit.keep.value if isinstance(edit.keep, Limit) else _KEPT_USES
    excluded = set(edit.exclude_tools or ())
    # results in the order of the conversation, so the last ones stay
    old = {
        each for each in results[: max(len(results) - kept, 0)] if names.get(each) not in excluded
    }
    inputs = edit.clear_tool_inputs

    def new_block(block: Any) -> Any:
        if block["type"] == "tool_result" and block.get("tool_use_id") in old:
            # the text is no error, whatever the result was
            return {k: v for k, v in block.items() if k != "is_error"} | {"content": CLEARED}
        if block["type"] == "tool_use" and block.get("id") in old:
            if inputs is True or (isinstance(inputs, list) and block.get("name") in inputs):
                return {**block, "input": {}}
        return block

    return [_with_blocks(message, new_block) for message in messages], len(old)


def _without_thoughts(messages: Sequence[Message], edit: ContextEdit) -> tuple[list[Message], int]:
    """The messages without the reasoning of old turns, and the number of these turns."""
    if edit.keep == "all" or (isinstance(edit.keep, Limit) and edit.keep.type == "all"):
        return list(messages), 0
    turns = [n for n, message in enumerate(messages) if any(map(_is_thought, _blocks([message])))]
    kept = edit.keep.value if isinstance(edit.keep, Limit) else _KEPT_TURNS
    old = set(turns[: max(len(turns) - kept, 0)])
    made = [
        _with_blocks(message, lambda block: None if _is_thought(block) else block)
        if number in old
        else message
        for number, message in enumerate(messages)
    ]
    return made, len(old)


def _is_thought(block: Any) -> bool:
    return block["type"] in ("thinking", "redacted_thinking")


def _with_blocks(message: Message, change: Callable[[Any], Any]) -> Message:
    """A message with changed blocks; those that become None are left out."""
    content = message["content"]
    if isinstance(content, str):
        return message
    made = [each for each in map(change, content) if each is not None]
    return {**message, "content": made}
