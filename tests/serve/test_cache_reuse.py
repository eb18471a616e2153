"""Recorded sessions of agents do not read their prompts twice; each API says what was cached, and a metric why not."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.serve.agent_sessions import APIS, TEMPLATE, replay
from tests.serve.conftest import TINY


@pytest.fixture(scope="module")
def agents(start_server, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    server = start_server(
        "--model", str(TINY), "--served-model-name", "tiny", "--max-length", "2048", "--max-batch-size", "4",
        "--quantization-encoding", "float32", "--chat-template", str(template),
    ).wait_ready()  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=300) as client:
        yield client


@pytest.mark.parametrize("path", APIS)
def test_sessions_are_read_once(agents, path: str) -> None:
    found = replay(agents, path, "tiny", range(2))
    assert found.requests > 20 and found.reusable > 0.5 * found.prompts
    assert found.share >= 0.98 and found.read <= 1.02, found


def test_a_metric_says_why_a_prefix_missed(agents) -> None:
    def misses() -> dict[str, float]:
        text = agents.get("/metrics").text
        found = re.findall(r'maxserve_prefix_misses_total\{reason="(\w+)"\} ([0-9.]+)', text)
        return {reason: float(count) for reason, count in found}

    def ask(text: str, **more: object) -> None:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **more}
        assert agents.post("/v1/chat/completions", json=body).status_code == 200

    agents.post("/reset_prefix_cache")
    before = misses()
    ask("one two three four five six seven eight")
    ask("one two three four five six other words")
    ask("one two three four five six other words", cache_salt="mine")
    ask("one two three four five six other words", prompt_logprobs=0)
    ask("one two three four five six other words")
    after = misses()
    changed = {key: value - before.get(key, 0) for key, value in after.items()}
    assert {key: value for key, value in changed.items() if value} == {
        "never_seen": 1, "changed": 1, "other_salt": 1, "not_shared": 1,
    }  # fmt: skip
