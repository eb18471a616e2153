"""Runs the programs of this folder, each of which condenses a published program written for MAX."""

from __future__ import annotations

import importlib

import pytest

MODULES = ("arrays", "networks", "architectures", "eager")


def programs() -> list[object]:
    return [
        pytest.param(program, id=f"{module}-{program.__name__}")
        for module in MODULES
        for program in importlib.import_module(f"tests.programs.{module}").PROGRAMS
    ]


@pytest.mark.parametrize("program", programs())
def test_program(program) -> None:
    program()
