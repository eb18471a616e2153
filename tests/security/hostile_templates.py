"""Templates that ask for as much work and memory as they can: by kind, and drawn from a grammar.

Run as a program, it renders the templates of a JSON list from standard input under limits of the system, and prints what
became of each. An argument replaces the number of steps of a rendering.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time

N = "1000000000"

KINDS: dict[str, list[str]] = {
    "repeat": [
        f"{{{{ 'a' * {N} }}}}", f"{{{{ [0] * {N} }}}}", f"{{{{ (0, 1) * {N} }}}}", f"{{{{ {N} * 'ab' }}}}",
        f"{{% set x = 'a' * {N} %}}", f"{{{{ ('é' * {N}) | length }}}}", f"{{{{ ('a'.encode() * {N}) | length }}}}",
        f"{{{{ (messages * {N}) | length }}}}", f"{{{{ ('a' | safe) * {N} }}}}",
    ],
    "double": [
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('', 'ab') %}{% endfor %}",
        "{% set ns = namespace(x=2) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=2) %}{% for i in range(99) %}{% set ns.x = ns.x ** ns.x %}{% endfor %}{{ ns.x }}",
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = m(ns.x) %}{% endfor %}",
    ],
    "shared": [
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson(indent=4) }}",
        "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
        "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x in [ns.y] }}",
        "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ [ns.x].index(ns.y) }}",
        "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x is eq ns.y }}",
        "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} | length }}",
        "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ messages[0][ns.x] }}",
        "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ messages[0].get(ns.x) }}",
        "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ dict([(ns.x, 1)]) }}",
        "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ [ns.x] | unique | list | length }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ 'a' ~ ns.x }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ '%s' % ns.x }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ '{}'.format(ns.x) }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ '{!r:.1}'.format(ns.x) }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ [ns.x] | join }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | string | length }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | pprint | length }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x is lower }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns }}",
    ],
    "loops": [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ range(99999) | select('none') | list | length }}{% endfor %}",
        "{% for a in range(99999) %}{{ range(99999) | reverse | select('none') | list | length }}{% endfor %}",
        "{% for a in range(99999) %}{{ range(99999) | map('upper') | first }}{{ range(99999) | sum }}{% endfor %}",
        "{% for a in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
        "{% for a in range(99999) %}{{ range(99999) | sort | length }}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' in range(99999) }}{% endfor %}",
        "{% for a in range(99999) %}{{ range(99999) | batch(1) | list | length }}{% endfor %}",
        f"{{{{ [1] | slice({N}) | list | length }}}}", f"{{% for x in [1] | slice({N}) %}}{{% endfor %}}",
        f"{{{{ [1] | batch({N}, 'x') | list | length }}}}", f"{{{{ range({N}) | list }}}}", f"{{{{ lipsum({N}) }}}}",
        f"{{{{ lipsum(1, min={N}, max={N}1) }}}}",
        "{% for a in range(99999) %}{{ lipsum(9) }}{% endfor %}",
        "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% macro m() %}{% set ns.n = ns.n + 1 %}{{ m() if ns.n % 30 else '' }}{{ m() if ns.n % 30 else '' }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% block a %}{{ self.a() }}{% endblock %}",
        "{% set ns = namespace(n=0) %}{% block a %}{% set ns.n = ns.n + 1 %}{{ self.a() }}{{ self.a() }}{% endblock %}",
        "{% macro c() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call c() %}" * 60 + "x" + "{% endcall %}" * 60,
        "{% for i in range(99999) %}" + "{{ 'x' }}{% if i %}{% endif %}" * 2000 + "{% endfor %}",
        "{% for i in range(99999) %}" + "x" * 200000 + "{% endfor %}",
        "{% set s = 'a' * 9999999 %}{% for i in range(99999) %}{{ 'b' in s }}{% endfor %}",
        "{% set s = 'a' * 9999999 %}{% for i in range(99999) %}{% if s.find('b') %}{% endif %}{% endfor %}",
        "{% set s = 'a' * 9999999 %}{% set t = 'a' * 9999999 %}{% for i in range(99999) %}{% if s == t %}{% endif %}{% endfor %}",
        "{% set s = 'a' * 9999999 %}{% for i in range(99999) %}{% set t = s[1:] %}{% endfor %}",
        "{% set s = 'a' * 9999999 %}{% for i in range(99999) %}{% set t = s.upper() %}{% endfor %}",
        "{% set s = [1] * 999999 %}{% for i in range(99999) %}{% set t = s[1:] %}{% endfor %}",
        "{% set s = [1] * 999999 %}{% for i in range(99999) %}{% set t = s.index(2) %}{% endfor %}",
        "{% set s = ('a' * 9999) %}{% for i in range(99999) %}{% for j in range(99999) %}{{ s }}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% for j in range(99) %}{% set ns.x = [ns.x] %}{% endfor %}{% endfor %}{{ ns.x }}",
    ],
    "widths": [
        f"{{{{ '%{N}d' % 1 }}}}", f"{{{{ '%.{N}f' % 1.5 }}}}", f"{{{{ '%-{N}s' % 'a' }}}}", f"{{{{ '%*d' % ({N}, 1) }}}}",
        f"{{{{ '%(a){N}d' % {{'a': 1}} }}}}", f"{{{{ '%.*f' % ({N}, 1.5) }}}}", f"{{{{ '%{N}d'.encode() % 1 }}}}",
        f"{{{{ '{{:{N}}}'.format(1) }}}}", f"{{{{ '{{:>{N}}}'.format('a') }}}}", f"{{{{ '{{:.{N}f}}'.format(1.5) }}}}",
        f"{{{{ '{{:{{}}}}'.format(1, {N}) }}}}", f"{{{{ '{{a:{{b}}}}'.format_map({{'a': 1, 'b': {N}}}) }}}}",
        f"{{{{ ('{{:{N}}}' | safe).format(1) }}}}", f"{{{{ '%{N}d' | format(1) }}}}", f"{{{{ ('%{N}d' | safe) % 1 }}}}",
        f"{{{{ 'a'.ljust({N}) }}}}", f"{{{{ 'a'.rjust({N}, 'b') }}}}", f"{{{{ 'a'.center({N}) }}}}", f"{{{{ 'a'.zfill({N}) }}}}",
        f"{{{{ 'a' | center({N}) }}}}", f"{{{{ '\\t'.expandtabs({N}) }}}}", f"{{{{ 'a\\na' | indent({N}) }}}}",
        f"{{{{ 'a'.encode().ljust({N}) }}}}", f"{{{{ (5).to_bytes({N}) }}}}", f"{{{{ messages | tojson(indent={N}) }}}}",
        f"{{{{ 1 | round({N}) }}}}", f"{{{{ 1 | round(-{N}) }}}}", f"{{{{ 1.5 | round({N}, 'floor') }}}}",
        f"{{{{ 10 ** {N} }}}}", "{{ 10 ** 10 ** 10 }}", f"{{{{ (-3) ** {N} }}}}", "{{ strftime_now('%Y' * 9999999) }}",
        f"{{{{ strftime_now('%{N}Y') | length < 9999 }}}}", "{{ ('f' * 9999999) | int(0, 16) }}", "{{ ('9' * 9999999) | int }}",
        f"{{{{ 'a' | wordwrap({N}) | length }}}}", f"{{{{ 'a' | truncate({N}) | length }}}}",
    ],
    "growth": [
        "{% set ns = namespace(x='&') %}{% for i in range(99) %}{% set ns.x = ns.x | forceescape %}{% endfor %}",
        "{% set ns = namespace(x='&') %}{% for i in range(99) %}{% set ns.x = ns.x | urlencode %}{% endfor %}",
        "{% set s = 'a' * 99999 %}{{ s.replace('a', s) }}", "{% set s = 'a' * 99999 %}{{ s | replace('a', s) }}",
        "{% set s = 'a' * 99999 %}{{ s.join(s) }}", "{% set s = 'a' * 99999 %}{{ s | join(s) }}",
        "{% set s = 'a' * 99999 %}{{ s.translate({97: s}) }}", "{% set s = 'a' * 99999 %}{{ ('a ' * 9999) | wordwrap(1, true, s) }}",
        "{% set s = 'a' * 99999 %}{{ ('\\n' * 99999) | indent(s, true, true) }}", "{% set s = 'a' * 99999 %}{{ ('%(a)s' * 9999) % {'a': s} }}",
        "{% set s = 'a' * 99999 %}{{ ('{0}' * 9999).format(s) }}", "{% set s = 'a' * 99999 %}{{ [s] * 99999 | join }}",
        "{% set s = 'a' * 99999 %}{{ ([s] * 99999) | join }}", "{% set s = 'a' * 99999 %}{{ ([s] * 99999) | tojson }}",
        "{% set s = 'a' * 99999 %}{{ [[s] * 99999, 1] }}", "{% set s = ['a'] * 9999 %}{{ ([s] * 9999) | sum(start=[]) | length }}",
        "{% set s = 'a' * 99999 %}{{ ('http://a.com ' * 9999) | urlize(rel=s) }}", "{% set s = 'a' * 99999 %}{{ [1] * 9999 | tojson(separators=(s, s)) }}",
        "{% set s = 'a' * 99999 %}{{ ([1] * 9999) | tojson(separators=(s, s)) }}", "{{ ('a ' * 9999999).split() | length }}",
        "{{ ('a\\n' * 9999999).splitlines() | length }}", "{{ ('a,' * 9999999).split(',') | length }}", "{{ ('é,' * 9999999) | list | length }}",
        "{% set s = 'a' * 99999 %}{{ ('a' * 99999).encode('ascii', s) }}", "{{ ('é' * 9999999).encode('ascii', 'namereplace') | length }}",
        "{{ ('é' * 999999).encode('punycode') | length }}", "{{ ('<!-- -->' * 999999) | striptags }}", "{{ ('<!-- -->' * 999999 | safe).striptags() }}",
        "{{ (('<!-- -->' * 999999) | safe).striptags() }}", "{{ ('<' * 9999999) | striptags }}", "{{ ('a' * 9999999) | wordwrap(1) | length }}",
        "{{ ('a' * 9999999) | urlize | length }}", "{{ ('www.' * 999999) | urlize | length }}", "{{ ('a@' * 999999) | urlize | length }}",
        "{{ ('a' * 9999999).rfind('b' ~ 'a' * 999999) }}", "{{ ('a' * 9999999).rsplit('b' ~ 'a' * 999999) | length }}",
        "{{ ('a' * 9999999).strip('b' * 999999 ~ 'a') | length }}", "{{ ('a' * 9999999) | trim('b' * 999999 ~ 'a') | length }}",
        "{{ [{'a': 1}] * 9999 | map(attribute='a.' * 99999) | list }}", "{{ ([{'a': 1}] * 9999) | map(attribute='a.' * 99999) | list }}",
        "{{ ('a' * 9999999) | title | length }}", "{{ ('a ' * 9999999) | wordcount }}", "{{ {}.fromkeys(range(99999)) | length }}",
        "{{ ''.maketrans('a' * 9999999, 'b' * 9999999) | length }}", "{{ raise_exception('a' * 9999999) }}", "{{ ([[1] * 9999] * 9999) | map('list') | list | length }}",
    ],
    "growing lists": [
        "{% set a = [1] %}{% for i in a %}{% set _ = a.append(1) %}{% endfor %}", "{% set a = [] %}{% for i in range(99999) %}{% set _ = a.append('a' * 9999) %}{% endfor %}{{ a | length }}",
        "{% set a = [1] * 9999 %}{% for i in range(9999) %}{% set _ = a.pop(0) %}{% set _ = a.append(i) %}{% endfor %}", "{% set a = ['a' * 9999] %}{% for i in range(30) %}{% set _ = a.append(a | join) %}{% endfor %}{{ a | length }}",
    ],
    "source": [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "not " * 5000 + "1 }}", "{{ " + "-" * 5000 + "1 }}", "{{ " + "[" * 5000 + "]" * 5000 + " }}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000, "{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "{% for i in [1] %}" * 3000 + "{% endfor %}" * 3000,
        "{{ " + "9" * 5000 + " }}", "{{ 1e99999 }}", "{{ " + " ~ ".join(["'a'"] * 50000) + " }}", "{{ " + " + ".join(["1"] * 50000) + " }}", "{% raw %}" + "{{" * 50000,
        "{#" * 50000, "{{" * 50000, "a" * 300000, "{% set a = 1 %}" * 15000, "{% if a %}{% set b = 1 %}{% endif %}" * 6000, "{% macro a() %}{% endmacro %}" * 6000,
        "".join(f"{{% if a %}}{{% set b{i} = 1 %}}{{% endif %}}" for i in range(6000)), "".join(f"{{{{ a{i} }}}}" for i in range(20000)), "{{ '" + "\\u0041" * 40000 + "' }}",
        "{{ a" + ".b" * 50000 + " }}", "{{ a" + "|e" * 50000 + " }}", "{{ a" + "[0]" * 50000 + " }}", "{{ x if a else " * 5000 + "1" + " }}" * 5000, "{% include 'x' %}", "{% extends 'x' %}", "{% import 'x' as x %}",
    ],
    "escape": [
        "{{ ''.__class__ }}", "{{ ''['__class__'].__mro__ }}", "{{ '' | attr('__class__') }}", "{{ '{0.__class__}'.format(1) }}", "{{ ('{0.__class__}' | attr('format'))(1) }}",
        "{{ cycler.__init__.__globals__ }}", "{{ namespace.__init__ }}", "{{ messages.append(1) }}", "{{ messages.pop() }}", "{{ (messages | attr('append'))(1) }}", "{% set a = [] %}{{ a.append(a) }}{{ a | tojson }}", "{% set a = [[1]] %}{{ a.append([a]) }}", "{{ [1].extend([2]) }}", "{% for a in [[messages]] %}{{ a[0].append(1) }}{% endfor %}", "{{ messages[0].update({}) }}", "{{ self._TemplateReference__context }}",
        "{{ joiner.__init__.__globals__.os.popen('id') }}", "{% set ns = namespace(__class__=1) %}", "{{ lipsum.__globals__ }}", "{{ (messages | map('attr', '__class__') | list)[0] }}",
        "{{ ('%s' | attr('__mod__'))(1) }}", "{{ '{0.a.__globals__}'.format_map({'0': lipsum}) }}", "{{ dict.mro() }}", "{{ (lipsum | attr('__globals__'))['os'] }}", "{{ [lipsum] | map(attribute='__globals__') | list }}",
        "{{ range.__class__ }}", "{{ raise_exception.__globals__ }}", "{{ messages | groupby('__class__') | list }}", "{{ loop.__class__ }}", "{{ [].__class__.__base__.__subclasses__() }}",
    ],
}  # fmt: skip
"""Templates by what they do; each is an error, or renders at once."""

ORDINARY = [
    "{{ 'a%sb%5.2f%%' % ('x', 1.5) }}{{ '%(a)s' % {'a': 1} }}{{ '%-5s|' | format('x') }}",
    "{{ '{0:>5}|{1!r}{x.y}'.format('a', 'b', x={'y': 3}) }}{{ '{a}'.format_map({'a': [1]}) }}",
    "{{ 'a,b,,c'.split(',') }}{{ ' a  b '.split() }}{{ 'a\nb'.splitlines() }}{{ 'a-b'.partition('-') }}",
    "{{ 'abc'.replace('b', 'xx').center(9, '*').zfill(12).ljust(14) }}|{{ 'a\tb'.expandtabs(4) }}",
    "{{ 'ab'.translate({97: 'x'}) }}{{ '-'.join(['a', 'b']) }}{{ 'é'.encode('utf-8').decode('utf-8') }}",
    "{{ [3, 1, 2] | sort }}{{ [3, 1] | sort(reverse=true) }}{{ [1, 2, 1] | unique | list }}{{ [[1], [2]] | sum(start=[]) }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'eq', 'user') | list | length }}",
    "{{ messages | groupby('role') }}{{ {'b': 1, 'a': 2} | dictsort }}{{ messages | sum(attribute='n') }}",
    "{{ [1, 2, 3] | batch(2, 'x') | list }}{{ [1, 2, 3] | slice(2, 'x') | list }}{{ 'abc' | reverse }}{{ [1, 2] | reverse | list }}",
    "{{ 'some words here' | wordwrap(6) }}{{ 'a\nb' | indent(2, true) }}{{ 'long text' | truncate(5) }}{{ 'a b' | wordcount }}",
    "{{ messages | tojson(indent=2) }}{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}{{ 'é<' | tojson }}",
    "{{ '<a> & b' | striptags }}{{ '<a>' | escape }}{{ '<a>' | e ~ '<b>' }}{{ ('<i>' | safe) + '<b>' }}{{ ('<%s>' | safe) % '<b>' }}",
    "{% autoescape true %}{{ '<a>' }}{{ '<a>' ~ 'b' }}{{ '<a>' | safe }}{% set x %}<b>{{ '<' }}{% endset %}{{ x }}{% endautoescape %}",
    "{{ 2 ** 10 }}{{ 7 // 2 }}{{ -7 % 3 }}{{ 1.5 | round }}{{ 1.25 | round(1, 'floor') }}{{ '12' | int }}{{ 'ff' | int(0, 16) }}{{ '1.5' | float }}",
    "{{ 1 < 2 < 3 }}{{ 'a' in 'abc' }}{{ 'x' not in ['a'] }}{{ messages[0] in messages }}{{ [1, [2]] == [1, [2]] }}{{ 3 in range(5) }}{{ 'role' in messages[0] }}",
    "{{ messages[::-1] | length }}{{ 'abc'[1:] }}{{ 'abc'[::-1] }}{{ {(1, 2): 3}[(1, 2)] }}{{ messages[0].get('none', 4) }}",
    "{% for m in messages if m.role != 'system' %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ m.role }}{% else %}none{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}",
    "{% macro m(a, b='x') %}{{ a }}{{ b }}{{ varargs }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}{{ m(1, 2, 3) }}{% call m(4) %}c{% endcall %}",
    "{% filter upper %}a{{ 1 }}{% endfilter %}{% set x = namespace(n=[]) %}{% set x.n = x.n + [1] %}{{ x.n }}{% block b %}b{{ messages | length }}{% endblock %}{{ self.b() }}",
    "{{ 'x' is lower }}{{ 3 is divisibleby(3) }}{{ 2 is in [1, 2] }}{{ none is none }}{{ [1] | first }}{{ [1] | last }}{{ undefined_name | default('d') }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{% set j = joiner(',') %}{{ j() }}x{{ j() }}y{{ dict(a=1) }}{{ dict([('b', 2)]) }}",
    "{{ 'a b' | title }}{{ 'A' | lower }}{{ ' a ' | trim }}{{ 'xax' | trim('x') }}{{ 'a b&' | urlencode }}{{ 123456 | filesizeformat }}{{ [1, 2] | max }}{{ 'x' | center(5) }}|",
    "{{ 'see www.a.com' | urlize }}{{ {'a': 'b'} | xmlattr }}{{ [1, {'a': 2}] | pprint }}{{ ['a'] | map('upper') | list }}{{ [0, 1] | select | list }}{{ 'ab' | list }}",
]  # fmt: skip
"""Templates with what published templates use, and more."""

MESSAGES = [{"role": "user", "content": "Hi <b>&</b>"}, {"role": "assistant", "content": "x\ny"}]

_NAMES = ["messages", "ns.x", "ns.y", "i", "m", "messages[0].content", "bos_token"]
_FILTERS = [
    "abs", "capitalize", "center({n})", "default({e})", "dictsort", "e", "escape", "filesizeformat", "first", "float",
    "forceescape", "format({e})", "groupby({t})", "indent({n})", "indent({t})", "int", "int(0, 16)", "items", "join", "join({e})", "last", "length",
    "list", "lower", "map('upper')", "map('list')", "map(attribute={t})", "max", "min", "pprint", "random", "reject({t})", "replace({t}, {e})", "reverse", "round({n})",
    "safe", "select('string')", "selectattr({t})", "slice({n})", "slice({n}, {e})", "batch({n})", "batch({n}, {e})", "sort", "string", "striptags", "sum", "sum(start={e})", "title",
    "tojson", "tojson(indent={n})", "tojson(separators=({t}, {t}))", "trim", "trim({t})", "truncate({n})", "unique", "upper", "urlencode", "urlize", "urlize(rel={t})", "wordcount",
    "wordwrap({n})", "wordwrap({n}, true, {t})", "xmlattr", "attr({t})",
]  # fmt: skip
_METHODS = [
    "capitalize()", "casefold()", "center({n})", "count({e})", "encode()", "endswith({e})", "expandtabs({n})", "find({e})", "format({e}, {e})", "format_map({e})", "index({e})",
    "isalpha()", "join({e})", "ljust({n}, 'x')", "lower()", "lstrip({t})", "partition({t})", "removeprefix({t})", "replace({t}, {e})", "rfind({t})", "rjust({n})", "rpartition({t})",
    "rsplit({t})", "rstrip()", "split()", "split({t})", "split({t}, {n})", "splitlines()", "startswith({e})", "strip({t})", "swapcase()", "title()", "translate({{97: {e}}})",
    "upper()", "zfill({n})", "items()", "keys()", "values()", "get({e})", "copy()", "fromkeys({e})", "bit_length()", "to_bytes({n})", "decode()", "hex()", "striptags()", "unescape()", "maketrans({t}, {t})",
]  # fmt: skip
_TESTS = ["none", "string", "eq({e})", "in({e})", "lower", "lt({e})", "sameas({e})", "divisibleby({n})", "iterable", "mapping"]  # fmt: skip
_TEXTS = ["''", "'a'", "'ab '", "'<!-- -->'", "'<'", "'&'", "'{}'", "'{0:9}'", "'%s'", "'%9999d'", "'é'", "'\\n'", "'\\t'", "'www.a.com '", "'role'", "','", "'f'", "'9'"]  # fmt: skip
_NUMBERS = ["0", "1", "2", "-1", "7", "99", "9999", "99999", "1000000000", "10 ** 18", "2 ** 63", "1.5", "1e308"]  # fmt: skip


class Grammar:
    """Draws templates at random.

    Args:
        seed: The seed.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def template(self) -> str:
        """A template."""
        return "{% set ns = namespace(x='ab', y=[1]) %}" + "".join(
            self._statement(3) for _ in range(self._random.randint(1, 4))
        )

    def _number(self) -> str:
        return self._random.choice(_NUMBERS)

    def _text(self, depth: int) -> str:
        text = self._random.choice(_TEXTS)
        return f"({text} * {self._number()})" if self._random.random() < 0.4 else text

    def _expression(self, depth: int) -> str:
        if depth <= 0:
            return self._random.choice([self._random.choice(_NAMES), self._number(), self._text(0)])
        e = lambda: self._expression(depth - 1)  # noqa: E731
        match self._random.randrange(14):
            case 0 | 1:
                operator = self._random.choice(
                    ["+", "-", "*", "*", "/", "//", "%", "%", "**", "~", "~"]
                )
                return f"({e()} {operator} {e()})"
            case 2:
                return f"[{e()}, {e()}]"
            case 3:
                return f"({e()}, {e()})"
            case 4:
                return f"{{{e()}: {e()}}}"
            case 5:
                return f"({e()} {self._random.choice(['==', '<', 'in', 'not in', '!=', 'and', 'or'])} {e()})"
            case 6:
                return f"{e()}[{e()}]"
            case 7:
                return f"{e()}[{self._number()}:{self._number()}]"
            case 8:
                return f"({e()} if {e()} else {e()})"
            case 9:
                return f"range({self._random.choice(['9', '99', '9999', '99999', '1000000000'])})"
            case 10:
                return f"({e()} is {self._filled(self._random.choice(_TESTS), depth)})"
            case 11:
                return f"({e()}).{self._filled(self._random.choice(_METHODS), depth)}"
            case _:
                return f"({e()} | {self._filled(self._random.choice(_FILTERS), depth)})"

    def _filled(self, form: str, depth: int) -> str:
        parts = {
            "e": self._expression(depth - 2),
            "n": self._number(),
            "t": self._text(0),
        }
        return form.format(**parts)

    def _statement(self, depth: int) -> str:
        e = self._expression(self._random.randint(0, 3))
        inner = "".join(self._statement(depth - 1) for _ in range(self._random.randint(1, 2))) if depth else ""  # fmt: skip
        match self._random.randrange(9):
            case 0 | 1 if depth:
                iterable = self._random.choice(["range(9)", "range(99)", "range(99999)", "messages", e])  # fmt: skip
                test = f" if {self._expression(1)}" if self._random.random() < 0.2 else ""
                return f"{{% for i in {iterable}{test} %}}{inner}{{% endfor %}}"
            case 2 | 3:
                name = self._random.choice(["ns.x", "ns.y"])
                return f"{{% set {name} = {e} %}}"
            case 4 if depth:
                return f"{{% if {e} %}}{inner}{{% else %}}{inner}{{% endif %}}"
            case 5 if depth:
                return f"{{% macro m(a) %}}{inner}{{% endmacro %}}{{{{ m({e}) }}}}"
            case 6 if depth:
                return f"{{% set ns.x %}}{inner}{{% endset %}}"
            case 7 if depth:
                return f"{{% filter {self._random.choice(['upper', 'escape', 'trim', 'indent'])} %}}{inner}{{% endfilter %}}"
            case _:
                return f"{{{{ {e} }}}}"


def main() -> None:
    """Renders templates; a line for each: the seconds of the processor, and the error or the length."""
    from max.pipelines.core.exceptions import InputError
    from max.pipelines.tokenization.chat_template import render_chat
    from max.pipelines.tokenization.templates import budget

    if len(sys.argv) > 1:
        budget.STEPS = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    render_chat("{{ messages[0].content }}", MESSAGES)
    for text in json.load(sys.stdin):
        begin = time.process_time()
        # the limit counts the whole process: a template may take ten seconds more
        resource.setrlimit(resource.RLIMIT_CPU, (int(begin) + 10, resource.RLIM_INFINITY))
        try:
            outcome = f"length {len(render_chat(text, MESSAGES, variables={'bos_token': '<s>'}))}"
        except InputError as error:
            outcome = f"error {error.problem}"
        print(json.dumps([time.process_time() - begin, outcome[:1200]]), flush=True)


if __name__ == "__main__":
    main()
