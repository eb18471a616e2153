"""The model architectures that pipelines can run."""

from __future__ import annotations

from max.pipelines.registry.registry import PIPELINE_REGISTRY

__all__ = ["register_all_models"]


def register_all_models() -> None:
    """Registers all architectures of this package with ``PIPELINE_REGISTRY``; again does nothing."""
    PIPELINE_REGISTRY.load_own()
