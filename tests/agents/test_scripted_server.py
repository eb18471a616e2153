"""The scripted model of the contract tests: the number of tool results in a prompt chooses its answer."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from max.interfaces import GenerationStatus
from max.pipelines.generation.process.commands import GenerationRequest
from max.serve.worker import replica
from tests.agents.scripted_server import PLAIN, RESULT, TINY, TOOLS, ScriptedWorker


def test_it_has_what_a_server_asks_of_a_worker(tmp_path: Path) -> None:
    """The tests with agents run rarely, and the channel of workers changes."""
    source = inspect.getsource(replica)
    asked = set(re.findall(r"worker\.channel\.(\w+)", source))
    worker = ScriptedWorker([], tmp_path, None)
    assert "is_full" in asked and all(hasattr(worker.channel, name) for name in asked)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("a title, please", PLAIN),
        (TOOLS + "…", '<tool_call>\n{"name": "edit", "arguments": {}}\n</tool_call>'),
        (TOOLS + RESULT, "Done."),
        (TOOLS + RESULT * 3, "Done."),
    ],
)
def test_an_answer_for_each_step(tmp_path: Path, prompt: str, answer: str) -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    worker = ScriptedWorker([{"name": "edit", "arguments": {}}, "Done."], tmp_path, tokenizer)
    worker.receive()  # it is ready
    tokens = tuple(tokenizer.encode(prompt, add_special_tokens=False).ids)
    worker.send(GenerationRequest("a", tokens, 10_000, eos_token_ids=(2,)))
    said: list[int] = []
    while (event := worker.receive()).status is GenerationStatus.ACTIVE:
        said += event.tokens
    assert tokenizer.decode(said, skip_special_tokens=False) == answer
    assert len(list(tmp_path.iterdir())) == 1
