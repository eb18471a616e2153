"""Chat templates in the styles of model families, and what each writes for two calls."""

from __future__ import annotations

_HEAD = """{%- if tools %}<s>tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}</s>
{% endif %}{%- for message in messages %}"""
_OTHER = """{%- if message.role != 'assistant' or not message.tool_calls %}<|{{ message.role }}|>
{{ message.content }}<|end|>
{% else %}<|assistant|>
{{ message.content or '' }}"""
_END = """<|end|>
{% endif %}{%- endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


def _template(calls: str) -> str:
    return _HEAD + _OTHER + calls + _END


def _each(call: str, between: str = "") -> str:
    return (
        "{% for call in message.tool_calls %}{% set f = call.function %}{% set name = f.name %}"
        f"{call}{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}"
    )


_NAMED = '{"name": "{{ name }}", "arguments": {{ f.arguments | tojson }}}'
_TEXT = "{{ v if v is string else v | tojson }}"

TEMPLATES = {
    "hermes": _template(_each("<tool_call>\n" + _NAMED + "\n</tool_call>", "\n")),
    "list": _template("<TOOLS>[" + _each(_NAMED, ", ") + "]</TOOLS>"),
    "lines": _template("<calls>\n" + _each(_NAMED + "\n") + "</calls>"),
    "keyed": _template('<|pre|>[' + _each('{"{{ name }}": {{ f.arguments | tojson }}}', ", ") + "]<|post|>"),
    "action": _template(
        "<|START|>[\n" + _each('    {"call_id": "{{ loop.index0 }}", "tool_name": "{{ name }}", '
        '"parameters": {{ f.arguments | tojson }}}', ",\n") + "\n]<|STOP|>"),
    "identified": _template("[CALLS][" + _each('{"name": "{{ name }}", "arguments": {{ f.arguments | tojson }}, '
                                              '"id": "{{ call.id }}"}', ", ") + "]"),
    "short ids": _template(_each("{% if call.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
                                 "[CALL]{{ name }}[ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}")),
    "arguments": _template(_each("[TOOL_CALLS]{{ name }}[ARGS]{{ f.arguments | tojson }}")),
    "numbered": _template("<|section_begin|>" + _each("<|call_begin|>functions.{{ name }}:{{ loop.index0 }}<|args|>"
                                                      "{{ f.arguments | tojson }}<|call_end|>") + "<|section_end|>"),
    "fenced": _template("<｜calls｜>" + _each("<｜call｜>function<｜sep｜>{{ name }}\n```json\n"
                                              "{{ f.arguments | tojson }}\n```<｜end｜>", "\n") + "<｜done｜>"),
    "function": _template(_each("<function={{ name }}>{{ f.arguments | tojson }}</function>")),
    "parameters": _template(_each(
        "<tool_call>\n<function={{ name }}>\n{% for k, v in f.arguments | items %}<parameter={{ k }}>\n"
        + _TEXT + "\n</parameter>\n{% endfor %}</function>\n</tool_call>", "\n")),
    "pairs": _template(_each(
        "<tool_call>{{ name }}\n{% for k, v in f.arguments | items %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
        + _TEXT + "</arg_value>\n{% endfor %}</tool_call>", "\n")),
    "tight pairs": _template(_each(
        "<tool_call>{{ name }}{% for k, v in f.arguments | items %}<arg_key>{{ k }}</arg_key><arg_value>"
        + _TEXT + "</arg_value>{% endfor %}</tool_call>")),
    "invoke": _template("<mm:tool_call>\n" + _each(
        '<invoke name="{{ name }}">\n{% for k, v in f.arguments | items %}<parameter name="{{ k }}">'
        + _TEXT + "</parameter>\n{% endfor %}</invoke>\n") + "</mm:tool_call>"),
    "typed": _template("<｜M｜calls>\n" + _each(
        '<｜M｜invoke name="{{ name }}">\n{% for k, v in f.arguments | items %}<｜M｜parameter name="{{ k }}" string='
        """"{{ 'true' if v is string else 'false' }}">""" + _TEXT + "</｜M｜parameter>\n{% endfor %}</｜M｜invoke>\n")
        + "</｜M｜calls>"),
    "python values": _template(_each(
        "<seed:call>\n<function={{ name }}>\n{% for k, v in f.arguments | items %}<parameter={{ k }}>{{ v }}"
        "</parameter>\n{% endfor %}</function>\n</seed:call>", "\n")),
    "pythonic": _template("<|tool_call_start|>[" + _each(
        "{{ name }}({% for k, v in f.arguments | items %}{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}"
        "{% endfor %})", ", ") + "]<|tool_call_end|>"),
    "python quotes": (
        "{% macro value(v) %}{% if v is string %}{{ \"'\" + v + \"'\" }}{% elif v is mapping %}{{ v | tojson }}"
        "{% else %}{{ v | string }}{% endif %}{% endmacro %}"
        + _template("<|call|>[" + _each(
            "{{ name }}({% for k, v in f.arguments | items %}{{ k }}={{ value(v) }}{% if not loop.last %}, {% endif %}"
            "{% endfor %})", ", ") + "]<|done|>")
    ),
    "bare": (
        "{% macro value(v) %}{% if v is string %}<|'|>{{ v }}<|'|>{% elif v is mapping %}{{ '{' }}"
        "{% for k, w in v | items %}{{ k }}:{{ value(w) }}{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}"
        "{% elif v is sequence %}[{% for w in v %}{{ value(w) }}{% if not loop.last %},{% endif %}{% endfor %}]"
        "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
        + _template(_each("<|tool_call>call:{{ name }}{{ value(f.arguments) }}<tool_call|>"))
    ),
    "elements": (
        "{% macro value(v) %}{% if v is mapping %}{% for k, w in v | items %}#!<{{ k }}>{{ value(w) }}#!</{{ k }}>"
        "{% endfor %}{% elif v is sequence and v is not string %}{% for w in v %}#!<item>{{ value(w) }}#!</item>"
        "{% endfor %}{% else %}" + _TEXT + "{% endif %}{% endmacro %}"
        + _template("#!<tool_call>\n" + _each('#!<invoke name="{{ name }}">{{ value(f.arguments) }}#!</invoke>\n')
                    + "#!</tool_call>")
    ),
    "json text": _template(_each("<tool_call>\n" + '{"name": "{{ name }}", "arguments": {{ "" + f.arguments }}}'
                                 + "\n</tool_call>", "\n")),
    "one call": _template("{% if message.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
                          + _each('{"name": "{{ name }}", "parameters": {{ f.arguments | tojson }}}')),
}  # fmt: skip
"""The templates by the names of their styles."""
