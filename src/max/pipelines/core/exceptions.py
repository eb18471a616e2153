"""Errors that a user can correct."""

from __future__ import annotations


class UserError(ValueError):
    """A value from the user does not fit; states the problem and the remedy.

    Args:
        problem: One line: what is wrong, with the value.
        remedy: One line: what to do.
        param: The parameter of the request that does not fit; None: not known.
    """

    def __init__(self, problem: str, remedy: str = "", param: str | None = None) -> None:
        super().__init__(f"{problem}\n{remedy}" if remedy else problem)
        self.problem, self.remedy, self.param = problem, remedy, param


class InputError(UserError):
    """A request does not fit the model: too long, an image missing, a wrong shape."""


class PromptTooLongError(InputError):
    """A prompt has more tokens than the context holds.

    Args:
        tokens: The tokens of the prompt.
        limit: The most that fit.
        at_least: Whether the prompt may have more tokens than that.
        note: What else the context has to hold, for the message.
    """

    def __init__(self, tokens: int, limit: int, at_least: bool = False, note: str = "") -> None:
        self.size = f"at least {tokens}" if at_least else str(tokens)
        self.limit, self.note = limit, note
        super().__init__(
            f"the prompt has {self.size} tokens, and the context holds {limit}{note}",
            "Give a shorter prompt, or a greater --max-length where the model allows it.",
        )


class UnknownAdapterError(InputError):
    """A request names an adapter that is not loaded."""


class GrammarTooSlowError(InputError):
    """The grammar of a request takes too long."""


class GrammarsWaitError(UserError):
    """The grammar of a request waits too long for those of others; a later try may succeed."""


class ConfigError(UserError):
    """A configuration has an unknown field, or a value that does not fit."""


class ModelFilesError(UserError):
    """A model's files are missing, cut off, or do not belong together."""


class NotFiniteError(UserError):
    """A model computes NaN, or infinite values, where its result should be numbers.

    Args:
        problem: One line: what is not finite.
        remedy: One line: what to do.
        param: Unused: no parameter of a request is the reason.
    """

    def __init__(
        self,
        problem: str,
        remedy: str = "Copy or download the model's files again; or give --quantization-encoding float32, as values "
        "may overflow in a narrower dtype.",
        param: str | None = None,
    ) -> None:
        super().__init__(problem, remedy, param)


class WeightsError(ValueError):
    """A checkpoint's weights do not fit the model: a name is missing or unknown, or a shape differs.

    `load_model` makes it a `ModelFilesError` that names the model.
    """


def check_prompt(tokens: int, max_length: int) -> None:
    """Refuses a prompt without tokens, and one that leaves no room for a new token.

    Args:
        tokens: The number of its tokens.
        max_length: The most tokens of the sequence.

    Raises:
        InputError: It is refused.
    """
    if tokens == 0:
        raise InputError("the prompt has no tokens", "Give a prompt that is not empty.")
    if tokens >= max_length:
        raise PromptTooLongError(tokens, max_length, note=", at least one of them new")
