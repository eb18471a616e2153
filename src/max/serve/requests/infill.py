"""Filling in the middle: prompts for models that were trained to write the text between two others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from max.serve.errors import CONTEXT_LENGTH_EXCEEDED, ApiError
from max.serve.limits import MAX_TEXT
from max.serve.requests.threads import in_body_thread


@dataclass(frozen=True)
class Marks:
    """The special tokens by which a family of models marks the parts of a prompt.

    Args:
        prefix: Precedes the text before the gap.
        suffix: Precedes the text after it.
        middle: Precedes the generated text; empty: the suffix comes first, and the prefix last.
    """

    prefix: str
    suffix: str
    middle: str


FAMILIES = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Marks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    Marks("<PRE>", "<SUF>", "<MID>"),
    Marks("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)
_ENDS = (
    "▁<EOT>", "<EOT>", "<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|file_sep|>",
    "<file_sep>", "<|file_separator|>", "<|repo_name|>", "<reponame>",
)  # fmt: skip
_LONG_TEXT = 4096
_FILES = (("<|repo_name|>", "<|file_sep|>"), ("<reponame>", "<file_sep>"))


@dataclass(frozen=True)
class ExtraFile:
    """Another text of a project.

    Args:
        name: Its name.
        text: The text.
    """

    name: str
    text: str


class Infill:
    """Makes prompts with a gap; use :meth:`of`.

    Args:
        tokens: The vocabulary.
        marks: The marks of the model.
        encode: Returns the tokens of a text; the flag adds begin and end tokens.
        named_tokens: Further tokens, by what they mark: ``pad``, ``repository``, ``separator``, ``end``.
    """

    def __init__(
        self,
        tokens: Mapping[str, int],
        marks: Marks,
        encode: Callable[[str, bool], list[int]],
        named_tokens: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._encode = encode
        self._prefix, self._suffix = tokens[marks.prefix], tokens[marks.suffix]
        self._middle = tokens[marks.middle] if marks.middle else None
        self._files = next(
            (
                (tokens[a], tokens[b])
                for a, b in (
                    (named_tokens.get("repository", ""), named_tokens.get("separator", "")),
                    *_FILES,
                )
                if a in tokens and b in tokens
            ),
            None,
        )
        names = {*_ENDS, *named_tokens.values(), marks.prefix, marks.suffix, marks.middle}
        self.end_tokens = frozenset(tokens[name] for name in names if name in tokens)
        """Tokens that end the generated text."""

    @classmethod
    def of(
        cls,
        tokens: Mapping[str, int],
        encode: Callable[[str, bool], list[int]],
        named_tokens: Mapping[str, str] = MappingProxyType({}),
    ) -> Infill | None:
        """The prompts of a model; None where its vocabulary has no marks.

        Args:
            tokens: The vocabulary.
            encode: As for the class.
            named_tokens: The marks that the model's file names: ``prefix``, ``suffix``, ``middle`` and those of the
                class. They come before those of the families.
        """
        # GGUF files name their tokens
        if {"prefix", "suffix", "middle"} <= named_tokens.keys() and set(
            named_tokens.values()
        ) <= tokens.keys():
            marks = Marks(named_tokens["prefix"], named_tokens["suffix"], named_tokens["middle"])
            return cls(tokens, marks, encode, named_tokens)
        for marks in FAMILIES:
            if all(name in tokens for name in (marks.prefix, marks.suffix, marks.middle) if name):
                return cls(tokens, marks, encode)
        return None

    def prompt(
        self,
        prefix: str | Sequence[int],
        suffix: str,
        prompt_text: str = "",
        files: Sequence[ExtraFile] = (),
    ) -> list[int]:
        """The tokens of a text with a gap.

        Args:
            prefix: The text before the gap, or its tokens.
            suffix: The text after it.
            prompt_text: The beginning of the generated text.
            files: Other texts of the project.
        """
        before = self._encode(prefix, False) if isinstance(prefix, str) else list(prefix)
        after, begun = self._within(suffix), self._within(prompt_text)
        begin = self._begin()
        context = self._context(files)
        if self._middle is None:
            # Codestral's order: suffix first, and the answer follows the prefix
            return [*begin, self._suffix, *after, self._prefix, *context, *before, *begun]
        return [
            *begin, *context, self._prefix, *before, self._suffix, *after, self._middle, *begun,
        ]  # fmt: skip

    def _begin(self) -> list[int]:
        """The tokens that precede every text of this model."""
        plain, special = self._encode("a", False), self._encode("a", True)
        return next(
            (special[:i] for i in range(len(special)) if special[i : i + len(plain)] == plain),
            [],
        )

    def _within(self, text: str) -> list[int]:
        """The tokens of a text within another: some tokenizers put a space before the first word of a text."""
        # after a line break no space is put
        first = self._encode("\n", False)
        tokens = self._encode("\n" + text, False)
        if tokens[: len(first)] == first:
            return tokens[len(first) :]
        return self._encode(text, False) if text else []

    def _context(self, files: Sequence[ExtraFile]) -> list[int]:
        if not files:
            return []
        if self._files is None:
            text = "".join(f"{each.text}\n" for each in files)
            return self._encode(text, False)
        project, file = self._files
        # names that say nothing: clients send none of the project
        tokens = [project, *self._encode("project\n", False)]
        for each in files:
            tokens += [file, *self._encode(f"{each.name}\n{each.text}", False)]
        return [*tokens, file, *self._encode("file\n", False)]


async def prompt_tokens(
    infill: Infill,
    prefix: str | Sequence[int],
    suffix: str,
    prompt_text: str = "",
    files: Sequence[ExtraFile] = (),
) -> list[int]:
    """As :meth:`Infill.prompt`, but encodes long texts in a thread, as that takes milliseconds.

    Args:
        infill: The prompts of the model.
        prefix: The text before the gap, or its tokens.
        suffix: The text after it.
        prompt_text: The beginning of the generated text.
        files: Other texts of the project.
    """
    texts = [prefix, suffix, prompt_text, *(each.text for each in files)]
    size = sum(map(len, texts))
    if size > MAX_TEXT:
        raise ApiError(
            f"the texts around the gap have {size} characters; at most {MAX_TEXT} are read",
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    if size > _LONG_TEXT:
        return await in_body_thread(infill.prompt, prefix, suffix, prompt_text, files)
    return infill.prompt(prefix, suffix, prompt_text, files)


def infill_of(infill: Infill | None, name: str, param: str) -> Infill:
    """The prompts of a model, for a request that has a gap.

    Args:
        infill: The model's; None where it has none.
        name: The name of the model.
        param: The parameter of the request, for the error.

    Raises:
        ApiError: The model cannot fill in the middle.
    """
    if infill is None:
        names = ", ".join(marks.prefix for marks in FAMILIES)
        raise ApiError(
            f"{param}: {name} does not fill in the middle: its tokenizer has none of the tokens {names}",
            param=param,
            code="unsupported_parameter",
        )
    return infill
