"""Fixtures of the kernel language's tests."""

from __future__ import annotations

import pytest

from max.kernel.frontend import outlining


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the outlined functions whose bodies are compiled; functions of tests count as fixed."""
    names: list[str] = []
    compile_body = outlining._compile_body

    def counted(fe, function, *rest):
        names.append(function.name)
        return compile_body(fe, function, *rest)

    monkeypatch.setattr(outlining, "_compile_body", counted)
    monkeypatch.setattr(outlining, "_is_fixed", lambda function: True)
    monkeypatch.setattr(outlining, "_bodies", type(outlining._bodies)())
    return names
