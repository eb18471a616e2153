"""Documented path of the sampling graphs: see `max.pipelines.sampling`."""

from __future__ import annotations

from max._names import lazy_names
from max.pipelines.sampling.graph import apply_penalties, penalty_inputs, token_sampler
from max.pipelines.sampling.rejection import rejection_sampler, rejection_sampler_with_residuals

__all__ = [
    "apply_penalties",
    "penalty_inputs",
    "rejection_sampler",
    "rejection_sampler_with_residuals",
    "token_sampler",
]

__getattr__ = lazy_names(__name__)
