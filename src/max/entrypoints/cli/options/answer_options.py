"""Options of `max serve` that say what answers are, and how options of the server are made."""

from __future__ import annotations

from typing import Any

import click

from max.entrypoints.cli.options.config_options import GroupedOption
from max.serve.process.settings import AnswerSettings

TOOL_PARSERS = [
    "hermes",
    "qwen",
    "llama3_json",
    "llama3",
    "llama",
    "mistral",
    "granite",
    "pythonic",
    "deepseek",
    "harmony",
    "generic",
    "none",
]
REASONING_PARSERS = {
    "none": "none",
    **dict.fromkeys(
        (
            "auto",
            "think",
            "qwen3",
            "deepseek_r1",
            "deepseek_v3",
            "glm45",
            "harmony",
            "openai_gptoss",
        )
    ),
}
"""Names of MAX and of vLLM for formats that are found by the chat template, and ``none``."""
PREFIX = "MAX_SERVE_"
"""Begins the names of variables of the environment."""


def serve_option(
    *names: str, env: str | list[str], group: str = "Server", **attributes: object
) -> Any:
    """An option of the server, with its variable of the environment, or several."""
    return click.option(
        *names,
        cls=GroupedOption,
        group=group,
        envvar=PREFIX + env if isinstance(env, str) else env,
        show_envvar=True,
        show_default=True,
        **attributes,
    )


ANSWER_OPTIONS = [
    serve_option(
        "--tool-parser",
        env="TOOL_PARSER",
        type=click.Choice(TOOL_PARSERS, case_sensitive=False),
        metavar="NAME",
        help="How the model writes calls of tools. Not set: as its chat template teaches; none: calls stay text; "
        + ", ".join(TOOL_PARSERS[:-1])
        + ".",
    ),
    serve_option(
        "--reasoning-parser",
        env="REASONING_PARSER",
        type=click.Choice(list(REASONING_PARSERS), case_sensitive=False),
        metavar="NAME",
        help="Where reasoning is marked: none leaves it in the answer, all others find it by the chat template.",
    ),
    serve_option(
        "--emit-reasoning-content/--no-emit-reasoning-content",
        env="EMIT_REASONING_CONTENT",
        default=None,
        help="Have reasoning in reasoning_content alone, or in reasoning alone. Not set: in both.",
    ),
    serve_option(
        "--temperature",
        env="TEMPERATURE",
        type=click.FloatRange(0, 100),
        help="The temperature of requests that give none. Not set: the model's.",
    ),
    serve_option(
        "--top-k",
        env="TOP_K",
        type=click.IntRange(-1, 2**31 - 1),
        help="The likeliest tokens to sample among, where a request does not say. Not set: the model's.",
    ),
    serve_option(
        "--thinking-temperature",
        env="THINKING_TEMPERATURE",
        type=click.FloatRange(0, 100),
        help="The temperature of tokens of reasoning, where a request does not say. Not set: that of the answer.",
    ),
]


def answer_settings(options: dict[str, Any]) -> AnswerSettings:
    """The settings of answers; their options are removed.

    Args:
        options: The values of all options.
    """
    return AnswerSettings(
        reasoning_parser=REASONING_PARSERS.get(options.pop("reasoning_parser") or ""),
        emit_reasoning_content=options.pop("emit_reasoning_content"),
        temperature=options.pop("temperature"),
        top_k=options.pop("top_k"),
        thinking_temperature=options.pop("thinking_temperature"),
    )
