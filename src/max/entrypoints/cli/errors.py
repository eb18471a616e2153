"""Errors on the command line: one line says what is wrong, one says what to do."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from max._config import FlagError, flags

_MENDED, _FAILED, _INTERRUPTED = 2, 1, 130


def report(command: click.Command, arguments: Sequence[str]) -> int:
    """Runs a command; an error becomes two lines on stderr.

    Args:
        command: The command.
        arguments: Its arguments.

    Returns:
        The exit code: 0; 2 for what the user can mend; 130 for an interrupt; 1 for the rest.
    """
    try:
        level = flags.MAX_LOG_LEVEL
        if level != "warning":
            logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
            logging.getLogger("max").setLevel(level.upper())
        for line in flags.misspelt():
            click.echo(f"max: warning: {line}", err=True)
        command.main(args=list(arguments), prog_name="max", standalone_mode=False)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("max: interrupted", err=True)
        return _INTERRUPTED
    except BrokenPipeError:
        # the reader has gone; nothing more can be written, not even by the interpreter's exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        problem, remedy, code = _lines(error)
        if _debug(arguments):
            traceback.print_exc()
        click.echo(f"max: error: {problem}", err=True)
        if remedy:
            click.echo(f"    {remedy}", err=True)
        return code


def _debug(arguments: Sequence[str]) -> bool:
    """Whether tracebacks are wanted; the option may be part of what cannot be parsed."""
    words = [word.lower() for word in arguments]
    asked = "--log-level=debug" in words or ("--log-level", "debug") in zip(
        words, words[1:], strict=False
    )
    try:
        return asked or flags.MAX_LOG_LEVEL == "debug"
    except FlagError:
        return asked


def _lines(error: Exception) -> tuple[str, str, int]:
    """What is wrong, what to do, and the exit code."""
    if isinstance(error, click.NoSuchOption):
        where = error.ctx.command_path if error.ctx is not None else "max"
        near = error.possibilities or _near_options(error)
        hint = f"Did you mean {near[0]}? " if near else ""
        return (
            f"no such option: {error.option_name}",
            f"{hint}`{where} --help` lists the options.",
            _MENDED,
        )
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx is not None else "max"
        return _one_line(error.format_message()), f"See `{where} --help`.", _MENDED
    if isinstance(error, click.ClickException):
        return _one_line(error.format_message()), "", _MENDED
    if isinstance(error, FlagError):
        return _one_line(str(error)), "Set the environment variable anew, or unset it.", _MENDED
    remedy: Any = getattr(error, "remedy", None)
    if remedy is not None:
        return _one_line(str(getattr(error, "problem", error))), str(remedy), _MENDED
    if isinstance(error, (ValueError, FileNotFoundError, PermissionError)):
        return (
            _one_line(str(error)),
            "Check what was given; `--log-level debug` shows more.",
            _MENDED,
        )
    if isinstance(error, MemoryError):
        return "out of memory", "Give a smaller --max-length or --max-batch-size.", _MENDED
    name = type(error).__name__
    text = _one_line(str(error))
    return f"{name}: {text}" if text else name, "`--log-level debug` shows where.", _FAILED


def _near_options(error: click.NoSuchOption) -> list[str]:
    import difflib

    if error.ctx is None:
        return []
    known = [opt for param in error.ctx.command.params for opt in param.opts]
    return difflib.get_close_matches(error.option_name, known, n=1)


def _one_line(text: str) -> str:
    return " ".join(text.split())
