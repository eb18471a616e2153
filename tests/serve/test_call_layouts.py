"""Layouts of calls one by one: what chat templates write around calls, parsers of small layouts, their grammars."""

from __future__ import annotations

import json

import pytest

from max.serve.chat.tools.definitions import Tool
from max.serve.chat.tools.layouts import probe
from max.serve.chat.tools.layouts.derive import call_text
from max.serve.chat.tools.layouts.grammar import LayoutRules
from max.serve.chat.tools.layouts.layout import (
    IDENTIFIER,
    KEY,
    NAME,
    CallLayout,
    Style,
    run_end,
    special_in,
)
from max.serve.chat.tools.layouts.parser import LayoutParser
from max.serve.chat.tools.layouts.probe import TemplateUse
from max.serve.requests.parts import ArgumentsPart, ContentPart, ToolCallPart
from tests.serve.test_template_formats import renderer

CALL = '<call>{"name": "probe_first", "arguments": ' + json.dumps(probe.ARGUMENTS) + "}</call>"
USER = "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}</u>{% else %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</call>{% endfor %}"
)
END = "{% endif %}{% endfor %}{% if add_generation_prompt %}"


@pytest.mark.parametrize(
    ("template", "body", "tail"),
    [
        # what ends each answer is no part of the call
        (USER + "<a>{{ m.content }}" + CALLS + "</a>\n" + END + "<a>{% endif %}", CALL, "</a>\n"),
        # also where an answer with calls ends in less white space
        (USER + "<a>{{ m.content }}" + CALLS + "</a>{{ '\n' if not m.tool_calls }}" + END + "<a>{% endif %}",
         CALL, "</a>\n"),
        # an answer without calls is refused: the answer begins where the prompt ends
        (USER + "<a>{% if not m.tool_calls %}{{ raise_exception('no') }}{% endif %}" + CALLS + "</a>" + END
         + "<a>{% endif %}", CALL + "</a>", ""),
        # the prompt of an answer does not begin an earlier one
        (USER + "{% if not m.tool_calls %}{{ raise_exception('no') }}{% endif %}" + CALLS + "</a>" + END
         + "<think>{% endif %}", "</u>" + CALL + "</a>", ""),
        # the prompt has more than what stands before an answer without calls
        (USER + "{{ '<a><t>' if m.tool_calls else '<a>' }}{{ m.content }}" + CALLS + "</a>" + END
         + "<a><t>{% endif %}", CALL, "</a>"),
        # the prompt ends before what begins an answer
        (USER + "<a>{{ m.content }}" + CALLS + "</a>" + END + "{% endif %}", CALL, "</a>"),
        # an answer without calls begins otherwise
        (USER + "{{ '<b>' if m.tool_calls else '<a>' }}{{ m.content }}" + CALLS + "</a>" + END + "{% endif %}",
         "<b>" + CALL, "</a>"),
        # the question is written again after it
        (USER + "{{ m.content }}[Zquestion]" + CALLS + "</a>" + END + "{% endif %}",
         "]" + CALL + "</a>", "[Zquestion]</a>"),
    ],
)  # fmt: skip
def test_where_an_answer_with_calls_begins_and_ends(template: str, body: str, tail: str) -> None:
    found = call_text(renderer(template), TemplateUse(), [(probe.FIRST, probe.ARGUMENTS)], "")
    assert found == (body, tail)


def test_a_template_that_refuses_calls_or_drops_the_question() -> None:
    for template in ("{{ raise_exception('no') }}", "{% for m in messages %}{% endfor %}"):
        calls = [(probe.FIRST, probe.ARGUMENTS)]
        assert call_text(renderer(template), TemplateUse(), calls, "") is None


PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["a"],
}
TOOLS = [Tool("run", "", PARAMETERS), Tool("now", "", {})]
JSON = CallLayout(
    f"<call>{NAME}<args>", tail="</call>", section="<calls>", section_end="</calls>", separator=","
)
TAGGED = CallLayout(
    f"<call {NAME}>", Style.TAGGED, tail="</call>", key="<p ", key_end=">", other_key_end=">", value_end="</p>",
)  # fmt: skip
LINES = CallLayout(
    f"<call {NAME}>", Style.TAGGED, tail="</call>", key="\n<p ", key_end=">\n", other_key_end=">\n", value_end="\n</p>",
)  # fmt: skip
BARE = CallLayout(f"<call>{NAME}{{", Style.BARE, tail="<end>", value_end="'")
COUNTED = CallLayout(f"<call>{NAME}<args>", tail=f"<id>{IDENTIFIER}</call>")
IDENTIFIED = CallLayout(f"<call>{NAME}<id>{IDENTIFIER}<args>", tail="</call>")
# with the type of the value after the name; with marks of several parts; with the key in the mark that ends a value
TYPED = CallLayout(
    f"<call {NAME}>", Style.TAGGED, tail="</call>", key='<p name="', key_end='" string="true">',
    other_key_end='" string="false">', value_end="</p>",
)  # fmt: skip
PARTED = CallLayout(
    f"<call {NAME}>", Style.TAGGED, tail="</call>\n<end>", key="<p>\n<k>", key_end="</k>\n=\n<v>",
    other_key_end="</k>\n=\n<v>", value_end="</v>",
)  # fmt: skip
SHORT = CallLayout(
    f"<call {NAME}>", Style.TAGGED, tail="</call>", key="<", key_end=">", other_key_end=">", value_end=f"</{KEY}>",
)  # fmt: skip
UNENDED = CallLayout(
    f"<call {NAME}>", Style.TAGGED, section="<calls>", section_end="</calls>", key="<", key_end=">", other_key_end=">",
    value_end=f"</{KEY}>",
)  # fmt: skip
EQUALS = CallLayout(
    f"<call {NAME}>", Style.TAGGED, tail="</call>", key="<p ", key_end="=", other_key_end="=", value_end="</p>",
)  # fmt: skip
BARELY = CallLayout(
    f"<call {NAME}>", Style.TAGGED, key="<p ", key_end=">", other_key_end=">", value_end="</p>"
)
ENDED = CallLayout(
    f"<call {NAME}>", Style.TAGGED, tail="</call>\n<end>", key="<", key_end=">", other_key_end=">",
    value_end=f"</{KEY}>",
)  # fmt: skip
LISTING = CallLayout(
    f"<call {NAME}>", Style.TAGGED, tail="</call>", key="<args>\n<", key_end=">", other_key_end=">",
    value_end=f"</{KEY}>",
)  # fmt: skip
PYTHON = CallLayout(f"<call>{NAME}(", Style.PYTHON, tail="<end>")
NUMBERED = CallLayout(f"<call>{NAME}<args>", tail=f"<id>{IDENTIFIER}")
SEPARATED = CallLayout(f"{NAME}<args>", section="<calls>", section_end="</calls>", separator=",")
BRIEF = CallLayout(f"<c>{NAME}<args>", tail="</c>", section="<calls>", section_end="</calls>")
PAIRED = CallLayout(
    f"<call>{NAME}", tail="</call>", section="<calls>", section_end="</calls>", separator=","
)
DOUBLE = CallLayout(f"<tool>\n[fn]{NAME}[args]", tail="</tool>")
NAMED = CallLayout(f"<call>{NAME}", tail="</call>")
LISTED = CallLayout(f"{NAME}<args>", tail=";", section="<calls>", section_end="</calls>")


def read(
    layout: CallLayout, answer: str, cut: bool = False, whole: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls of an answer, character by character."""
    parser = LayoutParser(layout, TOOLS)
    parts = [part for piece in ([answer] if whole else answer) for part in parser.push(piece)]
    content, calls = "", list[tuple[str, str]]()
    for part in [*parts, *parser.finish(cut)]:
        match part:
            case ContentPart(text):
                content += text
            case ToolCallPart(_, _, name):
                calls.append((name, ""))
            case ArgumentsPart(_, text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, calls


@pytest.mark.parametrize(
    ("layout", "answer", "content", "calls"),
    [
        (JSON, '<calls><call>run<args>{"a": 1}</call>,<call>now<args>{}</call></calls>!', "!",
         [("run", '{"a": 1}'), ("now", "{}")]),
        # white space around marks, and marks that are left out
        (JSON, 'a <calls> <call> run <args> {"a": 1} <call>now<args>{}</calls>b', "ab",
         [("run", '{"a": 1}'), ("now", "{}")]),
        (JSON, "<calls><call>now<args>\n none</call></calls>", "none</call></calls>", [("now", "{}")]),
        (JSON, '<call>run<args>{"a": 1}</call>b', "b", [("run", '{"a": 1}')]),
        (JSON, "<calls>nothing</calls>", "nothing</calls>", []),
        (JSON, "<call>?<args>{}", "<call>?<args>{}", []),
        (JSON, "<call><args>{}", "<call><args>{}", []),
        # the answer ends within a call
        (JSON, "a<call>ru", "a", []),
        (JSON, "a<call>run<ar", "a", []),
        (JSON, "a<call>run<args>", "a", [("run", "")]),
        (JSON, "<call>run", "", []),
        (TAGGED, "<call run><p a>x</p><p n>3</p></call>b", "b", [("run", '{"a": "x", "n": 3}')]),
        (TAGGED, "<call run><p a>x</p> y</p></call>", "", [("run", '{"a": "x</p> y"}')]),
        (TAGGED, "<call run></call>b", "b", [("run", "{}")]),
        (TAGGED, "<call now><p z>1</p></call>", "", [("now", '{"z": 1}')]),
        (TAGGED, "<call run><p a><![CDATA[x < y]]></p></call>", "", [("run", '{"a": "x < y"}')]),
        (TAGGED, "<call run><p a>x</p>", "", [("run", '{"a": "x"')]),
        (TAGGED, "<call other><p a>3</p></call>", "", [("other", '{"a": 3}')]),
        (LINES, "<call run>\n<p a>\n\nx\n\n</p>\n</call>", "", [("run", '{"a": "\\nx\\n"}')]),
        (TAGGED, "<call run><p a", "", [("run", "")]),
        (BARE, "<call>run{a:'x}',n:3}<end>b", "b", [("run", '{"a": "x}", "n": 3}')]),
        (BARE, "<call>run{a b}<end>c", "c", [("run", "{}")]),
        # an identifier after the arguments, which may be left out
        (COUNTED, '<call>run<args>{"a": 1}<id>x-1</call>b', "b", [("run", '{"a": 1}')]),
        (COUNTED, '<call>run<args>{"a": 1}</call>b', "b", [("run", '{"a": 1}')]),
        # or before them
        (IDENTIFIED, '<call>run<id>x-1<args>{"a": 1}</call>b', "b", [("run", '{"a": 1}')]),
        (IDENTIFIED, '<call>run<args>{"a": 1}</call>b', "b", [("run", '{"a": 1}')]),
        (IDENTIFIED, "<call>run<x>{}", "<call>run<x>{}", []),
        (IDENTIFIED, "<call><id>x<args>{}", "<call><id>x<args>{}", []),
        (LISTED, "<calls>now<args>{};<calls>now<args>{};</calls>b", "b", [("now", "{}"), ("now", "{}")]),
        # the first marks of a call may be left out, but not all of them
        (DOUBLE, '<tool>[fn]run[args]{"a": 1}</tool>[fn]now[args]{}</tool>b', "b",
         [("run", '{"a": 1}'), ("now", "{}")]),
        (DOUBLE, "<tool>[args]{}", "<tool>[args]{}", []),
        (DOUBLE, "<tool>now[args]{}", "<tool>now[args]{}", []),
        (JSON, "<calls>run<args>{}</calls>", "run<args>{}</calls>", []),
        (JSON, "<calls><calls><call>now<args>{}</call></calls>b", "b", [("now", "{}")]),
        (JSON, "a<call>", "a", []),
        (NAMED, '<call>run{"a": 1}</call>b', "b", [("run", '{"a": 1}')]),
        (NAMED, "<call>run", "", []),
        (TAGGED, "<call run><p a>x</p></call><call now><p z>1</p></call>b", "b",
         [("run", '{"a": "x"}'), ("now", '{"z": 1}')]),
        (TYPED, '<call run><p name="a" string="true">3</p><p name="n" string="false">3</p></call>b', "b",
         [("run", '{"a": "3", "n": 3}')]),
        (TYPED, '<call now><p name="x">y" string="true">é</p><p name="é" string="false">["é"]</p></call>', "",
         [("now", '{"x\\">y": "é", "é": ["é"]}')]),
        (TYPED, '<call run><p name="a" string="true</p></call>', "", [("run", "")]),
        (PARTED, "<call run><p><k>a</k> = <v>x</v> y</v> <p> <k>n</k>=<v>3</v></call><end>b", "b",
         [("run", '{"a": "x</v> y", "n": 3}')]),
        (PARTED, "<call run><p><k>n</k>=<v>3</v></call>b", "b", [("run", '{"n": 3}')]),
        (SHORT, "<call run><a>3</a><n>4</n></call>b", "b", [("run", '{"a": "3", "n": 4}')]),
        (SHORT, "<call now><a><b>1</b></a></call>b", "b", [("now", '{"a": {"b": 1}}')]),
        (SHORT, "<call run></call>b", "b", [("run", "{}")]),
        (UNENDED, "<calls><call run><a>3</a></calls>b", "b", [("run", '{"a": "3"}')]),
        (UNENDED, "<calls><call run></calls>b", "b", [("run", "{}")]),
        (EQUALS, "<call run><p a</p></call>", "", [("run", "")]),
        (EQUALS, "<call run><p a=<![CDATA[x</p></call>", "", [("run", '{"a": "<![CDATA[x"}')]),
        (EQUALS, "<call run><p a=x]]></p></call>", "", [("run", '{"a": "x]]>"}')]),
        (TAGGED, "<call run><p a>x</p> y", "", [("run", "")]),
        # where nothing ends calls, any text does
        (BARELY, "<call run><p a>x</p> b", "b", [("run", '{"a": "x"}')]),
        (BARELY, "<call run><p a>x</p> b <call now>c", "bc", [("run", '{"a": "x"}'), ("now", "{}")]),
        (BARELY, "<call run><p a>x</p><p n>3</p>", "", [("run", '{"a": "x", "n": 3')]),
        (ENDED, "<call run><a>3</a></call>b", "b", [("run", '{"a": "3"}')]),
        (LISTING, "<call now><args><a><b>1</b></a></call>b", "b", [("now", '{"a": {"b": 1}}')]),
        (PYTHON, "<call>run(a='x)', n=3)<end>b", "b", [("run", '{"a": "x)", "n": 3}')]),
        (PYTHON, "<call>run(a b)<end>b", "b", [("run", "{}")]),
        (BARE, "<call>run{a:'é'}<end>b", "b", [("run", '{"a": "é"}')]),
        # an identifier ends with what is no part of it, and stands after its mark only
        (NUMBERED, "<call>run<args>{}<id> x-1 b", "b", [("run", "{}")]),
        (NUMBERED, "<call>run<args>{} b", "b", [("run", "{}")]),
        # calls of a list follow each other, with a separator or without; it is text elsewhere
        (SEPARATED, "<calls>now<args>{}, run<args>{}</calls>b", "b", [("now", "{}"), ("run", "{}")]),
        (SEPARATED, "<calls>now<args>{} run<args>{}", "run<args>{}", [("now", "{}")]),
        (BRIEF, "<calls><c>now<args>{}</c> <c>run<args>{}</c></calls>b", "b", [("now", "{}"), ("run", "{}")]),
        (PAIRED, "<calls><call>now{}</call>,<call>run{}</call></calls>b", "b", [("now", "{}"), ("run", "{}")]),
        (PAIRED, "<calls><call>now{}</call></calls>,<call>run{}</call>b", ",b", [("now", "{}"), ("run", "{}")]),
        (PAIRED, "<calls><call>now{}</call>,b", ",b", [("now", "{}")]),
        (CallLayout(f"<call>{NAME}<args>", tail=";", separator=","), "<call>now<args>{};,<call>run<args>{};b", ",b",
         [("now", "{}"), ("run", "{}")]),
        (CallLayout(f"{NAME}=", tail=";"), 'run={"a": 1};b', "b", [("run", '{"a": 1}')]),
    ],
)  # fmt: skip
def test_small_layouts(
    layout: CallLayout, answer: str, content: str, calls: list[tuple[str, str]]
) -> None:
    if (
        layout.head.startswith(NAME) and not layout.section
    ):  # no mark begins a call: it is announced by a grammar only
        assert layout.head_marks == []
        return
    for whole in (False, True):
        found, made = read(layout, answer, whole=whole)
        assert (found.strip(), made) == (content, calls), whole


@pytest.mark.parametrize(
    ("answer", "cut", "content"),
    [
        # what may be the start of a mark is dropped where the answer was cut off
        ("a<cal", True, "a"), ("a<ca", True, "a"), ("a<c", True, "a<c"), ("a<", True, "a<"), ("a", True, "a"),
        ("a<cal", False, "a<cal"), ("a<c", False, "a<c"),
    ],
)  # fmt: skip
def test_the_end_of_a_text(answer: str, cut: bool, content: str) -> None:
    assert read(JSON, answer, cut) == (content, [])
    parser = LayoutParser(JSON, TOOLS)
    parser.push(answer)
    parser.finish(cut)
    assert not parser.finish(cut)


@pytest.mark.parametrize(
    ("layout", "answer"),
    [
        (JSON, '<calls><call>run<args>{"a": 1}</call></calls>'),
        (JSON, '<call>run<args>{"a": 1}</call>'),
        (TAGGED, "<call run><p a>1</p></call>"),
        (BARE, "<call>run{a:'1'}<end>"),
        (COUNTED, '<call>run<args>{"a": 1}<id>x-1</call>'),
        (IDENTIFIED, '<call>run<id>x-1<args>{"a": 1}</call>'),
    ],
)
def test_parts_arrive_with_their_text(layout: CallLayout, answer: str) -> None:
    """What is known to be a call or a text is not held back until the end of the answer."""
    parser = LayoutParser(layout, TOOLS)
    begin = answer.index("run") + 4
    first = [*parser.push("ab "), *parser.push(answer[:begin])]
    content = "".join(part.text for part in first if isinstance(part, ContentPart))
    assert content.strip() == "ab"
    rest = [*first, *parser.push(answer[begin:] + " so ")]
    assert [part.name for part in rest if isinstance(part, ToolCallPart)] == ["run"]
    arguments = "".join(part.text for part in rest if isinstance(part, ArgumentsPart))
    assert [str(value) for value in json.loads(arguments).values()] == ["1"]
    text = "".join(
        part.text for part in [*rest, *parser.push("c")] if isinstance(part, ContentPart)
    )
    assert text.split() == ["ab", "so", "c"]
    assert not parser.finish()


def test_names_have_256_characters_at_most() -> None:
    for size in (256, 257):
        content, calls = read(JSON, f"<call>{'n' * size}<args>{{}}</call>")
        assert bool(calls) is (size == 256)
        assert bool(content) is (size == 257)


def test_marks_of_layouts() -> None:
    assert JSON.triggers == ("<calls>", "<call>")
    # marks of up to three characters and words are likelier text
    assert CallLayout(f"<ab>\n<c>\n[cd]\nyes\n{NAME}").triggers == ("<ab>", "[cd]")
    assert CallLayout("<a>" + NAME).several
    assert [run_end(text) for text in ("", "ab-1.c d", " a", "<a")] == [0, 6, 0, 0]
    assert special_in("a<b>c", ["<b>", "<c>"]) == ["<b>"]


def test_grammars_write_special_tokens_as_such() -> None:
    special = {"<call>": 7, "<call>run": 8, "</p>": 9}
    grammar = LayoutRules(TAGGED, special, {})
    assert grammar.literal("a<call>b</p>") == '"a" <[7]> "b" <[9]>'
    assert grammar.literal("<call>run x") == '<[8]> " x"'  # the longest
    assert grammar.literal("") == ""
    assert LayoutRules(JSON, special, {}).trigger == "<calls>"
    assert LayoutRules(CallLayout(f"<call>{NAME}"), {"<call>": 7}, {}).trigger == "<call>"


@pytest.mark.parametrize("more", [None, False, True, {}, {"type": "integer"}])
def test_arguments_that_are_not_listed(more: object) -> None:
    parameters = {"type": "object", "properties": {}, "additionalProperties": more}
    for layout, fits in ((TAGGED, True), (CallLayout(
        f"<call {NAME}>", Style.TAGGED, tail="</call>", key="<", key_end=">", other_key_end=">", value_end=f"</{KEY}>",
    ), False)):  # fmt: skip
        grammar = LayoutRules(layout, {}, {})
        grammar.call(0, Tool("run", "", parameters), layout.head)
        has_more = any("{1,64}" in rule for rule in grammar.rule_list.rules)
        assert has_more is (fits and more not in (None, False)), (more, layout)
    grammar = LayoutRules(TAGGED, {}, {})
    assert grammar.call(1, Tool("now", "", {}), TAGGED.head) == "call_1"
