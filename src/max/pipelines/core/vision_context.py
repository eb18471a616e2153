"""The state of one request with images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from max.interfaces import ImageMetadata
from max.pipelines.core.exceptions import InputError
from max.pipelines.core.text_context import TextContext


@dataclass(kw_only=True)
class TextAndVisionContext(TextContext):
    """The state of one request for text about images.

    The images' tokens are disjoint ranges of the prompt; no chunk ends within a range.

    Args:
        vision_token_ids: The tokens that stand for images.
        images: The images, in the order of the prompt.
        extra_model_args: More inputs of the vision model.

    Raises:
        InputError: An image's range is out of the prompt, overlaps another, or holds other tokens.
    """

    vision_token_ids: list[int]
    images: list[ImageMetadata] = field(default_factory=list)
    extra_model_args: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        end = 0
        for image in self.images:
            if image.start_idx < end or image.end_idx > len(self.tokens):
                raise InputError(
                    f"image tokens [{image.start_idx}, {image.end_idx}) overlap another image, or "
                    f"are out of a prompt of {len(self.tokens)} tokens"
                )
            span = self.tokens[image.start_idx : image.end_idx]
            if not set(span.tolist()) <= set(self.vision_token_ids):
                raise InputError(
                    f"tokens [{image.start_idx}, {image.end_idx}) stand for an image, and are not "
                    f"all of the image tokens {self.vision_token_ids}"
                )
            end = image.end_idx
        super().__post_init__()

    def _check(self) -> None:
        """As for text; besides, no index may be within an image."""
        super()._check()
        for image in self.images:
            for name, index in (("start", self._start_idx), ("active", self._active_idx)):
                if image.start_idx < index < image.end_idx:
                    raise ValueError(
                        f"request {self.request_id}: {name} index {index} is within the image of "
                        f"tokens [{image.start_idx}, {image.end_idx})"
                    )

    @property
    def image_idx(self) -> int:
        """The first image that is not yet encoded."""
        return sum(image.end_idx <= self._start_idx for image in self.images)

    @property
    def next_images(self) -> list[ImageMetadata]:
        """The images that are not yet encoded."""
        return self.images[self.image_idx :]

    @property
    def needs_vision_encoding(self) -> bool:
        """Whether an image is not yet encoded."""
        return self.image_idx < len(self.images)

    def compute_image_aligned_idx(self, idx: int) -> int:
        """The index, or the start of the image that contains it.

        Args:
            idx: An index into the tokens.
        """
        inside = (i.start_idx for i in self.images if i.start_idx < idx < i.end_idx)
        return next(inside, idx)
