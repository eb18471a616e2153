"""`max benchmark --workload` and `max generate --draft-model`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from max.dtype import DType
from max.entrypoints.cli.benchmark import _WORKLOADS, benchmark
from max.entrypoints.cli.generate import generate
from max.entrypoints.load_test import bandwidth
from max.entrypoints.load_test.drafts import WORKLOADS, DraftRun, draft_table, prompts_of
from max.pipelines.structured.validation import grammar_problem

TINY = str(Path(__file__).parents[2] / "models" / "tiny-chat")


def test_prompts() -> None:
    assert _WORKLOADS == WORKLOADS
    for workload in WORKLOADS:
        prompts = prompts_of(workload, 5, seed=1)
        assert prompts == prompts_of(workload, 5, seed=1) != prompts_of(workload, 5, seed=2)
        for text, grammar in prompts:
            assert text and (grammar is not None) == (workload == "json")
            assert grammar is None or grammar_problem(grammar) is None


def test_the_table() -> None:
    run = DraftRun(60, 2.0, 0.5, 20, 50, 40, True)
    assert run.speedup == 4
    rows = dict(line.rsplit(maxsplit=1) for line in draft_table("edit", run).splitlines()[1:])
    assert rows == {
        "tokens": "60", "drafted tokens": "50", "accepted, %": "80.0", "tokens a step": "3.00",
        "tokens/s without drafts": "30.0", "tokens/s with drafts": "120.0", "times as fast": "4.00",
        "equal answers": "yes",
    }  # fmt: skip


def test_the_speed_of_formats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bandwidth, "FORMATS", {"Q4_K": DType.uint8, "bfloat16": DType.bfloat16})
    monkeypatch.setattr(bandwidth, "RUNS", 2)
    monkeypatch.setattr(bandwidth, "WEIGHT_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidth, "LEAST_READ", 1 << 20)
    monkeypatch.setattr(bandwidth, "last_level_cache", lambda: 0)
    file = tmp_path / "formats.json"
    result = CliRunner().invoke(benchmark, ["--workload", "formats", "--json", str(file)])
    assert result.exit_code == 0, result.output
    header, *lines = result.output.splitlines()
    assert header.split() == ["format", "GB/s", "packed", "of", "reads"]
    assert [line.split()[0] for line in lines] == ["Q4_K", "bfloat16"]
    speeds = {each["format"]: each for each in json.loads(file.read_text())}
    # 6-bit multipliers are packed as bytes: 148 bytes of 144; small weights are not coded
    assert speeds["Q4_K"]["packed"] / speeds["Q4_K"]["stored"] == pytest.approx(148 / 144)
    assert speeds["bfloat16"]["packed"] == speeds["bfloat16"]["stored"]
    assert all(each["share"] > 0 for each in speeds.values())


@pytest.mark.parametrize("workload", ["edit", "json"])
def test_a_workload_with_and_without_drafts(workload: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    arguments = [
        "--model",
        TINY,
        "--workload",
        workload,
        "--num-prompts",
        "1",
        "--output-len",
        "40",
    ]
    arguments += ["--quantization-encoding", "float32", "--json", str(file)]
    result = CliRunner().invoke(benchmark, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and result.output.startswith(f"{workload}\ntokens")
    numbers = json.loads(file.read_text())
    assert numbers["equal"] and numbers["tokens"] == 40 and numbers["workload"] == workload
    assert 0 <= numbers["accepted"] <= numbers["drafted"]
    assert numbers["plain_s"] > 0 < numbers["drafted_s"]


def test_a_workload_needs_a_model() -> None:
    result = CliRunner().invoke(benchmark, ["--workload", "chat"])
    assert result.exit_code and "no model is given" in str(result.exception)


def test_a_draft_model_changes_no_text() -> None:
    texts = []
    for more in ([], ["--draft-model", TINY, "--draft-quantize", "q8_0"]):
        arguments = ["--model", TINY, "--prompt", "one two three", "--top-k", "1", "--no-stats"]
        arguments += ["--max-new-tokens", "30", "--quantization-encoding", "float32", *more]
        result = CliRunner().invoke(generate, arguments, catch_exceptions=False)
        assert result.exit_code == 0
        texts.append(result.stdout)
    assert texts[0] == texts[1] != "\n"
