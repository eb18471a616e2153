"""Tools of `/v1/responses` as Codex sends them: namespaces of functions, and tools that OpenAI runs itself."""

from __future__ import annotations

import random

import httpx
import pytest

from max.serve.errors import ApiError
from max.serve.openai.responses.input import messages_of
from max.serve.openai.responses.tools import ResponseTool, tools_of
from max.serve.requests.request_context import CURRENT_REQUEST, RequestContext

CLOSE = {
    "type": "function",
    "name": "close",
    "parameters": {"type": "object", "properties": {"id": {"enum": ["a"]}}, "required": ["id"]},
}
SPACE = {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [CLOSE]}
SEARCH = {"type": "web_search", "external_web_access": True}


def fields(*tools: dict) -> list[ResponseTool]:
    return [ResponseTool.model_validate(tool) for tool in tools]


def test_a_call_of_a_namespace_is_one_of_its_tool(http: httpx.Client) -> None:
    body = {
        "model": "tiny", "input": "x", "tools": [SEARCH, SPACE], "max_output_tokens": 60,
        "parallel_tool_calls": False,
    }  # fmt: skip
    assert "web_search" in http.post("/v1/responses", json=body).headers["Warning"]
    refused = http.post("/v1/responses", json={**body, "tool_choice": "required"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools.0.type"
    only = {**body, "tools": [SPACE], "tool_choice": "required"}
    answer = http.post("/v1/responses", json=only).json()
    (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
    assert (call["namespace"], call["name"]) == ("agents", "close")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    again = {
        **body,
        "input": [{"role": "user", "content": "x"}, call, result],
        "max_output_tokens": 3,
    }
    assert http.post("/v1/responses", json=again).status_code == 200
    assert messages_of(again["input"])[1]["tool_calls"][0]["function"]["name"] == "agents.close"


def test_equal_names_in_several_namespaces() -> None:
    numbers = random.Random(5)
    spaces = [{**SPACE, "name": f"s{numbers.randrange(10**6)}_{i}"} for i in range(4)]
    tools, names = tools_of(fields(CLOSE, *spaces), is_auto=True)
    assert [tool.name for tool in tools] == ["close", *(f"{s['name']}.close" for s in spaces)]
    assert names == {f"{s['name']}.close": (s["name"], "close") for s in spaces}


@pytest.mark.parametrize(
    ("tool", "where"),
    [
        ({"type": "namespace", "tools": [CLOSE]}, "tools.0.name"),
        ({**SPACE, "tools": [{"type": "function"}]}, "tools.0.tools.0.name"),
        ({**SPACE, "tools": [SPACE]}, "tools.0.tools.0.type"),
        ({**SPACE, "tools": [{**CLOSE, "parameters": 3}]}, "tools.0.tools.0.parameters"),
        ({"type": "unheard_of", "name": "x"}, "tools.0.type"),
        ({**SPACE, "tools": [{**CLOSE, "name": f"n{i}"} for i in range(600)]}, "tools"),
    ],
)
def test_tools_that_do_not_fit(tool: dict, where: str) -> None:
    with pytest.raises(ApiError) as error:
        tools_of(fields(tool), is_auto=True)
    assert error.value.param == where


def test_hosted_tools_are_named_once() -> None:
    token = CURRENT_REQUEST.set(context := RequestContext())
    try:
        tools, _ = tools_of(fields(SEARCH, SEARCH, {"type": "mcp"}, CLOSE), is_auto=True)
    finally:
        CURRENT_REQUEST.reset(token)
    assert [tool.name for tool in tools] == ["close"]
    warning = context.warning(None)
    assert warning is not None and warning.endswith('are left out: web_search, mcp"')
