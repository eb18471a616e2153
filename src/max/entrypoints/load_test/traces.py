"""Traces of requests as files: those of Mooncake (JSON lines), and tables such as Azure's and BurstGPT's (CSV).

Sources of the formats: github.com/kvcache-ai/Mooncake (``timestamp`` in milliseconds, ``input_length``,
``output_length``, ``hash_ids`` of blocks of 512 tokens), github.com/Azure/AzurePublicDataset (``TIMESTAMP``,
``ContextTokens``, ``GeneratedTokens``), github.com/HPMLL/BurstGPT (``Timestamp`` in seconds, ``Request tokens``,
``Response tokens``).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from max.pipelines.core.exceptions import InputError
from max.pipelines.scheduler.simulation import Arrival, TokenRanges

BLOCK = 512
"""The tokens of a block of Mooncake's traces."""
MOST_TOKENS = 1 << 22
"""The longest prompt or answer of a trace."""
MOST_REQUESTS = 1 << 24
_TIMES = ("timestamp", "TIMESTAMP", "Timestamp")
_INPUTS = ("input_length", "ContextTokens", "Request tokens")
_OUTPUTS = ("output_length", "GeneratedTokens", "Response tokens")


def read_trace(path: Path, most: int | None = None) -> list[Arrival]:
    """The requests of a trace, which begins at time 0.

    Prompts have tokens of their own, but for blocks of equal ``hash_ids``.

    Args:
        path: The file: JSON lines, or CSV with a header.
        most: The most requests to read; None: all.

    Raises:
        InputError: It is neither, or a line is wrong.
    """
    with path.open(encoding="utf-8", newline="") as file:
        first = file.readline()
        file.seek(0)
        rows = _json_rows(file, path) if first.lstrip().startswith("{") else csv.DictReader(file)
        arrivals: list[Arrival] = []
        for number, row in enumerate(rows, 1):
            if len(arrivals) >= (most or MOST_REQUESTS):
                break
            try:
                arrivals.append(_arrival(cast("dict[str, Any]", row), number))
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{path}: request {number} cannot be read: {error or type(error).__name__}",
                    "A request has a time, the tokens of its prompt and those of its answer.",
                ) from error
    if not arrivals:
        raise InputError(f"{path} has no requests", "Give JSON lines, or CSV with a header.")
    begin = min(arrival.time for arrival in arrivals)
    return [Arrival(each.time - begin, each.prompt, each.output_tokens) for each in arrivals]


def _json_rows(lines: Iterable[str], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}: line {number} is no JSON: {error}") from error


def _arrival(row: dict[str, Any], row_number: int) -> Arrival:
    seconds = _seconds(_field(row, _TIMES), "timestamp" in row)
    tokens, output = (_count(_field(row, names)) for names in (_INPUTS, _OUTPUTS))
    hashes = row.get("hash_ids") or []
    runs: list[range] = []
    known = 0
    for block in hashes:
        # equal numbers of blocks are equal tokens, which caches share
        first, count = _count(block, least=0) * BLOCK, min(BLOCK, tokens - known)
        if count > 0:
            runs.append(range(first, first + count))
            known += count
    # tokens that no other prompt has: below 0, as blocks are counted from 0
    runs.append(range(-row_number * MOST_TOKENS - known, -row_number * MOST_TOKENS - tokens, -1))
    return Arrival(seconds, TokenRanges(tuple(runs)), output)


def _field(row: dict[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise KeyError(f"it has none of the fields {', '.join(names)}")


def _seconds(value: Any, milliseconds: bool) -> float:
    try:
        number = float(value)
    except ValueError:
        # Azure's times have 7 digits of a second, and Python reads 6
        return datetime.fromisoformat(str(value)[:26]).timestamp()
    if not 0 <= number < 1e15:
        raise ValueError(f"its time is {value!r}")
    return number / 1e3 if milliseconds else number


def _count(value: Any, least: int = 1) -> int:
    number = int(value)
    if not least <= number <= MOST_TOKENS:
        raise ValueError(f"it has {value!r} tokens; at least {least}, at most {MOST_TOKENS}")
    return number
