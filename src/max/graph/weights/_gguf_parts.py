"""GGUF files in parts: ``model-00001-of-00003.gguf`` and those beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MOST_PARTS = 4096


def gguf_parts(name: str) -> list[str]:
    """The names of all parts of the GGUF file that a name is a part of; only the name where it is none.

    Args:
        name: The name of a file, with folders or without.
    """
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count <= _MOST_PARTS:
        return [name]
    return [f"{match['stem']}-{each:05}-of-{count:05}.gguf" for each in range(1, count + 1)]


def gguf_stem(name: str) -> str:
    """A name of a GGUF file without its suffix and the number of its part.

    Args:
        name: The name.
    """
    match = _PART.fullmatch(name)
    if match is not None and len(gguf_parts(name)) == int(match["count"]):
        return match["stem"]
    return name.removesuffix(".gguf")


def first_parts(names: Iterable[str]) -> list[str]:
    """Names of files, of which those of later parts of a GGUF file are left out.

    Args:
        names: The names; the order stays.
    """
    listed = list(names)
    known = set(listed)
    # without the first part, the next one tells what is missing when it is opened
    return [name for name in listed if next(p for p in gguf_parts(name) if p in known) == name]
