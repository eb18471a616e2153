"""The state of requests, and what is checked about them."""

from __future__ import annotations

from max._names import lazy_names
from max.pipelines.core.context import TextAndVisionContext, TextContext, TTSContext
from max.pipelines.core.exceptions import ConfigError, InputError, ModelFilesError, UserError
from max.pipelines.core.validation import (
    validate_aspect_ratio_args,
    validate_image_grid_thw_args,
    validate_image_shape_5d,
    validate_initial_prompt_has_image,
    validate_only_one_image,
    validate_requires_vision_context,
    validate_vision_position_ids,
)

__all__ = [
    "ConfigError",
    "InputError",
    "ModelFilesError",
    "TTSContext",
    "TextAndVisionContext",
    "TextContext",
    "UserError",
    "validate_aspect_ratio_args",
    "validate_image_grid_thw_args",
    "validate_image_shape_5d",
    "validate_initial_prompt_has_image",
    "validate_only_one_image",
    "validate_requires_vision_context",
    "validate_vision_position_ids",
]

__getattr__ = lazy_names(__name__)
