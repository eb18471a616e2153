"""The first request of a schema at a server of our own: how long it takes, beside one without a schema.

`python -m benchmarks.first_schemas` draws schemas of a size (objects within objects and lists, texts with expressions
and lengths, numbers with bounds, choices, references), none like another, and asks for one token of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.decisions import TINY
from benchmarks.grammars import make_model
from benchmarks.random_models import STARTUP_SHAPES, STORED
from benchmarks.runner import exit_on_sigterm, machine
from benchmarks.servers import OURS, Server, Setup, started

_HEAD = (
    "| model | bytes of a schema | p50, ms | p90, ms | most, ms | without, p50, ms |",
    "|---|---|---|---|---|---|",
)


def _name(draw: random.Random) -> str:
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz_", k=draw.randint(4, 14)))


def _value(draw: random.Random, depth: int, shared: list[str]) -> dict[str, Any]:
    """A schema of a property."""
    kind = draw.choice(
        ["string", "pattern", "length", "enum", "integer", "number", "boolean", "list", "reference"]
        + ["object"] * (3 if depth else 0)
    )
    words = " ".join(_name(draw) for _ in range(draw.randint(3, 12)))
    match kind:
        case "pattern":
            return {
                "type": "string",
                "pattern": f"^{_name(draw)}-[0-9]{{2,{draw.randint(3, 9)}}}$",
                "description": words,
            }
        case "length":
            return {
                "type": "string",
                "minLength": 1,
                "maxLength": draw.randint(8, 200),
                "description": words,
            }
        case "enum":
            return {"enum": [_name(draw) for _ in range(draw.randint(2, 12))]}
        case "integer":
            return {
                "type": "integer",
                "minimum": draw.randint(-9, 9),
                "maximum": draw.randint(10, 9999),
            }
        case "list":
            return {
                "type": "array",
                "items": _value(draw, depth - 1, shared) if depth > 0 else {"type": "string"},
            }
        case "reference":
            return {"$ref": f"#/$defs/{draw.choice(shared)}"}
        case "object":
            return _object(draw, depth - 1, draw.randint(2, 6), shared)
        case _:
            return {"type": kind, "description": words}


def _object(draw: random.Random, depth: int, count: int, shared: list[str]) -> dict[str, Any]:
    properties = {_name(draw): _value(draw, max(depth, 0), shared) for _ in range(count)}
    required = [name for name in properties if draw.random() < 0.7]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def drawn_schema(draw: random.Random, size: int) -> dict[str, Any]:
    """A schema.

    Args:
        draw: Draws it.
        size: Its bytes as JSON, about.
    """
    shared = [_name(draw) for _ in range(4)]
    schema = _object(draw, 3, 3, shared)
    schema["$defs"] = {name: _object(draw, 0, 4, shared[:1]) for name in shared[1:]}
    schema["$defs"][shared[0]] = {"type": "string", "maxLength": 40}
    while (left := size - len(json.dumps(schema))) > 0:
        name = _name(draw)
        schema["properties"][name] = _value(draw, 3 if left > 600 else 0, shared)
        if draw.random() < 0.7:
            schema["required"].append(name)
    return schema


def _seconds(server: Server, schema: dict[str, Any] | None) -> float:
    body: dict[str, Any] = {
        "model": server.model,
        "messages": [{"role": "user", "content": "Give an example."}],
        "max_tokens": 1,
        "temperature": 0,
    }
    if schema is not None:
        form = {"name": "example", "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    begin = time.perf_counter()
    asyncio.run(server.target.json("/v1/chat/completions", body))
    return time.perf_counter() - begin


def measure(server: Server, count: int, size: int) -> str:
    """The row of a server.

    Args:
        server: The server.
        count: The number of schemas.
        size: The bytes of each.
    """
    draw = random.Random(0)
    for _ in range(3):  # what all schemas have in common is made by the first one
        _seconds(server, drawn_schema(draw, 200))
        _seconds(server, None)
    schemas = [drawn_schema(draw, size) for _ in range(count)]
    with_schema: list[float] = []
    without: list[float] = []
    for schema in schemas:
        with_schema.append(1e3 * _seconds(server, schema))
        without.append(1e3 * _seconds(server, None))
    with_schema.sort()
    cells = (statistics.median(with_schema), with_schema[int(0.9 * (count - 1))], with_schema[-1])
    mean_size = round(statistics.fmean(len(json.dumps(schema)) for schema in schemas))
    row = " | ".join(f"{cell:.1f}" for cell in (*cells, statistics.median(without)))
    return f"| {Path(server.model).name} | {mean_size} | {row} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=STARTUP_SHAPES, help="random weights; else tiny-chat")
    parser.add_argument("--dtype", default="float32", choices=STORED)
    parser.add_argument("--schemas", type=int, default=40)
    parser.add_argument("--bytes", type=int, default=30_000, help="of a schema")
    parser.add_argument("--model", type=Path, help="a folder, in place of --shape")
    parser.add_argument("--folder", type=Path, help="where the model is kept for further runs")
    args = parser.parse_args()
    exit_on_sigterm()
    print(machine(), *_HEAD, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as own:
        folder = args.folder or Path(own)
        model = make_model(args.shape, args.dtype, folder) if args.shape else args.model or TINY
        with started(Setup(model, model, args.dtype, 1, 2048, Path(own)), [OURS]) as servers:
            if not servers:
                raise SystemExit("the server gives no answer")
            print(measure(servers[0], args.schemas, args.bytes), flush=True)


if __name__ == "__main__":
    main()
