"""Finds the form of a GGUF file. The registry of architectures, which is above this folder, has the forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from max.pipelines.config.resolver import resolver

__all__ = ["form_names", "form_of"]


def form_of(name: str, metadata: Mapping[str, object]) -> Any:
    """The `GGUFForm` of a file; None if no family has the name.

    Args:
        name: llama.cpp's name of the architecture.
        metadata: The file's metadata.
    """
    fitting = [form for form in resolver().gguf_forms(name) if form.fits(metadata)]
    return max(fitting, key=lambda form: len(form.marks), default=None)


def form_names() -> list[str]:
    """llama.cpp's names of all architectures that have a form."""
    return resolver().gguf_names()
