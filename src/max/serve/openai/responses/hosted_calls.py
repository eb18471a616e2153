"""Items of calls that OpenAI or its clients run (shells, patches, searches): to calls of functions, with results."""

from __future__ import annotations

import json
from typing import Any

from max.serve.errors import ApiError, short_text

_CALLS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
"""Calls whose result is an item of its own: the tool, and the field with its arguments."""
_OUTPUTS = frozenset(f"{name}_output" for name in _CALLS)
_WITH_RESULTS = {
    "code_interpreter_call": ("code_interpreter", "code", "outputs"),
    "file_search_call": ("file_search", "queries", "results"),
    "mcp_call": ("", "arguments", "output"),
}
"""Calls that have their result: the tool, the field that it was given, and that of the result."""
_WITHOUT = frozenset(("web_search_call", "image_generation_call", "mcp_list_tools"))
"""Items that hold no text of which the model has seen more than its own answer says."""
HOSTED = frozenset((*_CALLS, *_OUTPUTS, *_WITH_RESULTS, *_WITHOUT))
"""The types of these items."""


def function_items(item: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The calls of functions, and their outputs, that stand for an item; none where it has no text for the model.

    Args:
        item: The item.
        where: Its place in the request.

    Raises:
        ApiError: It lacks a field.
    """
    kind = item["type"]
    # local shells name the call by `id` in outputs
    # calls and their outputs have to agree on it, as messages pair them by it
    identifier = item.get("call_id") or item.get("id")
    if kind in _CALLS:
        name, field = _CALLS[kind]
        return [_call(identifier, name, _object(item, field, where))]
    if kind in _OUTPUTS:
        return [_output(identifier, _output_text(item, where))]
    if kind not in _WITH_RESULTS:
        return []
    name, field, result = _WITH_RESULTS[kind]
    given = item.get(field)
    if kind == "mcp_call":
        name, arguments = str(item.get("name") or "mcp"), str(given or "{}")
        text = item.get("output") or item.get("error") or ""
    else:
        arguments = json.dumps({field: given}, ensure_ascii=False)
        text = item.get(result)
    # a search without results was only noted
    if text is None:
        return []
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    return [_call(identifier, name, arguments), _output(identifier, text)]


def _call(identifier: Any, name: str, arguments: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": identifier,
        "name": name,
        "arguments": arguments,
    }


def _output(identifier: Any, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": identifier, "output": text}


def _object(item: dict[str, Any], field: str, where: str) -> str:
    value = item.get(field)
    if not isinstance(value, dict):
        raise ApiError(
            f"{where}.{field} is {short_text(value)}; expected an object", param=f"{where}.{field}"
        )
    return json.dumps(value, ensure_ascii=False)


def _output_text(item: dict[str, Any], where: str) -> str:
    """The text of an output: a text, what a shell wrote with how it ended, or the status alone."""
    output = item.get("output")
    if isinstance(output, str):
        return output
    if output is None:
        return str(item.get("status") or "")
    if not isinstance(output, list) or not all(isinstance(each, dict) for each in output):
        raise ApiError(
            f"{where}.output is {short_text(output)}; expected a text, or a list of objects",
            param=f"{where}.output",
        )
    texts: list[str] = []
    for each in output:
        texts += [text for name in ("stdout", "stderr") if (text := str(each.get(name) or ""))]
        outcome = each.get("outcome")
        if isinstance(outcome, dict):
            # of a shell; patches have no outcome
            code = outcome.get("exit_code")
            texts.append("timeout" if outcome.get("type") == "timeout" else f"exit code {code}")
    return "\n".join(texts)
