"""Tools: the model calls a function of this program through the server's API, with arguments that fit its schema.

Needs `pip install -e ".[serve]" httpx`. Against a server of your own: `python examples/tools.py http://127.0.0.1:8000`.
"""

import json
import sys
from pathlib import Path

import httpx
from _server import serve

MODEL = Path(__file__).parents[1] / "models" / "tiny-chat"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Oslo", "Tokyo"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]


def get_weather(city: str, days: int) -> str:
    """The function that the model may call."""
    return f"{city}: sunny for {days} days"


def ask(url: str) -> None:
    """One question, the call that the model makes of it, and its result."""
    with httpx.Client(base_url=url, timeout=120) as client:
        body = {
            "model": client.get("/v1/models").json()["data"][0]["id"],
            "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
            "tools": TOOLS,
            "tool_choice": "required",
            "temperature": 0,
            "max_tokens": 120,
        }
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    message = answer["choices"][0]["message"]
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        print("the model calls", call["function"]["name"], "with", sorted(arguments))
        result = get_weather(**arguments)
        # the next request has the call and this message: the model answers with the result before it
        body["messages"] += [
            message,
            {"role": "tool", "tool_call_id": call["id"], "content": result},
        ]
    print("messages of the next request:", [m["role"] for m in body["messages"]])


if len(sys.argv) > 1:
    ask(sys.argv[1])
else:
    with serve(str(MODEL), "--max-length", "512") as url:
        ask(url)

# prints: the model calls get_weather with ['city', 'days']
# prints: messages of the next request: ['user', 'assistant', 'tool']
