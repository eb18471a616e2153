"""The door to packages that are written in Rust: tokenizers, safetensors, llguidance.

Code in Rust that meets a state which it takes for impossible panics. PyO3 raises a `PanicException` then, which is no
`Exception`: it passes all handlers, ends threads and servers, and Rust writes it to the standard error output.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from types import TracebackType

from max.pipelines.core.exceptions import ModelFilesError, UserError

__all__ = ["is_panic", "native_calls", "quiet_panics", "tokenizer_calls"]

_MOST_CHARACTERS = 300
_redirecting = threading.Lock()


def is_panic(error: BaseException | None) -> bool:
    """Whether an error is a panic of code in Rust; each package has a class of its own, which it does not export."""
    return type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"


class native_calls(ContextDecorator):
    """Makes panics, and errors of no class, within a block or function errors of a user's input.

    Args:
        problem: What is wrong then; the message of the panic follows it.
        remedy: What to do.
        cls: The class of the error.
    """

    def __init__(
        self,
        problem: str | Callable[[], str],
        remedy: str = "",
        cls: type[UserError] = ModelFilesError,
    ) -> None:
        self._problem, self._remedy, self._cls = problem, remedy, cls

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.check(error)

    def check(self, error: BaseException) -> None:
        """Raises the user's error instead of a panic, or of an error of no class; does nothing for others.

        Args:
            error: The error of a native call.
        """
        # these packages raise Exception itself for states that they expect
        if not (is_panic(error) or type(error) is Exception):
            return
        text = " ".join(str(error).split())
        if len(text) > _MOST_CHARACTERS:
            text = f"{text[:_MOST_CHARACTERS]} …"
        problem = self._problem if isinstance(self._problem, str) else self._problem()
        raise self._cls(f"{problem}: {text}", self._remedy) from error


tokenizer_calls = native_calls(
    "the tokenizer cannot handle its own tokens", "Copy or download the model's files again."
)
"""For calls of a model's tokenizer."""


@contextmanager
def quiet_panics() -> Iterator[None]:
    """Drops what Rust writes of a panic to the standard error output within a block, which begins no threads.

    Other output of that time appears when the block ends.
    """
    # one at a time: the descriptor belongs to the process
    with _redirecting, tempfile.TemporaryFile() as aside:
        try:
            sys.stderr.flush()
            before = os.dup(2)
        except (OSError, ValueError, AttributeError):  # there is none
            yield
            return
        panicked = False
        os.dup2(aside.fileno(), 2)
        try:
            yield
        except BaseException as error:
            panicked = is_panic(error) or is_panic(error.__cause__)
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)
            # what others wrote meanwhile is lost only with a panic
            aside.seek(0)
            if not panicked and (text := aside.read()):
                os.write(2, text)
