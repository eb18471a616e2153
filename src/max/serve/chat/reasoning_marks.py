"""Finds the marks around reasoning in what a chat template writes for an answer with reasoning."""

from __future__ import annotations

import re
from typing import Any

from max.serve.chat.tools.layouts import probe
from max.serve.chat.tools.layouts.layout import words
from max.serve.chat.tools.layouts.probe import Render, render_probe

THINK = ("<think>", "</think>")
"""The marks that most models have."""
_THOUGHT = "Zthought"
_NAMED = re.compile("think|thought|reason|inner|analysis", re.IGNORECASE)
_MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_LETTERS = re.compile("[A-Za-z]+")
_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought")
_LONGEST = 40


def reasoning_marks(render: Render, template: str) -> tuple[str, str] | None:
    """The marks before and after reasoning; None where the template has none.

    Args:
        render: Formats a conversation.
        template: The template.
    """
    return derived_marks(render) or (THINK if THINK[0] in template else None)


def derived_marks(render: Render) -> tuple[str, str] | None:
    """The marks around reasoning that a template writes; None where it writes none that name it.

    Args:
        render: Formats a conversation.
    """
    question: dict[str, Any] = {"role": "user", "content": probe.QUESTION}
    said: dict[str, Any] = {"role": "assistant", "content": probe.ANSWER}
    parts = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": probe.ANSWER}]
    calls = probe.TemplateUse().message([(probe.FIRST, probe.ARGUMENTS)], probe.ANSWER)
    thought = dict.fromkeys(_FIELDS, _THOUGHT)
    # templates write reasoning beside a text, beside calls only, or as a part of the content
    for message in ({**said, **thought}, {**calls, **thought}, {**said, "content": parts}):
        text = render_probe(render, [question, message], probe.TOOLS if message is calls else None)
        found = _marks_in(text or "")
        if found is not None:
            return found
    return None


def _marks_in(text: str) -> tuple[str, str] | None:
    """The marks around the probe's reasoning in a text."""
    before, found, after = text.rpartition(probe.QUESTION)[2].partition(_THOUGHT)
    if not found:
        return None
    if probe.ANSWER in after:
        after = after.partition(probe.ANSWER)[0]
    # the last mark before: earlier ones begin the turn
    begins = [match.start() for match in _MARK.finditer(before)]
    ends = [word for word in words(after) if _MARK.fullmatch(word)]
    if not begins or not ends:
        return None
    # with what follows the mark, such as a line break or a word
    begin = before[begins[-1] :].strip()
    if len(begin) > _LONGEST or not _NAMED.search(begin) or begin == ends[0]:
        return None
    if not set(_LETTERS.findall(begin)) & set(_LETTERS.findall(ends[0])):
        return None  # the end of a message, after which a header may follow
    return begin, ends[0]
