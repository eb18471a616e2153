"""The object of a call whose text arrives in pieces: against a JSON reader, with work that is linear in its length."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from max.serve.chat.tools.call_scanner import CallScanner


def scan(text: str, cuts: list[int]) -> tuple[CallScanner, str, str]:
    """The scanner of a text in pieces, the arguments, and what comes after the object."""
    scanner, arguments = CallScanner("fn", "args"), ""
    begins = [0, *cuts]
    for begin, end in zip(begins, [*cuts, len(text)], strict=True):
        rest = scanner.push(text[begin:end])
        arguments += scanner.take_arguments()
        if scanner.done:
            return scanner, arguments, rest + text[end:]
    return scanner, arguments, ""


def drawn_value(rng: random.Random, depth: int = 0) -> Any:
    if depth > 2 or rng.random() < 0.4:
        return rng.choice([1, -2.5, None, True, "a", 'x"y\\', "{}[],:", "é ☃\n", " in ", ""])
    count = rng.randint(0, 3)
    if rng.random() < 0.5:
        return [drawn_value(rng, depth + 1) for _ in range(count)]
    keys = ["a", "fn", "arguments", 'b"\\']
    return {rng.choice(keys): drawn_value(rng, depth + 1) for _ in range(count)}


@pytest.mark.parametrize("form", ["object", "text", "nested"])
def test_calls_in_pieces(form: str) -> None:
    """Whatever the order of the keys, the other keys, the space and the pieces."""
    for seed in range(250):
        rng = random.Random(f"{form} {seed}")
        given = {"k": drawn_value(rng), "l": drawn_value(rng)}
        text = json.dumps(given, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5)
        name = rng.choice(["f", 'g"h\\', "☃"])
        pairs = [
            (rng.choice(["name", "tool_name", "fn"]), json.dumps(name)),
            (
                rng.choice(["arguments", "parameters", "args"]),
                json.dumps(text) if form == "text" else text,
            ),
        ]
        if form == "nested":
            inner = f'{{"name": {json.dumps(name)}, "arguments": {text}}}'
            pairs = [("type", '"function"'), ("function", inner)]
        if rng.random() < 0.5:
            pairs.append(('x"{', json.dumps(drawn_value(rng))))
        rng.shuffle(pairs)
        space = lambda rng=rng: rng.choice(["", " ", "\n  "])  # noqa: E731
        items = [f"{space()}{json.dumps(k)}{space()}:{space()}{v}{space()}" for k, v in pairs]
        call, after = "{" + ",".join(items) + "}", rng.choice(["", " after", "{}"])
        whole = call + after
        few = sorted(rng.randrange(len(whole) + 1) for _ in range(rng.randint(0, 5)))
        for cuts in ([], few, list(range(1, len(whole)))):
            scanner, arguments, rest = scan(whole, cuts)
            assert scanner.done and scanner.raw == call and scanner.name == name, (seed, cuts)
            assert json.loads(arguments) == given and rest == after, (seed, cuts)
            if form != "nested":
                assert arguments == text, (seed, cuts)


@pytest.mark.parametrize("value", ["null", '""', '"null"'])
@pytest.mark.parametrize("after", ["", ', "id": 1'])
def test_arguments_that_are_null_are_an_empty_object(value: str, after: str) -> None:
    """They are complete with the object: another value of theirs may follow."""
    call = f'{{"name": "f", "arguments": {value}{after}}}'
    for cuts in ([], list(range(1, len(call)))):
        assert scan(call, cuts)[1] == "{}"


def test_of_two_arguments_those_count_that_may_have_been_returned() -> None:
    first, name, second = '"arguments": {"a": 1} ', '"name": "f"', '"arguments": {"b": 2}'
    for parts, want in ([name, first, second], '{"a": 1}'), ([first, second, name], '{"b": 2}'):
        call = "{" + ", ".join(parts) + "}"
        for cuts in ([], list(range(1, len(call)))):
            assert scan(call, cuts)[1] == want


@pytest.mark.parametrize("kind", ["text", "space", "lists", "before the name"])
def test_the_work_grows_with_the_length(kind: str) -> None:
    """Counts what appending would copy: texts that a scanner keeps, and pieces that it joins for new arguments."""

    def copied(size: int) -> int:
        value = {
            "text": json.dumps("x\n" * size),
            "space": " " * size + "1",
            "lists": "[" * size + "]" * size,
        }
        pairs = ['"name": "f"', f'"arguments": {{"v": {value.get(kind, json.dumps("x" * size))}}}']
        call = "{" + ", ".join(pairs[::-1] if kind == "before the name" else pairs) + ', "x": "z"}'
        scanner, count = CallScanner(), 0
        for begin in range(0, len(call), 4):
            scanner.push(call[begin : begin + 4])
            count += sum(len(each) for each in vars(scanner).values() if isinstance(each, str))
            if scanner.name is not None:
                count += sum(map(len, scanner._new))
            scanner.take_arguments()
        assert scanner.done
        return count

    assert copied(4000) < 2.1 * copied(2000) + 100
