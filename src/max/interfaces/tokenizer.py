"""The interface of the tokenizers of pipelines."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, runtime_checkable

from max.interfaces.context import BaseContext
from max.interfaces.request import Request

TokenizerEncoded = TypeVar("TokenizerEncoded")
UnboundContextType = TypeVar("UnboundContextType", bound=BaseContext, covariant=True)
RequestType = TypeVar("RequestType", bound=Request, contravariant=True)


@runtime_checkable
class PipelineTokenizer(Protocol[UnboundContextType, TokenizerEncoded, RequestType]):
    """Converts text to tokens and back, and requests to contexts."""

    @property
    def eos(self) -> int:
        """The token that ends a sequence."""
        ...

    @property
    def expects_content_wrapping(self) -> bool:
        """Whether the parts of a message hold their text in ``content``.

        If so, a text part is ``{"type": "text", "content": "..."}``; if not, it is
        ``{"type": "text", "text": "..."}`` as in the OpenAI API. An image part is
        ``{"type": "image"}`` in both cases; its bytes are in ``request.images``.
        """
        ...

    async def new_context(self, request: RequestType) -> UnboundContextType:
        """Creates the initial state of a request.

        Args:
            request: The request as received.
        """
        ...

    async def encode(self, prompt: str, add_special_tokens: bool) -> TokenizerEncoded:
        """Converts a text to tokens.

        Args:
            prompt: The text.
            add_special_tokens: Whether the tokenizer adds its begin (and end) tokens.

        Raises:
            ValueError: The prompt is longer than the model's context.
        """
        ...

    async def decode(self, encoded: TokenizerEncoded, **kwargs: Any) -> str:
        """Converts tokens to text.

        Args:
            encoded: The tokens.
            kwargs: Options of the tokenizer, such as ``skip_special_tokens``.
        """
        ...
