"""The tokens of the text that a client expects as the answer."""

from __future__ import annotations

from max.pipelines.core.text import utf8_size
from max.serve.errors import of_user_error
from max.serve.models.model import ServedModel
from max.serve.requests.threads import by_size

_CONTEXT = 32
"""The last characters of a prompt that the prediction is encoded after."""


async def predicted_tokens(
    model: ServedModel, prompt: str, prediction: str, most: int
) -> tuple[int, ...]:
    """The tokens of a prediction as an answer after a prompt has them.

    Args:
        model: The model.
        prompt: The text of the prompt.
        prediction: The text that the answer may have.
        most: The maximum number of tokens; those after them are left out.

    Raises:
        ApiError: The text is too long to be encoded, or is not UTF-8.
    """
    model.check_text(utf8_size(prediction), "prediction")
    # a tokenizer may write the first word of a text otherwise than one within a text
    before = prompt[-_CONTEXT:]
    try:
        begin = model.all_tokens(before, special=False)
        tokens = await by_size(model.all_tokens, before + prediction, special=False)
        if tokens[: len(begin)] == begin:
            tokens = tokens[len(begin) :]
        else:  # a token has characters of both
            tokens = await by_size(model.all_tokens, prediction, special=False)
    except ValueError as error:
        raise of_user_error(error, "prediction") from error
    # a tokenizer may have more tokens than the model, which answers without them
    return tuple([token for token in tokens if token < model.vocabulary_size][:most])
