"""The tokens at the ends of texts, as tokenizer_config.json states them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["add_ends", "token_number", "token_text"]


def token_text(config: Mapping[str, object], key: str) -> str:
    """The text of a special token; empty without one.

    Args:
        config: The keys of tokenizer_config.json.
        key: The key.
    """
    value = config.get(key)
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else ""


def token_number(tokenizer: Tokenizer, text: str) -> int:
    """The number of a token.

    Args:
        tokenizer: The tokenizer.
        text: The token.

    Raises:
        ValueError: It has no such token.
    """
    number = tokenizer.token_to_id(text)
    if number is None:
        raise ValueError(f"the vocabulary lacks the token {text!r}")
    return number


def add_ends(tokenizer: Tokenizer, config: Mapping[str, object], begins: bool = False) -> None:
    """Adds the begin and end tokens that the config asks for.

    Args:
        tokenizer: The tokenizer.
        config: The keys of tokenizer_config.json.
        begins: Whether a begin token is added if the config does not say.
    """
    from tokenizers import processors

    first = token_text(config, "bos_token") if config.get("add_bos_token", begins) else ""
    last = token_text(config, "eos_token") if config.get("add_eos_token", False) else ""
    if not first and not last:
        return
    single = [*([f"{first}:0"] if first else []), "$A:0", *([f"{last}:0"] if last else [])]
    pair = [part.replace(":0", ":1").replace("$A", "$B") for part in single]
    ends = [(text, token_number(tokenizer, text)) for text in dict.fromkeys((first, last)) if text]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, *pair], special_tokens=ends
    )
