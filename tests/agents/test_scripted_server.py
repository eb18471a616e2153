"""The scripted model of the contract tests: the number of tool results in a prompt chooses its answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from max.interfaces import GenerationStatus
from max.pipelines.generation.process.commands import GenerationRequest
from tests.agents.scripted_server import PLAIN, RESULT, TINY, TOOLS, ScriptedWorker


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
