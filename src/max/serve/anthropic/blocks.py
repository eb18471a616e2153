"""The messages of Anthropic's API, and the blocks that they consist of."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from max.serve.openai.fields import FIRST_ERROR


@with_config(ConfigDict(extra="allow", strict=True))
class Block(TypedDict):
    """A block of content; its further fields depend on the type."""

    type: str
    text: NotRequired[str | None]
    id: NotRequired[str | None]
    name: NotRequired[str | None]
    input: NotRequired[dict[str, Any] | None]
    tool_use_id: NotRequired[str | None]
    content: NotRequired[Any]
    thinking: NotRequired[str | None]


Blocks = Annotated[list[Block], FIRST_ERROR]


@with_config(ConfigDict(extra="allow", strict=True))
class Message(TypedDict):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks
