"""Tokenizers that pipelines of a user derive from: texts that stay texts, and those of the transformers package."""

from __future__ import annotations

from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from max.interfaces import (
    BaseContextType,
    PipelineTokenizer,
    RequestType,
    TextGenerationRequest,
    TextGenerationRequestMessage,
)

__all__ = ["IdentityPipelineTokenizer", "PreTrainedPipelineTokenizer", "Tokens"]

Tokens = npt.NDArray[np.integer[Any]]


class IdentityPipelineTokenizer(
    Generic[BaseContextType], PipelineTokenizer[BaseContextType, str, TextGenerationRequest]
):
    """Returns text unchanged, for pipelines that take text."""

    @property
    def eos(self) -> int:
        """0: texts have no end token."""
        return 0

    @property
    def expects_content_wrapping(self) -> bool:
        """False: parts of messages have OpenAI's form."""
        return False

    async def new_context(self, request: TextGenerationRequest) -> BaseContextType:
        """Not supported: a pipeline of text makes its own contexts.

        Args:
            request: The request.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("IdentityPipelineTokenizer makes no contexts; subclass it")

    async def encode(self, prompt: str, add_special_tokens: bool = False) -> str:
        """Returns the prompt.

        Args:
            prompt: The text.
            add_special_tokens: Unused.
        """
        return prompt

    async def decode(self, encoded: str, **kwargs: object) -> str:
        """Returns the text.

        Args:
            encoded: The text.
            kwargs: Unused.
        """
        return encoded


class PreTrainedPipelineTokenizer(
    Generic[BaseContextType, RequestType], PipelineTokenizer[BaseContextType, Tokens, RequestType]
):
    """A tokenizer of the transformers package as a pipeline's tokenizer.

    Args:
        delegate: The tokenizer of transformers, or an object with its methods.
    """

    def __init__(self, delegate: Any) -> None:
        missing = [n for n in ("encode", "decode", "eos_token_id") if not hasattr(delegate, n)]
        if missing:
            raise TypeError(
                f"PreTrainedPipelineTokenizer: {type(delegate).__name__} has no {', '.join(missing)}"
            )
        self.delegate = delegate

    def apply_chat_template(self, messages: list[TextGenerationRequestMessage]) -> str:
        """Formats a conversation with the model's chat template.

        Args:
            messages: The conversation.
        """
        text = self.delegate.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return str(text)

    @property
    def eos(self) -> int:
        """The token that ends a sequence."""
        return int(self.delegate.eos_token_id)

    @property
    def expects_content_wrapping(self) -> bool:
        """False: parts of messages have OpenAI's form."""
        return False

    async def new_context(self, request: RequestType) -> BaseContextType:
        """Not supported: the type of the context depends on the pipeline.

        Args:
            request: The request.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("PreTrainedPipelineTokenizer makes no contexts; subclass it")

    async def encode(self, prompt: str, add_special_tokens: bool = False) -> Tokens:
        """Encodes a text.

        Args:
            prompt: The text.
            add_special_tokens: Whether to add begin and end tokens.
        """
        ids = self.delegate.encode(prompt, add_special_tokens=add_special_tokens)
        return np.array(ids, np.int64)

    async def decode(self, encoded: Tokens, **kwargs: Any) -> str:
        """Decodes tokens.

        Args:
            encoded: The tokens.
            kwargs: Arguments of the tokenizer, for example ``skip_special_tokens``.
        """
        return str(self.delegate.decode(np.atleast_1d(encoded).tolist(), **kwargs))
