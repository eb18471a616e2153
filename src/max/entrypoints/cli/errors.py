"""Errors on the command line: one line says what is wrong, one says what to do."""

from __future__ import annotations

import logging
import os
import select
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from max._config import FlagError, flags
from max._lazy import lazy_module
from max._spelling import similar_names
from max.entrypoints.cli.progress import is_live

if TYPE_CHECKING:
    from max.entrypoints.cli.options import absent_options
else:
    # needed for errors only
    absent_options = lazy_module("max.entrypoints.cli.options.absent_options")

_CORRECTABLE, _FAILED, _INTERRUPTED = 2, 1, 130
_NEAR = 0.7
"""The similarity of an option that is suggested: what is less similar is rather another option than a mistyped one."""
_TRACEBACK = "`--log-level debug` shows where."


class CommandError(Exception):
    """An error of the command line itself; `UserError` is for the layers below.

    Args:
        problem: One line: what is wrong.
        remedy: One line: what to do.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


class StoppedError(Exception):
    """A signal has ended a command before it did its work.

    Args:
        text: What was ended, and by which signal.
        exit_code: The exit code: 128 and the number of the signal.
    """

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class _ToStderr(logging.Handler):
    """Writes warnings in the format of errors, and other records with the logger's name."""

    def emit(self, record: logging.LogRecord) -> None:
        text, level = self.format(record), record.levelname
        if record.levelno >= logging.WARNING:
            text = f"max: {level.lower()}: {text}"
        elif record.name != "max.dump":
            text = f"{level} {record.name}: {text}"
        # a line of progress may stand there
        click.echo(f"\r\x1b[K{text}" if is_live() else text, err=True)


def set_up_logging(level: str) -> None:
    """Makes the loggers of `max` write to stderr.

    Args:
        level: The lowest level that is shown.
    """
    logger = logging.getLogger("max")
    if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        logger.addHandler(_ToStderr())
    logger.setLevel(level.upper())


def report(command: click.Command, arguments: Sequence[str]) -> int:
    """Runs a command; an error becomes two lines on stderr.

    Args:
        command: The command.
        arguments: Its arguments.

    Returns:
        The exit code: 0; 2 for errors that the user can correct; 130 for an interrupt; 1 for other errors.
    """
    output, errors = sys.stdout, sys.stderr
    try:
        set_up_logging(flags.MAX_LOG_LEVEL)
        for line in flags.misspelt():
            click.echo(f"max: warning: {line}", err=True)
        if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise CommandError("stdout is closed", "Redirect it to a file, or to /dev/null.")
        # the exit code of a command that ends with one
        code = command.main(args=list(arguments), prog_name="max", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return _CORRECTABLE
    except click.exceptions.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("max: interrupted", err=True)
        return _INTERRUPTED
    except StoppedError as error:
        click.echo(f"max: {error}", err=True)
        return error.exit_code
    except (BrokenPipeError, SystemExit) as error:
        # click raises SystemExit for a closed pipe, and wraps stdout and stderr
        if isinstance(error, SystemExit) and sys.stdout is output:
            raise
        sys.stdout, sys.stderr = output, errors
        if _output_is_closed():
            _discard_output()
            return 0
        # a pipe to another process; click has dropped the error
        click.echo(
            "max: error: a process that this command talked to has ended (broken pipe)", err=True
        )
        return _FAILED
    except Exception as error:
        if _of_output(error):
            error = CommandError("the output cannot be written", str(error))
            _discard_output()
        problem, remedy, code = _lines(error, arguments)
        if _debug(arguments):
            traceback.print_exc()
        click.echo(f"max: error: {problem}", err=True)
        if remedy:
            click.echo(f"    {remedy}", err=True)
        return code


def _of_output(error: Exception) -> bool:
    """Whether an error comes from a write to stdout, here or in click."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    writers = (click.echo.__code__, report.__code__)
    return isinstance(error, OSError) and trace is not None and trace.tb_frame.f_code in writers


def _output_is_closed() -> bool:
    """Whether nobody reads stdout any more; True where the system does not tell."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _discard_output() -> None:
    """Redirects stdout to the null device, so that the interpreter's exit discards its buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _debug(arguments: Sequence[str]) -> bool:
    """Whether to print tracebacks; arguments that cannot be parsed may hold the option."""
    words = [word.lower() for word in arguments]
    asked = "--log-level=debug" in words or ("--log-level", "debug") in zip(
        words, words[1:], strict=False
    )
    try:
        return asked or flags.MAX_LOG_LEVEL == "debug"
    except FlagError:
        return asked


def _command_of(error: click.UsageError, arguments: Sequence[str]) -> str:
    """The command that refuses its arguments; the parser of options does not say which."""
    if error.ctx is not None:
        return error.ctx.command_path
    return f"max {arguments[0]}" if arguments and not arguments[0].startswith("-") else "max"


def _lines(error: Exception, arguments: Sequence[str]) -> tuple[str, str, int]:
    """The problem, the remedy, and the exit code."""
    if isinstance(error, click.NoSuchOption):
        where = _command_of(error, arguments)
        name = _whole_option(error.option_name, arguments)
        why = None if _same_option(error, name) else absent_options.why_absent(name)
        if why is not None:
            return (
                f"{name} is not in this release: {why}",
                f"Leave it out; `{where} --help` lists the options.",
                _CORRECTABLE,
            )
        near = _near_options(error, name)
        hint = f"Did you mean {near[0]}? " if near else ""
        return (
            f"no such option: {name}",
            f"{hint}`{where} --help` lists the options.",
            _CORRECTABLE,
        )
    if isinstance(error, click.UsageError):
        where = _command_of(error, arguments)
        text, remedy = _one_line(error.format_message()), f"See `{where} --help`."
        if isinstance(error, click.MissingParameter) and "MODEL" in text:
            remedy = f"`max ls` lists the models of this machine; see `{where} --help`."
        if text.startswith("Got unexpected extra argument"):
            remedy = f"Put a text with spaces in quotes; `{where} --help` lists the options."
        return text, remedy, _CORRECTABLE
    if isinstance(error, click.ClickException):
        return _one_line(error.format_message()), "", _CORRECTABLE
    if isinstance(error, FlagError):
        return (
            _one_line(str(error)),
            "Set the environment variable anew, or unset it.",
            _CORRECTABLE,
        )
    remedy: Any = getattr(error, "remedy", None)
    if remedy is not None:
        return _one_line(str(getattr(error, "problem", error))), str(remedy), _CORRECTABLE
    if notes := getattr(error, "__notes__", None):
        # an error inside the user's code; the note names the class
        return f"{type(error).__name__}: {_one_line(str(error))} ({notes[0]})", _TRACEBACK, _FAILED
    if isinstance(error, (ValueError, FileNotFoundError, PermissionError)):
        return (
            _one_line(str(error)),
            "Check what was given; `--log-level debug` shows more.",
            _CORRECTABLE,
        )
    if isinstance(error, MemoryError):
        return "out of memory", "Give a smaller --max-length or --max-batch-size.", _CORRECTABLE
    name = type(error).__name__
    text = _one_line(str(error))
    return f"{name}: {text}" if text else name, _TRACEBACK, _FAILED


def _whole_option(name: str, arguments: Sequence[str]) -> str:
    """An option as it was written: of ``-ngl`` the parser tells the first letter that is none."""
    if name.startswith("--"):
        return name
    letter = name.lstrip("-")
    words = (word.partition("=")[0] for word in arguments)
    long = (word for word in words if len(word) > 2 and word[0] == "-" != word[1])
    return next((word for word in long if letter in word), name)


def _near_options(error: click.NoSuchOption, name: str) -> list[str]:
    """The option of the same meaning, else those with similar names, the nearest first."""
    if error.ctx is None:
        return list(error.possibilities or ())
    same = _same_option(error, name)
    if same is not None:
        return [same]
    options = [param for param in error.ctx.command.params if isinstance(param, click.Option)]
    by_name = {
        name.lstrip("-"): name for option in options for name in option.opts if not option.hidden
    }
    return [by_name[each] for each in similar_names(name.lstrip("-"), by_name, cutoff=_NEAR)]


def _same_option(error: click.NoSuchOption, name: str) -> str | None:
    """The option of the command that does the same by another name."""
    same = absent_options.NAMES_ELSEWHERE.get(name, "").split()
    params = error.ctx.command.params if error.ctx is not None else []
    options = {option for param in params for option in param.opts}
    return next((each for each in same if each in options), None)


def _one_line(text: str) -> str:
    return " ".join(text.split())
