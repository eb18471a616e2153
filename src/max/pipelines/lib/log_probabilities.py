"""Documented path of log-probabilities: see `max.pipelines.sampling`."""

from __future__ import annotations

from max._names import lazy_names
from max.pipelines.sampling.log_probabilities import (
    compute_log_probabilities_ragged,
    log_probabilities_ragged_graph,
    log_softmax,
)

__all__ = ["compute_log_probabilities_ragged", "log_probabilities_ragged_graph", "log_softmax"]

__getattr__ = lazy_names(__name__)
