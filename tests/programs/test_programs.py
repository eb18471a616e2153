"""The programs of this folder run: each is the essence of one that somebody wrote against MAX."""

from __future__ import annotations

import importlib

import pytest

MODULES = ("arrays", "networks", "architectures")


def programs() -> list[object]:
    return [
        pytest.param(program, id=f"{module}-{program.__name__}")
        for module in MODULES
        for program in importlib.import_module(f"tests.programs.{module}").PROGRAMS
    ]


@pytest.mark.parametrize("program", programs())
def test_program(program) -> None:
    program()
