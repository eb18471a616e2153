"""Finds the marks between the messages of an answer in what a chat template writes for reasoning, text and calls."""

from __future__ import annotations

import re
from os.path import commonprefix
from typing import Any

from max.serve.chat.tools.channels import Channels
from max.serve.chat.tools.layouts import probe
from max.serve.chat.tools.layouts.layout import NAME
from max.serve.chat.tools.layouts.probe import Render, TemplateUse, render_probe

_THOUGHT = "Zthought"
_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought")
# a mark in brackets, with words; letters; or a single character
_TOKEN = re.compile(r"<[^<>\s]+>|\[/?[A-Z][A-Z_ ]+\]|\w+|\s+|.", re.DOTALL)
_MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z][A-Z_ ]+\]")
_LONGEST = 80
_MOST_TOKENS = 6


def channel_marks(render: Render, use: TemplateUse) -> Channels | None:
    """The marks between the messages of an answer; None where answers are no lists of messages.

    Args:
        render: Formats a conversation.
        use: The form in which the template takes calls.
    """
    question: dict[str, Any] = {"role": "user", "content": probe.QUESTION}
    said: dict[str, Any] = {"role": "assistant", "content": probe.ANSWER}
    thought = {**said, **dict.fromkeys(_FIELDS, _THOUGHT)}
    prompt = render_probe(render, [question], probe.TOOLS, True)
    if prompt is None:
        return None

    def after_prompt(message: dict[str, Any]) -> str:
        text = render_probe(render, [question, message], probe.TOOLS) or ""
        if text.startswith(prompt):
            return text[len(prompt) :]
        # some templates begin the reasoning in the prompt only
        return text[len(commonprefix((prompt, text))) :]

    # before: what begins the reasoning; between: its end, a header, what begins the answer
    before, found, rest = after_prompt(thought).partition(_THOUGHT)
    between, answered, after = rest.partition(probe.ANSWER)
    if not found or not answered or len(between) > _LONGEST or len(before) > _LONGEST:
        return None
    first = _MARK.search(between)
    if first is None:
        return None
    answer = after_prompt(said).partition(probe.ANSWER)[0]
    begin, end, header = before.strip(), between[first.start() : first.end()], ""
    if not begin:
        # the prompt ends in the mark
        begin, end = _alike(prompt, between) or ("", between.strip())
        answer, answer_end = between.strip().removeprefix(end).strip(), ""
        # the mark that ends the answer names the same words as the one that begins it
        pair = _alike(answer, after)
        answer_end = pair[1] if pair and answer else ""
        return Channels(_last_line(prompt) if not begin else begin, end, "", answer, answer_end)
    if not answer.strip() or not _MARK.search(answer) or not between.endswith(answer):
        return None
    header = between[first.end() : len(between) - len(answer)]
    call = after_prompt(use.message([(probe.FIRST, probe.ARGUMENTS)], ""))
    return Channels(before, end, header, answer, "", _call_header(answer, call))


def _alike(before: str, after: str) -> tuple[str, str] | None:
    """The end of a text and the start of another that differ in marks only, such as ``<|open|>think<|sep|>``."""
    left, right = _TOKEN.findall(before.rstrip()), _TOKEN.findall(after.lstrip())
    # the longest first: a shorter one would leave the start of the mark in the text
    for count in range(min(_MOST_TOKENS, len(left), len(right)), 1, -1):
        pairs = list(zip(left[-count:], right[:count], strict=True))
        words = [(one, other) for one, other in pairs if one.isalnum()]
        differ = [(one, other) for one, other in pairs if one != other]
        if (
            words
            and all(one == other for one, other in words)
            and differ
            and all(_MARK.fullmatch(one) and _MARK.fullmatch(other) for one, other in differ)
            # beginning with a mark: words alone may be text
            and _MARK.fullmatch(left[-count])
        ):
            return "".join(left[-count:]), "".join(right[:count])
    return None


def _call_header(answer: str, call: str) -> str:
    """What begins a message with calls, where it is that of a text with the tool in place of the user."""
    left, right = _TOKEN.findall(answer), _TOKEN.findall(call)
    differ = [at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]]
    if not differ or differ[0] >= len(left) or right[differ[0]] != probe.FIRST:
        return ""
    # a header that differs in more than the tool is not that of a text
    if any(at < len(left) for at in differ[1:]):
        return ""
    return "".join([*left[: differ[0]], NAME, *left[differ[0] + 1 :]])


def _last_line(text: str) -> str:
    lines = text.rstrip().splitlines()
    return lines[-1].strip() if lines else ""
