"""Runs the programs of this folder, each of which condenses a published program written for MAX."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from max.pipelines.core.exceptions import ConfigError
from max.pipelines.registry.registry import PipelineRegistry

MODULES = ("arrays", "networks", "architectures", "eager", "modern")


def programs() -> list[object]:
    return [
        pytest.param(program, id=f"{module}-{program.__name__}")
        for module in MODULES
        for program in importlib.import_module(f"tests.programs.{module}").PROGRAMS
    ]


@pytest.mark.parametrize("program", programs())
def test_program(program) -> None:
    program()


def test_a_package_of_a_name_that_is_imported_already(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        package = tmp_path / folder / "namesake_architectures"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("ARCHITECTURES = []\n")
    registry = PipelineRegistry([])
    try:
        registry.load_custom([str(tmp_path / "first" / "namesake_architectures")])
        with pytest.raises(ConfigError, match="imported already, from .*first"):
            registry.load_custom([f"{tmp_path / 'second'}:namesake_architectures"])
    finally:
        sys.modules.pop("namesake_architectures", None)
        sys.path[:] = [path for path in sys.path if not path.startswith(str(tmp_path))]
