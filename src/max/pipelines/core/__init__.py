"""The state of requests, and what is checked about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from max._names import lazy_names
from max.pipelines.core.speech_context import TTSContext
from max.pipelines.core.validation import (
    validate_aspect_ratio_args,
    validate_image_grid_thw_args,
    validate_image_shape_5d,
    validate_initial_prompt_has_image,
    validate_only_one_image,
    validate_requires_vision_context,
    validate_vision_position_ids,
)

if TYPE_CHECKING:
    from max.pipelines.core.exceptions import ConfigError, InputError, ModelFilesError, UserError
    from max.pipelines.core.text_context import TextContext
    from max.pipelines.core.vision_context import TextAndVisionContext

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

_MODULES = {
    "text_context": ("TextContext",),
    "vision_context": ("TextAndVisionContext",),
    "exceptions": (
        "ConfigError",
        "InputError",
        "ModelFilesError",
        "UserError",
    ),
}

__getattr__ = lazy_names(
    __name__,
    {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names},
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
