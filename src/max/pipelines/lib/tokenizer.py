"""Documented path of tokenizers: see `max.pipelines.tokenization`."""

from __future__ import annotations

from max._names import lazy_names
from max.pipelines.tokenization.base_tokenizers import (
    IdentityPipelineTokenizer,
    PreTrainedPipelineTokenizer,
)
from max.pipelines.tokenization.tokenizer import (
    TextTokenizer,
    max_tokens_to_generate,
    run_with_default_executor,
)

__all__ = [
    "IdentityPipelineTokenizer",
    "PreTrainedPipelineTokenizer",
    "TextTokenizer",
    "max_tokens_to_generate",
    "run_with_default_executor",
]

__getattr__ = lazy_names(__name__)
