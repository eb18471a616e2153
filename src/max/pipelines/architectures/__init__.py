"""The model architectures that pipelines can run."""

from __future__ import annotations

import importlib

__all__ = ["register_all_models"]

ARCHITECTURES = ("max.pipelines.architectures.llama3.arch",)
"""Modules with a list ``ARCHITECTURES`` of what they offer."""


def register_all_models() -> None:
    """Registers all architectures of this package with ``PIPELINE_REGISTRY``; again does nothing."""
    from max.pipelines.lib.registry import PIPELINE_REGISTRY

    for name in ARCHITECTURES:
        for architecture in importlib.import_module(name).ARCHITECTURES:
            PIPELINE_REGISTRY.register(architecture, allow_override=True)
