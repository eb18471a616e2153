"""Chat templates: jinja2 in a sandbox, with the environment that templates on the Hugging Face hub expect.

Templates are written for the transformers package: blocks are trimmed, loops have ``break`` and
``continue``, ``tojson`` keeps non-ASCII text and escapes nothing, and ``raise_exception(message)``,
``strftime_now(format)`` and ``{% generation %}`` are defined.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from max.pipelines.core.exceptions import InputError


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}`` marks the assistant's text; it renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parses the block into its body.

        Args:
            parser: The parser, at the block's name.
        """
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """``namespace(...)`` that rejects names with a leading underscore."""

    def __init__(*args: object, **kwargs: object) -> None:
        self, positional = args[0], args[1:]
        values = dict(*positional, **kwargs)
        for name in values:
            _public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _public(name)
        super().__setitem__(name, value)


def _public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template's namespace takes no name such as {name!r}")


class _Dict:
    """``dict(...)`` without the other attributes of the type."""

    def __call__(self, *args: object, **kwargs: object) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As ``dict.fromkeys``.

        Args:
            args: The keys, and a value.
        """
        return dict.fromkeys(*args)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` of transformers, which does not escape HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """The sandboxed environment of templates, with the filters and functions of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise, strftime_now=_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


@lru_cache(maxsize=16)
def compile_template(text: str) -> Template:
    """Compiles a template; the last ones are cached.

    Args:
        text: The template.

    Raises:
        InputError: It has a mistake; the message has the line.
    """
    try:
        return _environment().from_string(text)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = f" (line {line})" if line else ""
        raise InputError(
            f"the chat template has a mistake{where}: {error}",
            "Mend it, or give another with --chat-template.",
        ) from error


def _plain(value: object) -> Any:
    """The value in plain types, so that a template has no methods to misuse."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"


def render_chat(
    template: str,
    messages: list[Any],
    *,
    tools: list[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Formats a conversation with a template.

    Args:
        template: The model's template.
        messages: The conversation.
        tools: The functions that the model may call.
        variables: More variables, for example ``bos_token``.
        add_generation_prompt: Whether the text ends where the assistant's turn begins.

    Raises:
        InputError: The template has a mistake, or rejects the conversation.
    """
    compiled = compile_template(template)
    context = {
        "tools": None if tools is None else _plain(tools),
        "documents": None,
        **_plain(dict(variables or {})),
        "messages": _plain(messages),
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return compiled.render(**context)
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise InputError(
            f"the chat template refuses the conversation: {error}",
            "Check the order of the roles and the messages' fields.",
        ) from error
