"""Checks of requests for vision models; an architecture lists the checks that it needs."""

from __future__ import annotations

from max.pipelines.core.exceptions import InputError
from max.pipelines.core.text_context import TextContext
from max.pipelines.core.vision_context import TextAndVisionContext


def validate_requires_vision_context(context: TextContext | TextAndVisionContext) -> None:
    """Checks that the request can hold images.

    Args:
        context: The request.

    Raises:
        InputError: It cannot.
    """
    if not isinstance(context, TextAndVisionContext):
        raise InputError(
            f"the model needs a TextAndVisionContext, and got {type(context).__name__}"
        )


def _images_of(context: TextContext | TextAndVisionContext) -> TextAndVisionContext:
    validate_requires_vision_context(context)
    assert isinstance(context, TextAndVisionContext)
    return context


def _require(context: TextContext | TextAndVisionContext, *names: str) -> None:
    if isinstance(context, TextAndVisionContext) and context.needs_vision_encoding:
        missing = [name for name in names if name not in context.extra_model_args]
        if missing:
            raise InputError(f"the images come without {', '.join(missing)}, which the model needs")


def validate_initial_prompt_has_image(context: TextContext | TextAndVisionContext) -> None:
    """Checks that a new request has an image.

    Args:
        context: The request.

    Raises:
        InputError: It has none.
    """
    if context.is_initial_prompt and not _images_of(context).images:
        raise InputError("the model needs an image in the prompt", "Give one image.")


def validate_only_one_image(context: TextContext | TextAndVisionContext) -> None:
    """Checks that there is at most one image.

    Args:
        context: The request.

    Raises:
        InputError: There are more.
    """
    if isinstance(context, TextAndVisionContext) and len(context.images) > 1:
        raise InputError(
            f"the model takes one image, and got {len(context.images)}", "Give one image."
        )


def validate_aspect_ratio_args(context: TextContext | TextAndVisionContext) -> None:
    """Checks that images come with their aspect ratios.

    Args:
        context: The request.

    Raises:
        InputError: They do not.
    """
    _require(context, "aspect_ratio_ids", "aspect_ratio_mask")


def validate_image_grid_thw_args(context: TextContext | TextAndVisionContext) -> None:
    """Checks that images come with their grids (time, height, width).

    Args:
        context: The request.

    Raises:
        InputError: They do not.
    """
    _require(context, "image_grid_thw")


def validate_vision_position_ids(context: TextContext | TextAndVisionContext) -> None:
    """Checks that images come with the positions of their patches.

    Args:
        context: The request.

    Raises:
        InputError: They do not.
    """
    _require(context, "vision_position_ids")


def validate_image_shape_5d(context: TextContext | TextAndVisionContext) -> None:
    """Checks that images have five dimensions.

    Args:
        context: The request.

    Raises:
        InputError: One has another number.
    """
    if isinstance(context, TextAndVisionContext):
        for image in context.images:
            if image.pixel_values.ndim != 5:
                raise InputError(
                    f"an image has shape {image.pixel_values.shape}; the model takes five "
                    "dimensions"
                )
