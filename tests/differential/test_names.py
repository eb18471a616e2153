"""Each public name of MAX 26.7 is there, or its error says what to use."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

NAMES: dict[str, list[str]] = json.loads(
    (Path(__file__).parent / "facts" / "26.7" / "names.json").read_text()
)


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    found = importlib.import_module(module)
    silent: list[str] = []
    for name in NAMES[module]:
        try:
            getattr(found, name)
        except (AttributeError, ImportError) as error:
            if f"{module}.{name} is not in this release. " not in str(error):
                silent.append(name)
    assert not silent


def test_most_names_are_there() -> None:
    names = [(importlib.import_module(module), name) for module in NAMES for name in NAMES[module]]
    there = [name for module, name in names if hasattr(module, name)]
    assert len(names) > 1100 and len(there) > 700
