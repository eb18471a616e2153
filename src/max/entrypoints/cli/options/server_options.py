"""The options of commands that ask a server: its address and its key."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

__all__ = ["base_url", "key_option"]


def key_option(help: str = "Its key.") -> Any:
    """The option ``--api-key``.

    Args:
        help: What the key is.
    """
    return click.option("--api-key", envvar="MAX_SERVE_API_KEY", callback=_first_key, help=help)


def _first_key(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The first of the keys that the variable has: a server reads several from it, with spaces between."""
    assert param.name is not None
    if value is None or ctx.get_parameter_source(param.name) is not ParameterSource.ENVIRONMENT:
        return value
    return next(iter(value.split()), None)


def base_url(url: str) -> str:
    """The address of a server without ``/v1`` at its end, which users give with and without it.

    Args:
        url: What the user gave.
    """
    return url.rstrip("/").removesuffix("/v1")
