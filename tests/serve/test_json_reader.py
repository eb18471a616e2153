"""The reader of bodies compares with Python's, whose fragments are cut anywhere; limits come before values."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from max.serve import limits
from max.serve.errors import ApiError
from max.serve.http.bodies import json_reader
from max.serve.http.bodies.json_reader import read_object
from max.serve.http.bodies.json_structure import StructureScanner

PIECES = [
    "a",
    '"',
    "\\",
    "é",
    "中",
    "😀",
    "\n",
    *"{}[],:",
    "\ud800",
    "\udc00",
    "\x00",
    "0",
    "\\u0041",
]


def texts(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.choice([0, 1, 3, 3, 5, 40, 100])))


def name(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.choice([0, 1, 2, 2, 8])))


def values(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.4:
        return rng.choice([texts(rng), texts(rng), 1, -2.5, 1e10, None, True, 12345678901234567890])
    if kind < 0.7:
        return [values(rng, depth - 1) for _ in range(rng.randrange(5))]
    return {name(rng): values(rng, depth - 1) for _ in range(rng.randrange(5))}


def written(rng: random.Random, value: Any) -> str:
    """JSON with random spaces, escapes and repeated names."""

    def space() -> str:
        return rng.choice(["", "", " ", "\n"])

    def string(text: str) -> str:
        has_surrogate = any(0xD800 <= ord(c) < 0xE000 for c in text)
        return json.dumps(text, ensure_ascii=has_surrogate or rng.random() < 0.5)

    match value:
        case dict():
            items = list(value.items())
            if items and rng.random() < 0.3:
                items.append((rng.choice(items)[0], values(rng, 1)))
            parts = [f"{string(k)}{space()}:{space()}{written(rng, v)}" for k, v in items]
            return "{" + space() + f"{space()},{space()}".join(parts) + space() + "}"
        case list():
            return (
                "[" + space() + f",{space()}".join(written(rng, v) for v in value) + space() + "]"
            )
        case str():
            return string(value)
        case _:
            return json.dumps(value)


def damaged(rng: random.Random, text: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.randrange(1, 3)):
        at, kind = rng.randrange(len(changed)), rng.randrange(3)
        if kind == 0:
            changed[at] = rng.choice(b'{}[],:"\\0e. x\xff')
        elif kind == 1:
            del changed[at]
        else:
            changed.insert(at, rng.choice(b'{}[],:"\\0e. '))
    return bytes(changed)


@pytest.fixture(params=[16, 33, 100])
def fragment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(json_reader, "FRAGMENT", request.param)
    return request.param


def bodies(count: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(count):
        members = {name(rng): values(rng, 4) for _ in range(rng.randrange(1, 5))}
        text = written(rng, members).encode()
        yield damaged(rng, text) if rng.random() < 0.5 else text


def compare(text: bytes, fragment: int) -> bool:
    """Whether the text is JSON; both readers agree."""
    try:
        expected = json.loads(text.decode())
    except ValueError:
        expected = None
    try:
        got = read_object(text)
    except ApiError as error:
        # names and spaces beyond a fragment are refused: of 64 KiB outside of tests
        bounded = "the name of a field" in error.message or "no value from" in error.message
        assert expected is None or bounded, (text, error.message)
        return False
    assert expected is not None, text
    # orders count, and surrogates
    assert json.dumps(got) == json.dumps(expected), text
    return True


def test_random_bodies(fragment: int) -> None:
    accepted = [compare(text, fragment) for text in bodies(60, fragment) if len(text) > fragment]
    assert 3 < sum(accepted) < len(accepted)


@pytest.mark.long
def test_many_random_bodies(fragment: int) -> None:
    for text in bodies(6000, 1000 + fragment):
        if len(text) > fragment:
            compare(text, fragment)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_structure(size: int) -> None:
    """Scanned in parts of any size, the marks and quotes are those of a reader of single characters."""
    rng = random.Random(size)
    for text in bodies(30, size + 100):
        expected: list[tuple[int, int]] = []
        in_string = escaped = False
        for at, byte in enumerate(text):
            if byte == ord('"') and not escaped:
                in_string = not in_string
                expected.append((at, byte))
            elif not in_string and byte in b"{}[],:":
                expected.append((at, byte))
            escaped = byte == ord("\\") and not escaped
        scanner, got, depth = StructureScanner(text), list[tuple[int, int]](), 0
        at = 0
        while at < len(text):
            end = min(at + rng.randint(1, size), len(text))
            part = scanner.scan(end)
            for mark, after in zip(part.marks.tolist(), part.depths.tolist(), strict=True):
                depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(chr(text[mark]), 0)
                assert after == depth
            got += [(int(m), text[m]) for m in sorted([*part.marks, *part.quotes])]
            at = end
        assert got == expected, text


def body_of(field: str, value: bytes) -> bytes:
    return b'{"model": "a", "' + field.encode() + b'": ' + value + b"}"


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("a", b"[" + b"[]," * limits.MAX_ARRAYS + b"1]", f"'a': the body has more than {limits.MAX_ARRAYS} arrays"),
        ("b", b"[" + b"{}," * limits.MAX_OBJECTS + b"{}]", "'b': the body has more than 65536 objects"),
        ("c", b"[" + b'"",' * limits.MAX_TEXTS + b"1]", "'c': the body has more than 131072 texts"),
        ("d", b"[" + b"1," * limits.MAX_VALUES + b"1]", "'d': the body has more than 1048576 values"),
        ("e", b'"' + b"x" * 70_000 + b'", "f": ' + b"[" * 129 + b"]" * 129, "'f' has arrays and objects that are"),
        ("g", b'"' + b"x" * limits.MAX_UNKNOWN_BYTES + b'"', "'g' is unknown, and unknown fields may have 1048576"),
        ("h", b"1" + b"".join(b',"%d":1' % i for i in range(20_000)), "more than 4096 fields"),
        ("logit_bias", b"{" + b",".join(b'"%d":1' % i for i in range(limits.MAX_BIASES + 3)) + b"}",
         "'logit_bias': the body has more than 262144 entries"),
        ("i", b" " * 200_000 + b"1", "there is no value from byte"),
        ("i", b"1" * 200_000, "there is no value from byte"),
        ("j", b"{" + b'"' + b"k" * 200_000 + b'": 1}', "the name of a field at byte 21 has 200002 bytes"),
        ("k", b'"' + b"x" * 200_000, "Unterminated string starting at"),
        ("l", b'"' + b"x" * 70_000 + b"\xff" + b'"', "it is not UTF-8: byte 0xff at byte 70021"),
        ("m", b'"' + b"x" * 70_000 + b'\\ud83d\\q"', "Invalid \\escape"),
        ("n", b'"' + b"x" * 70_000 + b'", "o": ' + b"1" * 5000, "a number with too many digits"),
    ],
)  # fmt: skip
def test_limits(field: str, value: bytes, says: str) -> None:
    known = {"model", *"abcdefhijklmno", "logit_bias"}
    with pytest.raises(ApiError) as caught:
        read_object(body_of(field, value), known)
    assert says in caught.value.message and len(caught.value.message) < 300
    assert caught.value.status == 400


def test_what_fits() -> None:
    """Within the limits the values are those of Python's reader."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 150_000, 300_000).tolist()
    image = "data:image/png;base64," + "QUJD" * 200_000
    body = {
        "prompt": tokens,
        "messages": [{"role": "user", "content": [{"image_url": image}, "é😀\\n" * 50_000]}] * 2,
        "logit_bias": {str(i): -100 for i in range(limits.MAX_BIASES)},
        "unknown": "x" * 1_000_000,
    }
    for ascii_only in (True, False):
        text = json.dumps(body, ensure_ascii=ascii_only).encode()
        assert read_object(text, {"prompt", "messages", "logit_bias"}) == body
    assert read_object(b"\xef\xbb\xbf" + text) == body
    assert read_object(b'\xef\xbb\xbf{"a": 1e999}') == {"a": float("inf")}
