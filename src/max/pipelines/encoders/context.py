"""The state of an embedding or ranking request, and the tokenizer that creates it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from max.interfaces import GenerationStatus, RequestID, TextGenerationRequest
from max.pipelines.core.exceptions import InputError, ModelFilesError
from max.pipelines.core.native_calls import native_calls
from max.pipelines.core.text import utf8
from max.pipelines.tokenization.hf_tokenizer import tokenizer_json
from max.pipelines.tokenization.tokenizer import TextTokenizer

__all__ = ["EncoderTokenizer", "TextEmbeddingContext"]

logger = logging.getLogger("max.pipelines")

Integers = npt.NDArray[np.int64]


@dataclass
class TextEmbeddingContext:
    """The state of one request: tokens in, one vector out, in one step.

    Args:
        tokens: The tokens ``[n]``.
        token_types: The type of each token ``[n]``: 1 for the second text of a pair; None: 0 for all.
        model_name: The name of the requested model.
        request_id: Identifies the request.
        status: The state of the request.
    """

    tokens: Integers
    token_types: Integers | None = None
    model_name: str = ""
    request_id: RequestID = field(default_factory=RequestID)
    status: GenerationStatus = GenerationStatus.ACTIVE

    @property
    def active_length(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def is_done(self) -> bool:
        """Whether the request has ended."""
        return self.status.is_done


class EncoderTokenizer(TextTokenizer):
    """The tokenizer of an encoder: it truncates longer texts than the model reads, as sentence-transformers does.

    Args:
        model_path: The model's folder, or its name on the hub.
        options: As for `TextTokenizer`; ``max_length`` is the most tokens of a text.

    Raises:
        ModelFilesError: The model has no tokenizer, or none of the tokenizers package.
    """

    def __init__(self, model_path: str, **options: Any) -> None:
        super().__init__(model_path, **options)
        backend = getattr(self.delegate, "backend_tokenizer", None)
        if backend is None:
            raise ModelFilesError(
                f"{model_path} has no tokenizer.json", "Add the file to the model's folder."
            )
        # a copy: the tokenizer of the model is shared, and does not cut off
        self._backend = type(backend).from_str(tokenizer_json(self.delegate))
        model_max_length = getattr(self.delegate, "model_max_length", None)
        if model_max_length is not None and (
            self.max_length is None or model_max_length < self.max_length
        ):
            self.max_length = model_max_length
        if self.max_length is not None:
            self._backend.enable_truncation(self.max_length)

    def contexts(
        self, texts: Sequence[str | tuple[str, str]], model_name: str = ""
    ) -> list[TextEmbeddingContext]:
        """The states of requests for texts or pairs of texts, tokenized together.

        A text of more tokens than the model reads is truncated with a warning; of a pair, the longer text.

        Args:
            texts: The texts.
            model_name: The name of the requested model.

        Raises:
            InputError: A text is not UTF-8, or has no tokens.
        """
        for text in texts:
            for part in (text,) if isinstance(text, str) else text:
                utf8(part)
        with native_calls("the tokenizer cannot handle its own tokens"):
            encodings = self._backend.encode_batch(list(texts))
        cut = [index for index, encoding in enumerate(encodings) if encoding.overflowing]
        if cut:
            shown = ", ".join(str(index) for index in cut[:5]) + (", …" if len(cut) > 5 else "")
            logger.warning(
                "%d of %d texts are longer than %d tokens and were cut off (number %s)",
                len(cut),
                len(texts),
                self.max_length,
                shown,
            )
        contexts: list[TextEmbeddingContext] = []
        for index, encoding in enumerate(encodings):
            if not encoding.ids:
                raise InputError(f"text {index} has no tokens", "Give a text that is not empty.")
            types, tokens = np.array(encoding.type_ids, np.int64), np.array(encoding.ids, np.int64)
            self.check_tokens(tokens, of_text=True)
            contexts.append(
                TextEmbeddingContext(tokens, types if types.any() else None, model_name)
            )
        return contexts

    async def new_context(self, request: TextGenerationRequest) -> TextEmbeddingContext:  # type: ignore[override]
        """The state of a request.

        Args:
            request: The request with a prompt: a text, or its tokens.

        Raises:
            InputError: It has no prompt, or no tokens.
        """
        prompt = request.prompt
        if prompt is None:
            raise InputError("the request has no prompt", "Give a text as its prompt.")
        if isinstance(prompt, str):
            (context,) = self.contexts([prompt], request.model_name)
        else:
            # tokens that the caller made are not cut off
            context = TextEmbeddingContext(
                np.asarray(self.encode_now(prompt), np.int64), None, request.model_name
            )
        context.request_id = request.request_id
        return context
