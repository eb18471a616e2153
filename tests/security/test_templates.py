"""Chat templates that come with a model: they run no code of Python, and take bounded work and memory.

CVE-2026-5760 (SGLang rendered a GGUF file's template outside a sandbox), CVE-2025-61620 (vLLM: templates, and requests
that give them, without bounds), CVE-2025-62426 (vLLM: `chat_template_kwargs` replaced arguments of the rendering).
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from max.pipelines.core.exceptions import InputError
from max.pipelines.tokenization.chat_template import render_chat
from max.pipelines.tokenization.templates.budget import BYTES, STEPS
from tests.security.hostile_templates import KINDS, MESSAGES, ORDINARY, Grammar

ROOT = Path(__file__).parents[2]


FEW_STEPS = 60_000
"""So that hostile templates end sooner; without a limit they end as little."""


def outcomes(templates: list[str], steps: int = FEW_STEPS) -> list[str]:
    """What becomes of templates in a process with limits of memory, and of time for each template."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.hostile_templates", str(steps)],
        input=json.dumps(templates),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    lines = [json.loads(line)[1] for line in done.stdout.splitlines()]
    last = templates[len(lines)] if len(lines) < len(templates) else ""
    assert done.returncode == 0 and len(lines) == len(templates), (last[:2000], done.stderr[-2000:])
    return lines


@pytest.mark.parametrize("steps", [FEW_STEPS, pytest.param(STEPS, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_templates_end(kind: str, steps: int) -> None:
    """CVE-2025-61620."""
    told = dict(zip(KINDS[kind], outcomes(KINDS[kind], steps), strict=True))
    for outcome in told.values():
        size = int(outcome.split()[1]) if outcome.startswith("length") else len(outcome)
        assert size < BYTES
        assert "Traceback" not in outcome and len(outcome) < 1200
        assert "too much memory" not in outcome
    if kind in ("double", "repeat", "shared"):
        assert all("the chat template takes too much: " in outcome for outcome in told.values())


@pytest.mark.parametrize("count", [150, pytest.param(20_000, marks=pytest.mark.long)])
def test_random_templates_end(count: int) -> None:
    """CVE-2025-61620."""
    first = random.randrange(1 << 30) if count > 150 else 0
    told = outcomes([Grammar(seed).template() for seed in range(first, first + count)])
    assert sum(outcome.startswith("length") for outcome in told) > count // 50, first
    assert not any("too much memory" in outcome for outcome in told), first
    assert sum("takes too much" in outcome for outcome in told) > count // 50, first


@pytest.mark.parametrize("template", KINDS["escape"])
def test_no_template_reaches_the_interpreter(template: str) -> None:
    """CVE-2026-5760."""
    try:
        text = render_chat(template, [dict(message) for message in MESSAGES])
    except InputError:
        return
    assert not any(word in text for word in ("class", "module", "uid=", "function", "__")), text


def test_the_bounds_grow_with_the_conversation() -> None:
    messages = [{"role": "user", "content": f"{i} " + "x" * 5000} for i in range(2000)]
    each = (
        "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m['content'].strip() | upper }}{% endfor %}"
    )
    text = render_chat(each, messages)
    assert text == "".join(f"<user>{m['content'].upper()}" for m in messages)
    # once per pair of messages
    pairs = "{% for m in messages %}{% for n in messages %}{{ n.role if loop.first }}{% endfor %}{% endfor %}"
    assert render_chat(pairs, messages[:500]) == "user" * 500


def test_the_message_says_what_is_taken() -> None:
    with pytest.raises(
        InputError, match=f"takes too much: it takes more than {STEPS + 5000} steps"
    ):
        render_chat(
            "{% for i in range(99999) %}{% for j in range(99) %}{% endfor %}{% endfor %}",
            [{"a": 1}],
        )
    with pytest.raises(
        InputError, match=f"its values and output take more than {BYTES + 256} bytes"
    ):
        render_chat("{{ 'a' * 10 ** 9 }}", [{"a": "b"}])
    with pytest.raises(InputError, match="recurses too deeply"):
        render_chat("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", [])
    with pytest.raises(InputError, match="has 150000 characters; up to 131072 fit"):
        render_chat("a" * 150_000, [])


def test_what_a_request_gives_is_data() -> None:
    """CVE-2025-62426, CVE-2025-61620."""
    hostile = "{{ 'a' * 10 ** 9 }}{% for i in range(10 ** 9) %}{% endfor %}"
    messages = [{"role": hostile, "content": hostile}]
    variables = {"bos_token": hostile, "x": [hostile]}
    text = render_chat(
        "{{ bos_token }}{{ messages[0].role }}{{ x[0] }}", messages, variables=variables
    )
    assert text == hostile * 3
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(InputError, match="recurses too deeply"):
        render_chat("{{ messages }}", [{"role": "user", "content": "a"}], variables={"x": nested})
    while nested:  # or its end recurses, in the interpreter
        nested = nested.pop()  # type: ignore[assignment]


@pytest.mark.parametrize("template", ORDINARY)
def test_ordinary_templates_render_as_in_transformers(template: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [
        {"role": "user", "content": "Hi <b>&</b>", "n": 1},
        {"role": "assistant", "content": "日本 🙂", "n": 2},
    ]
    (expected,), _ = utils.render_jinja_template([messages], chat_template=template)
    assert render_chat(template, messages, add_generation_prompt=False) == expected


def test_tokenizers_of_transformers_render_within_the_bounds() -> None:
    transformers = pytest.importorskip("transformers")
    from max.pipelines.tokenization.hf_tokenizer import render_for_transformers
    from tests.pipelines.broken_files import TINY

    theirs = transformers.AutoTokenizer.from_pretrained(TINY, local_files_only=True)
    messages = [{"role": "user", "content": "Hi"}]
    for options in (
        {},
        {"add_generation_prompt": True},
        {"chat_template": "{{ bos_token }}{{ x }}", "x": 3},
    ):
        expected = theirs.apply_chat_template(messages, tokenize=False, **options)
        assert render_for_transformers(theirs, messages, None, dict(options)) == expected
    with pytest.raises(InputError, match="takes too much"):
        render_for_transformers(theirs, messages, None, {"chat_template": "{{ 'a' * 10 ** 9 }}"})
    theirs.chat_template = None
    with pytest.raises(InputError, match="has no chat template"):
        render_for_transformers(theirs, messages, None, {})


def test_a_template_may_change_its_own_lists() -> None:
    """As the templates of Kimi K2 do; transformers refuses them."""
    template = (
        "{% set ns = namespace(ids=[]) %}{% for i in range(3) %}{% set _ = ns.ids.append('f' ~ i) %}{% endfor %}"
        "{{ ns.ids.pop(0) }} {{ ns.ids | join(',') }} {{ ns.ids.pop() }}"
    )
    assert render_chat(template, MESSAGES) == "f0 f1,f2 f2"
    for refused in (
        "{{ messages.append(1) }}",
        "{% set a = [] %}{{ a.append([]) }}",
        "{{ [1].clear() }}",
    ):
        with pytest.raises(InputError):
            render_chat(refused, MESSAGES)
