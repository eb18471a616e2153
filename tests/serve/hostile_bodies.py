"""Bodies that cost a naive reader much: wide, deep, long, with numbers and texts that are hard to read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

from pydantic import BaseModel

from max.serve.openai.fields import StrictBody

BASE = {
    "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "prompt": "a", "input": "a", "query": "a",
    "documents": ["a"], "text_1": "a", "text_2": "a", "tokens": [1], "input_prefix": "a", "input_suffix": "b",
    "max_tokens": 1,
}  # fmt: skip
"""A request of any route, but for the fields that some refuse."""
REFUSED = {
    "/v1/chat/completions": ("prompt", "input"),
    "/v1/completions": ("messages", "input"),
    "/v1/responses": ("prompt", "messages", "max_tokens"),
    "/v1/messages": ("prompt", "input"),
    "/api/chat": ("prompt", "input"),
    "/api/generate": ("messages", "input"),
    "/infill": ("messages", "input", "max_tokens"),
}
"""Fields of other routes that are an error on a route."""


def repeated(item: str, size: int, brackets: str = "[]") -> str:
    """A list of items that has about a number of characters."""
    count = max(size // (len(item) + 1), 1)
    return brackets[0] + ",".join([item] * count) + brackets[1]


def numbered(item: str, size: int, brackets: str = "{}") -> str:
    """As ``repeated``, with a number in each item."""
    count = max(size // (len(item) + 4), 1)
    return brackets[0] + ",".join(item.replace("#", str(n)) for n in range(count)) + brackets[1]


VALUES: dict[str, Callable[[int], str]] = {
    "deep lists": lambda n: "[" * (n // 2) + "]" * (n // 2),
    "deep objects": lambda n: '{"a":' * (n // 6) + "1" + "}" * (n // 6),
    "100 levels": lambda n: "[" * 100 + f'"{"x" * n}"' + "]" * 100,
    "empty lists": lambda n: repeated("[]", n),
    "empty objects": lambda n: repeated("{}", n),
    "empty texts": lambda n: repeated('""', n),
    "lists of one": lambda n: repeated("[1]", n),
    "messages": lambda n: repeated('{"role":"user","content":""}', n),
    "messages of parts": lambda n: repeated(
        '{"role":"user","content":[{"type":"text","text":"a"}]}', n
    ),
    "other parts": lambda n: (
        '[{"role":"user","content":' + repeated('{"type":"image_url"}', n) + "}]"
    ),
    "one message": lambda n: f'[{{"role":"user","content":"{"word " * (n // 5)}"}}]',
    "an image": lambda n: (
        '[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:;base64,'
        + "QUJD" * (n // 4)
        + '"}}]}]'
    ),
    "tool calls": lambda n: (
        '[{"role":"user","content":"a"},{"role":"assistant","tool_calls":'
        + repeated('{"type":"function","function":{"name":"a","arguments":"{}"}}', n)
        + "}]"
    ),
    "long arguments": lambda n: (
        '[{"role":"assistant","tool_calls":[{"function":{"name":"a","arguments":'
        + json.dumps('{"a":' + repeated("1", n) + "}")
        + '}}]},{"role":"tool","content":"a"}]'
    ),
    "tools": lambda n: numbered(
        '{"type":"function","function":{"name":"f#"},"name":"f#"}', n, "[]"
    ),
    "a wide tool": lambda n: (
        '[{"type":"function","name":"f","function":{"name":"f","parameters":{"properties":'
        + numbered('"p#":{"type":"string"}', n)
        + "}}}]"
    ),
    "blocks": lambda n: (
        '[{"role":"user","content":'
        + repeated(
            '{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"a"}]}', n
        )
        + "}]"
    ),
    "a schema": lambda n: (
        '{"type":"json_schema","json_schema":{"schema":{"enum":' + numbered('"#"', n, "[]") + "}}}"
    ),
    "biases": lambda n: numbered('"#":1', n),
    "bad biases": lambda n: numbered('"a#":1e999', n),
    "names": lambda n: numbered('"#":null', n),
    "repeated names": lambda n: repeated('"a":[]', n, "{}"),
    "small numbers": lambda n: repeated("1", n),
    "tokens": lambda n: repeated("300", n),
    "lists of tokens": lambda n: repeated(repeated("300", 4000), n),
    "floats": lambda n: repeated("1.5e-7", n),
    "infinities": lambda n: repeated("1e999", n),
    "NaN": lambda n: repeated("NaN", n),
    "long integers": lambda n: repeated("9" * 4300, n),
    "too long an integer": lambda n: "9" * n,
    "a long fraction": lambda n: "0." + "9" * n,
    "a text": lambda n: f'"{"x" * n}"',
    "quotes": lambda n: '"' + '\\"' * (n // 2) + '"',
    "escapes": lambda n: '"' + "\\u00e9" * (n // 6) + '"',
    "surrogates": lambda n: '"' + "\\ud800" * (n // 6) + '"',
    "emoji": lambda n: '"' + "😀" * (n // 4) + '"',
    "one emoji": lambda n: '"' + "x" * n + '😀"',
    "words": lambda n: '"' + "the word " * (n // 9) + '"',
    "texts": lambda n: repeated('"some words"', n),
    "spaces": lambda n: " " * n + "1",
    "commas": lambda n: "[" + "," * n + "]",
    "open": lambda n: '{"a":[1,' * (n // 8),
}
"""Values by what they are, of about a number of bytes."""


def field_names() -> list[str]:
    """The fields of all schemas of bodies."""
    names, pending = set[str](), list[type[BaseModel]]([StrictBody])
    while pending:
        kind = pending.pop()
        names |= {field.alias or name for name, field in kind.model_fields.items()}
        pending += kind.__subclasses__()
    return sorted(names)


def body(rng: random.Random, path: str, field: str, value: str) -> bytes:
    """A body of a route with one hostile field, sometimes twice, or with a byte order mark."""
    refused = REFUSED.get(path, ())
    base = {name: entry for name, entry in BASE.items() if name != field and name not in refused}
    # elsewhere they are passages for the chat template, or an error
    if not path.endswith("/rerank"):
        base.pop("documents", None)
    if path.startswith("/api/"):
        base.pop("max_tokens", None)  # not Ollama's
    if path.endswith("tokenize"):
        del base[rng.choice([name for name in ("prompt", "messages") if name in base])]
    members = [f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in base.items()]
    members.insert(rng.randrange(len(members) + 1), f"{json.dumps(field)}:{value}")
    mark = b"\xef\xbb\xbf" if rng.random() < 0.1 else b""
    return mark + ("{" + ",".join(members) + "}").encode()


def drawn(rng: random.Random, path: str, size: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Hostile bodies of a route, with their names: each field and value is likely, and what fits each other more so."""
    names = [*field_names(), "unknown"]
    likely = [
        "messages",
        "prompt",
        "input",
        "documents",
        "tokens",
        "tools",
        "logit_bias",
        "text_2",
        "system",
    ]
    for _ in range(count):
        field = rng.choice(likely if rng.random() < 0.7 else names)
        kind = rng.choice(list(VALUES))
        length = int(size * rng.choice([0.05, 0.3, 1.0]))
        yield f"{path} {field}: {kind} of {length}", body(rng, path, field, VALUES[kind](length))
