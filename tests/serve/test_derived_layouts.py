"""Layouts derived from small chat templates one by one, and templates whose calls are not clear."""

from __future__ import annotations

import json

import pytest

from max.serve.chat.tools.layouts import probe
from max.serve.chat.tools.layouts.derive import _find_unit, _without_tail, derive, distinct
from max.serve.chat.tools.layouts.layout import KEY, NAME, CallLayout, Style
from max.serve.chat.tools.layouts.probe import TemplateUse
from tests.serve.test_template_formats import renderer

TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
END = "</m>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
VALUE = "{{ v if v is string else v | tojson }}"


def layout_of(call: str) -> CallLayout | None:
    """The layout of a template that writes each call `c` so."""
    template = TURN + "{% for t in m.tool_calls or [] %}{% set c = t.function %}" + call
    found = derive(renderer(template + "{% endfor %}" + END), TemplateUse())
    return found and found.layout


def tags(before: str, value: str, after: str, without: str = "") -> str:
    """A call whose arguments are between tags, and one without arguments."""
    return (
        "{% if c.arguments %}<tool={{ c.name }}" + before
        + "{% for k, v in c.arguments.items() %}" + value + "{% endfor %}" + after
        + "{% else %}" + (without or "{{ raise_exception('none') }}") + "{% endif %}"
    )  # fmt: skip


def test_the_arguments_are_an_object_after_that_of_the_name() -> None:
    layout = layout_of("<call>{{ {'name': c.name} | tojson }} {{ c.arguments | tojson }}</call>")
    assert layout is not None and layout.style is Style.JSON
    assert (layout.head, layout.tail) == (f'<call>{{"name": "{NAME}"}} ', "</call>")


def test_the_first_key_without_its_mark_belongs_to_the_head() -> None:
    """A call without arguments is refused, and what stands before the first key is not before the others."""
    layout = layout_of(tags("(", f"<p={{{{ k }}}}>{VALUE}</p>", ")"))
    assert layout is not None and layout.style is Style.TAGGED
    assert (layout.head, layout.key, layout.key_end) == (f"<tool={NAME}(", "<p=", ">")
    assert (layout.value_end, layout.tail) == ("</p>", ")")


def test_a_call_without_arguments_tells_the_head_if_it_has_the_name() -> None:
    value = f"<p={{{{ k }}}}>{VALUE}</p>|"
    named = layout_of(tags(">|", value[:-1], "", "<tool={{ c.name }}>|"))
    assert named is not None
    assert (named.head, named.key) == (f"<tool={NAME}>|", "<p=")
    other = layout_of(tags(">|", value, "", "0123456789>|"))
    assert other is not None
    assert (other.head, other.key) == (f"<tool={NAME}", ">|<p=")


def test_values_end_in_the_name_of_their_key() -> None:
    layout = layout_of(tags(">", f"<{{{{ k }}}}>{VALUE}</{{{{ k }}}}>", "</tool>"))
    assert layout is not None and KEY in layout.value_end


@pytest.mark.parametrize(
    "call",
    [
        # texts and numbers end in other ways
        tags("(", f"<p={{{{ k }}}}>{VALUE}{{{{ '</s>' if v is string else '</n>' }}}}", ")"),
        # values that do not end
        tags("(", f"<p={{{{ k }}}}>{VALUE}", ")"),
        # keys that do not begin
        tags(" ", f"{{{{ k }}}}={VALUE};", ")"),
        # what ends a key of a text is not the same twice
        tags("(", f"<p={{{{ k }}}}{{{{ '>' if loop.first else ':' }}}}{VALUE}</p>", ")"),
        # bare keys, and texts without marks
        "call:{{ c.name }}{{ '{' }}{% for k, v in c.arguments.items() %}{{ k }}:{{ v }},{% endfor %}{{ '}' }}",
        # the arguments stand before the name
        "<call>{{ c.arguments | tojson }}{{ c.name }}</call>",
        "<call>{{ c.name }}</call>",
    ],
)
def test_calls_that_are_not_clear(call: str) -> None:
    assert layout_of(call) is None


def test_a_name_that_is_written_otherwise_is_no_call() -> None:
    text = json.dumps({"name": probe.FIRST, "arguments": probe.ARGUMENTS})
    unit = _find_unit(f"a {text} b", probe.FIRST, 0)
    assert unit is not None and (unit.begin, unit.end) == (2, 2 + len(text))
    assert text[unit.name[0] - 2 : unit.name[1] - 2] == probe.FIRST
    assert json.loads(text[unit.arguments[0] - 2 : unit.arguments[1] - 2]) == probe.ARGUMENTS
    assert _find_unit(text.replace("_", r"\u005f"), probe.FIRST, 0) is None


@pytest.mark.parametrize(
    ("after", "tail", "ends", "left"),
    [
        ("x</m>\n", "</m>", (), "x"),
        ("x \n", "</m>", (), "x \n"),
        ("x \n", " \n", (), "x \n"),
        ("x<e>y</m>", "</m>", ("", "<e>"), "x"),
        ("a" * 160, "", (), "a" * 160),
        ("\n" + "a" * 99 + "\n" + "b" * 99, "", (), "a" * 99),
    ],
)
def test_what_ends_every_answer(after: str, tail: str, ends: tuple[str, ...], left: str) -> None:
    assert _without_tail(after, tail, ends) == left


@pytest.mark.parametrize(
    ("trigger", "is_told"),
    [
        ("<c>", False),
        ("<ca>", True),
        ("call", False),
        ("Call: (", False),
        ("[CALL", True),
        ("", False),
    ],
)
def test_texts_that_no_other_text_begins_with(trigger: str, is_told: bool) -> None:
    assert distinct(trigger) is is_told


def test_white_space_after_the_name_and_after_each_value() -> None:
    """A call without arguments tells which is which."""
    value = f"<p={{{{ k }}}}>{VALUE}</p>\n"
    layout = layout_of(tags(")\n", value, "</tool>", "<tool={{ c.name }})\n</tool>"))
    assert layout is not None
    assert (layout.head, layout.key) == (f"<tool={NAME})\n", "<p=")
    assert (layout.value_end, layout.value_separator, layout.tail) == ("</p>", "\n", "</tool>")


def test_what_stands_before_each_tag_belongs_to_it() -> None:
    value = f"<p={{{{ k }}}}>{VALUE}</p>|"
    layout = layout_of(tags(">|", value, "", "<tool={{ c.name }}>|"))
    assert layout is not None and layout.key.endswith("|<p=")
    assert layout.head + layout.key == f"<tool={NAME}>|<p="
    assert layout.value_end + layout.key == "</p>|<p="


def test_a_mark_that_is_all_that_ends_a_value_stays_with_it() -> None:
    """It stands before each tag, too; without it a parser would look for an empty text."""
    layout = layout_of(tags("#", f"<{{{{ k }}}}={VALUE}#", "</t>", "<tool={{ c.name }}#</t>"))
    assert layout is not None and layout.style is Style.TAGGED
    assert (layout.head, layout.key, layout.value_end) == (f"<tool={NAME}#", "<", "#")
    assert layout.tail == "</t>"


@pytest.mark.parametrize(("before", "between"), [("", ","), (" ", ", ")])
def test_bare_keys_and_texts_between_marks(before: str, between: str) -> None:
    layout = layout_of(
        f"call:{{{{ c.name }}}}{before}{{{{ '{{' }}}}{{% for k, v in c.arguments.items() %}}{{{{ k }}}}:"
        "{{ '<e>' ~ v ~ '<e>' if v is string else v }}"
        f"{{{{ '{between}' if not loop.last }}}}{{% endfor %}}{{{{ '}}' }}}}<end>"
    )
    assert layout is not None and layout.style is Style.BARE
    assert (layout.head, layout.tail) == (f"call:{NAME}{before}{{", "<end>")
    assert layout.value_end == "<e>"


def test_calls_as_in_python() -> None:
    layout = layout_of(
        "[{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}={{ v | tojson }}"
        "{{ ', ' if not loop.last }}{% endfor %})]<end>"
    )
    assert layout is not None and layout.style is Style.PYTHON
    assert (layout.head, layout.tail) == (f"[{NAME}(", "]<end>")
