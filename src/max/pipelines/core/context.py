"""The state of one request, from its prompt to its last token."""

from __future__ import annotations

from max.pipelines.core.draft_tree import draft_length
from max.pipelines.core.speech_context import TTSContext
from max.pipelines.core.text_context import TextContext
from max.pipelines.core.vision_context import TextAndVisionContext

__all__ = ["TTSContext", "TextAndVisionContext", "TextContext", "draft_length"]
