"""Errors of requests, with bodies as in OpenAI's API."""

from __future__ import annotations

import reprlib
from typing import Any

from max.pipelines.core.exceptions import (
    GrammarsWaitError,
    GrammarTooSlowError,
    NotFiniteError,
    PromptTooLongError,
    UnknownAdapterError,
    UserError,
)
from max.pipelines.store.local import near_names
from max.pipelines.structured import compile_threads

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""The code of a prompt that the context cannot hold."""


class ApiError(Exception):
    """The error of a request.

    Args:
        message: What is wrong, and what would fit.
        status: The HTTP status.
        param: The parameter that does not fit.
        code: A short name of the error.
        kind: The type in OpenAI's body; by default that of the status.
        headers: More headers of the response.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.kind = kind or _KINDS.get(status, "invalid_request_error")
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """OpenAI's body: an object with the one key ``error``."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "server_error",
    504: "server_error",
}


def of_user_error(error: ValueError, param: str | None = None) -> ApiError:
    """Status 400 with the message of a user's error.

    Args:
        error: The error of a pipeline.
        param: The parameter that does not fit, if the error names none.
    """
    if isinstance(error, PromptTooLongError):
        # clients know the error by its code, or by these words of OpenAI's message
        message = (
            f"the prompt has {error.size} tokens, and this model's maximum context length is "
            f"{error.limit} tokens{error.note}. {error.remedy}"
        )
        return ApiError(message, param=param, code=CONTEXT_LENGTH_EXCEEDED)
    if isinstance(error, GrammarsWaitError):
        seconds = str(round(compile_threads.COMPILE_S))
        return ApiError(
            str(error).replace("\n", "; "),
            status=503,
            code="grammars_wait",
            headers={"Retry-After": seconds},
        )
    if isinstance(error, UnknownAdapterError):  # one that was unloaded meanwhile
        return ApiError(error.problem, status=404, param=param or "model", code="model_not_found")
    if isinstance(error, NotFiniteError):  # the model's fault, and not the request's
        return ApiError(f"{error.problem}. {error.remedy}", status=500, code="not_finite")
    if isinstance(error, UserError):
        code = "grammar_too_slow" if isinstance(error, GrammarTooSlowError) else None
        return ApiError(
            ". ".join(filter(None, (error.problem, error.remedy))),
            param=error.param or param,
            code=code,
        )
    return ApiError(str(error), param=param)


def short_text(value: object) -> str:
    """A value from a client as text for a message, shortened if it is long."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_SHORT = reprlib.Repr()
"""Reads no more of a value than a message shows, however large it is."""
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxdict = 40


def model_not_found(name: str, names: list[str]) -> ApiError:
    """Status 404 with similar names and the list of models.

    Args:
        name: The requested model.
        names: The models' names.
    """
    # the comparison of long names takes long
    near = near_names(name, names) if len(name) <= 200 else ""
    models = ", ".join(map(repr, names[:20])) + (", …" if len(names) > 20 else "")
    return ApiError(
        f"the model {short_text(name)} does not exist; this server has {models or 'none'}"
        + (f". {near}" if near else ""),
        status=404,
        param="model",
        code="model_not_found",
        kind="invalid_request_error",
    )
