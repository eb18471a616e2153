"""Documented path of models' files: see `max.pipelines.checkpoints.hub`."""

from __future__ import annotations

from max._names import lazy_names
from max.pipelines.checkpoints.hub import (
    HuggingFaceRepo,
    download_weight_files,
    generate_local_model_path,
    try_to_load_from_cache,
    validate_hf_repo_access,
)

__all__ = [
    "HuggingFaceRepo",
    "download_weight_files",
    "generate_local_model_path",
    "try_to_load_from_cache",
    "validate_hf_repo_access",
]

__getattr__ = lazy_names(__name__)
