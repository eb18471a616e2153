"""Formats of calls that are derived from chat templates: what a template writes is read back, in any pieces."""

from __future__ import annotations

import json
import os
import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from max.pipelines.tokenization.chat_template import render_chat
from max.serve.chat.conversation_text import prompt_text
from max.serve.chat.reasoning import ReasoningParser
from max.serve.chat.reasoning_marks import reasoning_marks
from max.serve.chat.tools.definitions import ChoiceKind, Tool, ToolChoice
from max.serve.chat.tools.formats import FORMATS, format_of_template
from max.serve.chat.tools.grammars import answer_grammar
from max.serve.chat.tools.layouts.derive import call_text
from max.serve.chat.tools.layouts.layout import IDENTIFIER, NAME
from max.serve.chat.tools.layouts.probe import TemplateUse
from max.serve.chat.tools.layouts.recognition import TemplateTools, reads_back, tools_of_template
from max.serve.chat.tools.parser import parser_of
from max.serve.requests.generation import PlainParser
from max.serve.requests.parts import ArgumentsPart, ContentPart, ReasoningPart, ToolCallPart
from tests.serve.test_tool_formats import accepts, tokenizer_with
from tests.serve.tool_templates import TEMPLATES

WORDS = ["Oslo", "a b", 'say "x"', "it's", "{", "}", "[1]", "<b>", "</x>", "ünï ☃", "1", "true", "null", "line\nbreak",
         "\\n", "=", "a,b:c", "```", "<tool", " "]  # fmt: skip
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "exact": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "deep": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "array"}}},
    "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "kind": {"enum": ["x y", "z"]},
}
NAMES = ("get_weather", "alarm.set-2")


def schemas(names: tuple[str, ...]) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": PROPERTIES, "required": ["city"]}
    return [
        {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}
        for name in names
    ]  # fmt: skip


TOOLS = tuple(Tool(name, "", schemas(NAMES)[0]["function"]["parameters"]) for name in NAMES)


def renderer(template: str):
    def render(messages, tools, begins):
        variables = {"bos_token": "<s>", "eos_token": "</s>"}
        return render_chat(
            template, messages, tools=tools, variables=variables, add_generation_prompt=begins
        )

    return render


@cache
def found_of(template: str) -> TemplateTools:
    return tools_of_template(renderer(template), template)


def text(numbers: random.Random, plain: bool) -> str:
    words = [*WORDS[:3], "ünï ☃"] if plain else WORDS
    return "".join(numbers.choices(words, k=numbers.randint(1, 3))).strip() or "x"


def arguments(numbers: random.Random, plain: bool, flat: bool = False) -> dict[str, Any]:
    values: dict[str, Any] = {"city": text(numbers, plain)}
    makers = {
        "days": lambda: numbers.randint(-5, 10**6),
        "share": lambda: numbers.choice([0.25, -1.5, 3e-05, 17.0]),
        "exact": lambda: numbers.random() < 0.5,
        "tags": lambda: [text(numbers, plain) for _ in range(numbers.randint(1, 3))],
        "deep": lambda: {"a": text(numbers, plain), "n": [1, True, {"b": "c"}]},
        "either": lambda: text(numbers, plain),
        "kind": lambda: numbers.choice(["x y", "z"]),
    }
    for name, make in makers.items():
        if numbers.random() < 0.6 and not (flat and name in ("tags", "deep")):
            values[name] = make()
    return values


def parsed(tools: TemplateTools, pieces: list[str], cut: bool = False) -> tuple[str, list[list[str]]]:  # fmt: skip
    parser = parser_of(tools.format, TOOLS)
    parts = [part for piece in pieces for part in parser.push(piece)]
    content, calls = "", list[list[str]]()
    for part in [*parts, *parser.finish(cut)]:
        match part:
            case ContentPart(new):
                content += new
            case ToolCallPart(index, _, name):
                assert index == len(calls)
                calls.append([name, ""])
            case ArgumentsPart(index, new):
                assert index == len(calls) - 1
                calls[index][1] += new
    return content, calls


def pieces_of(numbers: random.Random, answer: str) -> list[str]:
    places = sorted(numbers.choices(range(len(answer) + 1), k=numbers.randint(0, 9)))
    return [answer[a:b] for a, b in zip([0, *places], [*places, len(answer)], strict=True)]


def check(template: str, numbers: random.Random, rounds: int, plain: bool = False) -> set[str]:
    """Random calls that a template writes are those that are read, in any pieces, and cut at any place.

    Returns the texts that are content after the calls.
    """
    tools = found_of(template)
    layout = tools.format.layout
    several = layout is not None and layout.several
    turn: set[str] = set()  # what a template writes after each answer with calls
    for round_number in range(rounds):
        count = 1 + (several and round_number % 2)
        calls = [(numbers.choice(NAMES), arguments(numbers, plain)) for _ in range(count)]
        rendered = call_text(renderer(template), tools.use, calls, "", schemas(NAMES))
        if rendered is None:
            continue
        body = rendered[0].replace(IDENTIFIER, "a1B2c3D4e")
        before = numbers.choice(["", "Let me see.\n", "1 < 2, [x] {y}\n"]) if tools.format.trigger else ""  # fmt: skip
        answer = before + body
        whole = parsed(tools, [answer])
        assert [(name, json.loads(found)) for name, found in whole[1]] == calls, answer
        assert whole[0].startswith(before.strip()), answer
        turn.add(whole[0][len(before.strip()) :].strip())
        assert len(turn) == 1, turn
        assert parsed(tools, list(answer)) == whole, answer
        for _ in range(3):
            pieces = pieces_of(numbers, answer)
            assert parsed(tools, pieces) == whole, pieces
        place = numbers.randint(len(before), len(answer) - len(min(turn)))
        content, found = parsed(tools, pieces_of(numbers, answer[:place]), cut=True)
        rest = content[len(before.rstrip()) :] if content.startswith(before.rstrip()) else content
        assert len(rest.strip().removeprefix(min(turn))) < 3, (answer[:place], content)
        for (name, written), (right, values) in zip(found, calls, strict=False):
            assert name == right
            try:
                assert json.loads(written) == values
            except ValueError:
                pass  # cut off
    return turn


@pytest.mark.parametrize("style", TEMPLATES)
def test_calls_are_read_as_the_template_writes_them(style: str) -> None:
    tools = found_of(TEMPLATES[style])
    assert tools.format.name == "template", tools
    assert tools.use.renders_calls and tools.use.describes_tools
    assert tools.use.text_arguments == (style == "json text")
    assert tools.use.short_ids == (style == "short ids")
    assert check(TEMPLATES[style], random.Random(style), 12, style.startswith("python ")) <= {""}


@pytest.mark.parametrize("style", TEMPLATES)
def test_grammars_take_what_the_template_writes(style: str) -> None:
    tools = found_of(TEMPLATES[style])
    numbers = random.Random(style)
    # the first mark is a special token in one run of two
    trigger = tools.format.layout.trigger if tools.format.layout else ""
    marks = (trigger,) if trigger and len(style) % 2 else ()
    special = tokenizer_with(marks)[1]
    free = answer_grammar(TOOLS, ToolChoice(), tools.format, special).text
    must = answer_grammar(TOOLS, ToolChoice(ChoiceKind.REQUIRED), tools.format, special).text
    assert must is not None and (free is not None) == bool(tools.format.trigger)
    layout = tools.format.layout
    several = layout is not None and layout.several
    for round_number in range(3):
        values = arguments(numbers, plain=True, flat=style in ("elements", "bare", "python values"))
        values.pop("exact", None) if style == "python values" else None
        values.pop("deep", None)
        calls = [(name, values) for name in NAMES[: 1 + (several and round_number % 2)]]
        rendered = call_text(renderer(TEMPLATES[style]), tools.use, calls, "", schemas(NAMES))
        assert rendered is not None
        body = rendered[0].replace(IDENTIFIER, "a1B2c3D4e").strip()
        assert accepts(must, body, marks), body
        if free is not None:
            assert accepts(free, "Well.\n" + body, marks), body
        for wrong in ("get_other", "get_weather2"):
            assert not accepts(must, body.replace(calls[0][0], wrong), marks), body
    assert not accepts(must, "Well.", marks)


def test_text_that_is_no_call_is_content() -> None:
    tools = found_of(TEMPLATES["parameters"])
    for answer in ("Use <tool_call> as a mark.", "a <function", "<tool_call", "x </tool_call> y"):
        content, calls = parsed(tools, list(answer))
        assert (content, calls) == (answer, []), answer
    assert parsed(tools, ["ok <tool_c"], cut=True) == ("ok ", [])


def test_models_may_leave_out_marks() -> None:
    tools = found_of(TEMPLATES["parameters"])
    call = "<function=get_weather><parameter=city>a</parameter></function>"
    assert parsed(tools, [call])[1] == [["get_weather", '{"city": "a"}']]
    tools = found_of(TEMPLATES["numbered"])
    call = '<|call_begin|>functions.get_weather:3<|args|>{"city": "a"}<|call_end|><|section_end|> b'
    assert parsed(tools, list(call)) == (" b", [["get_weather", '{"city": "a"}']])


@pytest.mark.parametrize(
    ("style", "answer", "content"),
    [
        ("keyed", '<|pre|>[{"get_weather": {"city": "a"}}, oops more', ", oops more"),
        ("pythonic", '<|tool_call_start|>[get_weather(city="a"), oops more', " oops more"),
    ],
)
def test_text_within_a_list_of_calls_is_content(style: str, answer: str, content: str) -> None:
    tools = found_of(TEMPLATES[style])
    for pieces in ([answer], list(answer)):
        assert parsed(tools, pieces) == (content, [["get_weather", '{"city": "a"}']])


def test_a_value_may_have_the_mark_that_ends_it() -> None:
    tools = found_of(TEMPLATES["parameters"])
    value = "<parameter=city>\nx </parameter> y\n</parameter>"
    body = f"<tool_call>\n<function=get_weather>\n{value}\n</function>\n</tool_call>"
    assert parsed(tools, list(body))[1] == [["get_weather", '{"city": "x </parameter> y"}']]


WEATHER = '{"city": "Oslo >>> x", "days": 3}'
NAMED = [
    ("functionary", "all\nHello > there", "Hello > there", []),
    ("functionary", f"get_weather\n{WEATHER}", "", [WEATHER]),
    ("functionary", f"all\nWait.\n>>>get_weather\n{WEATHER}>>>alarm.set-2\n{{}}", "Wait.", [WEATHER, "{}"]),
    ("functionary", "every word\nis text", "every word\nis text", []),
    ("functionary", "get_weath", "get_weath", []),
    ("phi4", '<|tool_call|>[{"name": "get_weather", "arguments": ' + WEATHER + "}]<|/tool_call|>", "", [WEATHER]),
    ("kimi_k2", "Hm <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
     + WEATHER + "<|tool_call_end|><|tool_calls_section_end|>", "Hm", [WEATHER]),
    ("lfm2", "<|tool_call_start|>[get_weather(city='Oslo >>> x', days=3), alarm.set-2()]<|tool_call_end|> ok", "ok",
     [WEATHER, "{}"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "answer", "content", "calls"), NAMED)
def test_named_formats_in_any_pieces(
    name: str, answer: str, content: str, calls: list[str]
) -> None:
    tools = TemplateTools(TemplateUse(), FORMATS[name])
    whole = parsed(tools, [answer])
    assert whole[0].strip() == content
    assert [json.loads(text) for _, text in whole[1]] == [json.loads(text) for text in calls]
    assert parsed(tools, list(answer)) == whole
    numbers = random.Random(answer)
    for _ in range(30):
        assert parsed(tools, pieces_of(numbers, answer)) == whole
    if calls and not content:
        for place in range(1, len(answer)):
            assert len(parsed(tools, [answer[:place]], cut=True)[0].strip()) < 3, answer[:place]


LITERALS = {
    "city": {"type": "string", "description": "d"},
    "day": {"type": "string", "pattern": "^[a-z]{3}$"},
    "days": {"type": "integer", "maximum": 99},
    "exact": {"type": "boolean"},
    "nothing": {"type": "null"},
    "kind": {"enum": ["x y", "it's", 3, True, None]},
    "either": {"anyOf": [{"type": "string"}, {"type": "boolean"}, {"type": "null"}]},
    "tags": {"type": "array", "items": {"type": "string"}},
    "few": {"type": "array", "items": {"type": "string"}, "maxItems": 1},
    "rows": {"type": "array", "items": {"type": "array", "items": {"type": ["string", "boolean"]}}},
}  # fmt: skip


def python_arguments(numbers: random.Random) -> dict[str, Any]:
    def word() -> str:
        return text(numbers, plain=False)

    makers = {
        "city": word,
        "days": lambda: numbers.randint(-9, 99),
        "exact": lambda: numbers.random() < 0.5,
        "nothing": lambda: None,
        "kind": lambda: numbers.choice(LITERALS["kind"]["enum"]),
        "either": lambda: numbers.choice([word(), True, None]),
        "tags": lambda: [word() for _ in range(numbers.randint(0, 3))],
        "rows": lambda: [[word(), True], [], [False]][: numbers.randint(0, 3)],
    }  # fmt: skip
    return {name: make() for name, make in makers.items() if numbers.random() < 0.7}


@pytest.mark.parametrize("name", ["lfm2", "pythonic"])
def test_calls_in_python_have_the_literals_of_python_and_json(name: str) -> None:
    tools = [Tool("get_weather", "", {"type": "object", "properties": LITERALS})]
    begin, end = ("<|tool_call_start|>[", "]<|tool_call_end|>") if name == "lfm2" else ("[", "]")
    must = answer_grammar(tools, ToolChoice(ChoiceKind.REQUIRED), FORMATS[name], {}).text
    assert must is not None
    found_tools = TemplateTools(TemplateUse(), FORMATS[name])
    numbers = random.Random(name)
    for _ in range(12):
        values = python_arguments(numbers)
        for write in (repr, lambda value: json.dumps(value, ensure_ascii=False)):
            call = ", ".join(f"{key}={write(value)}" for key, value in values.items())
            answer = f"{begin}get_weather({call}){end}"
            assert accepts(must, answer), answer
            (found,) = parsed(found_tools, [answer])[1]
            assert json.loads(found[1]) == values, answer
    for wrong in (
        "city=True", "day='abc'", "days='3'", "days=100", "exact='True'", "kind='q'", "kind=False", "either=3",
        "tags=['a', 3]", "tags=[True]", "few=['a', 'b']", "rows=['a']", "rows=[[3]]",
        "town='a'", r"city='\q'", "city='a\0'",
    ):  # fmt: skip
        assert not accepts(must, f"{begin}get_weather({wrong}){end}"), wrong


def test_grammars_of_nested_objects_in_python_are_no_larger_than_their_schemas() -> None:
    tree: dict[str, Any] = {"type": "array", "items": {"$ref": "#/$defs/tree"}}
    for _ in range(4):
        texts = {f"text {n}": {"type": "string"} for n in range(6)}
        tree = {"type": "object", "properties": {**texts, "a": tree, "b": tree}}
    parameters = {"type": "object", "properties": {"tree": tree, "a": {"$ref": "#/$defs/flag"}},
                  "$defs": {"tree": tree, "flag": {"type": "boolean"}}}  # fmt: skip
    tools = [Tool("f", "", parameters)]
    must = answer_grammar(tools, ToolChoice(ChoiceKind.REQUIRED), FORMATS["pythonic"], {}).text
    assert must is not None and len(must) < 4 * len(json.dumps(parameters))
    assert accepts(must, '[f(tree={"text 0": "x", "a": {"text 1": "y"}}, a=True)]')


def test_named_formats_of_templates() -> None:
    names = {"x {{ '>>>all\n' }}": "functionary", "<|tool_call|>[]<|/tool_call|>": "phi4", "<|tool_call|>": "granite",
             "<|tool_calls_section_begin|>": "kimi_k2", "List of tools: [": "lfm2"}  # fmt: skip
    for template, name in names.items():
        assert format_of_template(template).name == name
    for name in ("functionary", "phi4", "kimi_k2"):
        must = answer_grammar(TOOLS, ToolChoice(ChoiceKind.REQUIRED), FORMATS[name], {}).text
        assert must is not None
        text = FORMATS[name].render_call("get_weather", '{"city": "a"}').removeprefix(">>>")
        assert accepts(must, text) and not accepts(must, text.replace("city", "town"))


REASONING = {
    "<think>": ("<think>\n{{ m.reasoning_content }}\n</think>\n\n", ("<think>", "</think>")),
    "square": ("[THINK]{{ m.reasoning_content }}[/THINK]", ("[THINK]", "[/THINK]")),
    "prefixed": (
        "<seed:think>\n{{ m.reasoning_content }}\n</seed:think>",
        ("<seed:think>", "</seed:think>"),
    ),
    "channel": (
        "<|channel>thought\n{{ m.thinking }}\n<channel|>",
        ("<|channel>thought", "<channel|>"),
    ),
    "spelled": (
        "<|START_THINKING|>{{ m.reasoning }}<|END_THINKING|>",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "message": ("<|think|>{{ m.reasoning }}<|end|><|begin|>assistant<|content|>", None),
    "nothing": ("{{ m.reasoning_content }}", None),
}


@pytest.mark.parametrize("kind", REASONING)
def test_marks_of_reasoning_are_those_of_the_template(kind: str) -> None:
    written, marks = REASONING[kind]
    field = written.partition("{{ ")[2].partition(" }}")[0]
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n"
        f"{{% if {field} %}}{written}{{% endif %}}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    assert reasoning_marks(renderer(template), template) == marks
    if marks is None:
        return
    answer = f"{marks[0]}\nHm {marks[1][:2]} so.\n{marks[1]}\n\nYes {marks[0]}."
    for pieces in ([answer], list(answer)):
        parser = ReasoningParser(PlainParser(), False, marks)
        parts = [part for piece in pieces for part in parser.push(piece)]
        parts += parser.finish()
        thought = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
        content = "".join(part.text for part in parts if isinstance(part, ContentPart))
        assert (thought, content) == (f"Hm {marks[1][:2]} so.", f"Yes {marks[0]}.")


def test_a_template_that_refuses_calls_without_arguments() -> None:
    """The mark of the first key is what stands before each later one."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<tool={{ c.function.name }}>"
        "{% if not c.function.arguments %}{{ raise_exception('there is no argument') }}{% endif %}"
        "{% for k, v in c.function.arguments.items() %}"
        "<arg={{ k }}>{{ v if v is string else v | tojson }}</arg>{% endfor %}</tool>{% endfor %}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    layout = found_of(template).format.layout
    assert layout is not None
    assert (layout.head, layout.key, layout.tail) == (f"<tool={NAME}", "><arg=", "></tool>")
    check(template, random.Random(5), 8, plain=True)


@pytest.mark.long
@pytest.mark.skipif("TOOL_TEMPLATES" not in os.environ, reason="TOOL_TEMPLATES names no folder")
def test_published_templates() -> None:
    """Templates of a folder: what those that write calls write is read back."""
    paths = sorted(Path(os.environ["TOOL_TEMPLATES"]).glob("*.jinja"))
    derived, named = list[str](), list[str]()
    for path in paths:
        template = path.read_text()
        tools = found_of(template)
        if tools.use.renders_calls:
            (derived if tools.format.name == "template" else named).append(path.stem)
        if tools.format.name == "template":
            check(template, random.Random(path.stem), 20, plain=True)
        else:
            assert not tools.use.renders_calls or reads_back(
                tools.format, renderer(template), tools.use
            )
    print(f"derived {len(derived)}, named: {named}")
    # older folders have as many that only a named format fits, and fewer others
    assert derived and len(named) <= max(2, len(derived) // 20), named


@pytest.mark.parametrize("shows", [True, False])
def test_tools_are_described_once(shows: bool) -> None:
    """A template that shows tools is left alone; for one that does not, a system message describes them."""
    shown = "{% if tools %}TOOLS: {{ tools | tojson }}\n{% endif %}" if shows else ""
    template = (
        shown
        + "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</call>{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    found, render = found_of(template), renderer(template)
    model: Any = SimpleNamespace(
        template_use=found.use,
        tool_format=found.format,
        check_text=lambda size, name: None,
        apply_template=lambda messages, tools, options: render(messages, tools, True),
    )
    for system in ([], [{"role": "system", "content": "Be short."}]):
        messages = [*system, {"role": "user", "content": "What is the weather?"}]
        text = prompt_text(model, messages, TOOLS, {})
        assert text.count("get_weather") == 1, text
        assert text.count("<system>") == (len(system) if shows else 1)
        assert text.startswith("TOOLS: ") is shows
        # without tools nothing is described
        assert "get_weather" not in prompt_text(model, messages, [], {})
