"""The model architectures that pipelines can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from max._lazy import lazy_module

# the registry imports the index of this folder
if TYPE_CHECKING:
    from max.pipelines.registry import registry
else:
    registry = lazy_module("max.pipelines.registry.registry")

__all__ = ["register_all_models"]


def register_all_models() -> None:
    """Registers all architectures of this package with ``PIPELINE_REGISTRY``; again does nothing."""
    registry.PIPELINE_REGISTRY.load_own()
