"""`max chat` and `max benchmark` against a server, and the commands of a conversation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from max.entrypoints.cli.chat import Session
from max.entrypoints.cli.chat import _messages as chat_messages
from max.entrypoints.load_test.measure import Sample, Workload, summary
from max.interfaces import SamplingParamsInput
from max.pipelines.core.exceptions import InputError
from tests.serve.conftest import RunningServer


def max_(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    code = "from max.entrypoints.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], input=text, capture_output=True, text=True, timeout=300
    )  # fmt: skip


class Echo:
    """Answers with the roles and texts of the request."""

    def stream(self, messages, sampling):
        if messages[-1]["content"] == "bad":
            raise InputError("no", "Say something else.")
        yield f"{sampling.temperature}:"
        yield "|".join(f"{m['role'][0]}{m['content']}" for m in messages)


def test_the_commands_of_a_conversation() -> None:
    said: list[str] = []
    session = Session(Echo(), SamplingParamsInput(), write=said.append)

    def take(text: str) -> str:
        said.clear()
        assert session.take(text)
        return "".join(said)

    assert take("one") == "None:uone\n"
    assert take("/set temperature 0.5") == "" and take("/system Be kind.") == ""
    assert take("two") == "0.5:sBe kind.|uone|aNone:uone|utwo\n"
    assert take("/undo") == "" and take("/again") == "0.5:sBe kind.|uone\n"
    assert take("bad") == "max: error: no\n"
    assert take("three").endswith("|uthree\n") and "ubad" not in "".join(said)
    assert take("/new") == take("/system") == "" and session.messages == []
    assert take("/again") == "" and take("  ") == ""
    assert take("/set temperature") == "" and take("x") == "None:ux\n"
    assert "must be a number" in take("/set seed abc") and "cannot be set" in take("/set color 1")
    assert take("/hlep") == "/hlep is no command; did you mean /help? /help lists them\n"
    assert "/nothing is no command" in take("/nothing") and "/again" in take("/help")
    assert take("/stats") == "" and "first text after" in take("y")
    assert not session.take("/quit")


def test_a_terminal_is_told_how_to_go_on(monkeypatch, capsys) -> None:
    said = iter(["one", '"""', "two", "three", '"""'])

    def read(prompt: str) -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", read)
    assert list(chat_messages()) == ["one", "two\nthree"]
    assert "/help" in capsys.readouterr().err


def test_chat_with_a_server(server: RunningServer) -> None:
    question = "What is the capital of Norway?"
    done = max_("chat", "--url", server.url, "--temperature", "0", text=f"{question}\n/quit\nx\n")
    assert (done.returncode, done.stdout) == (0, "The capital of Norway is Oslo.\n"), done.stderr
    wrong = max_("chat", "--url", server.url, "--model", "giant", text="x\n")
    assert "'giant' does not exist" in wrong.stdout
    assert max_("chat", "--url", "http://127.0.0.1:9", text="x\n").returncode == 2
    assert "is the server's" in max_("chat", "--url", server.url, "--max-length", "5").stderr


def test_benchmark(server: RunningServer, tmp_path) -> None:
    numbers, picture = tmp_path / "runs.json", tmp_path / "runs.svg"
    done = max_(
        "benchmark", "--url", server.url, "--num-prompts", "4", "--input-len", "60", "--output-len", "5",
        "--request-rate", "inf,50", "--max-concurrency", "2", "--json", str(numbers), "--plot", str(picture),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads(numbers.read_text())
    assert [run["request_rate"] for run in runs] == ["inf", 50.0]
    for run in runs:
        assert (run["completed"], run["failed"], run["total_output_tokens"]) == (4, 0, 20)
        assert 40 * 4 < run["total_input_tokens"] < 90 * 4
        assert 0 < run["ttft_ms"]["median"] <= run["latency_ms"]["median"]
    assert done.stdout.count("time to first token, ms") == 2
    ElementTree.fromstring(picture.read_text())
    long = max_("benchmark", "--url", server.url, "--num-prompts", "1", "--input-len", "5000")
    assert long.returncode == 2 and "failed 1 times: 400" in long.stdout


def test_a_benchmark_as_it_is_written_for_max(server: RunningServer, tmp_path) -> None:
    file = tmp_path / "benchmark.yaml"
    file.write_text("num-prompts: 2\noutput_lengths: 3\nrequest-rate: 50\n")
    done = max_(
        "benchmark", "--backend", "modular", "--base-url", server.url, "--endpoint", "/v1/completions", "--model",
        "tiny",
        "--dataset-name", "sonnet", "--sonnet-input-len", "30", "--sonnet-prefix-len", "10", "--config-file", str(file),
    )  # fmt: skip
    assert done.returncode == 0 and "not of sonnets" in done.stderr, done.stdout + done.stderr
    assert re.search(r"prompts and generated +[2-9][0-9], 6\n", done.stdout)
    absent = max_("benchmark", "--dataset-path", "x.json")
    assert absent.returncode == 2 and "of random words" in absent.stderr


def test_numbers_of_a_run() -> None:
    good = [Sample(0.0, 0.1 * i, 1.0, [0.1, 0.2], 10, 5) for i in range(1, 5)]
    run = summary([*good, Sample(0.0, error="x")], float("inf"))
    assert (run["completed"], run["failed"], run["errors"]) == (4, 1, {"x": 1})
    assert run["output_throughput"] == 20 and run["total_token_throughput"] == 60
    assert run["ttft_ms"]["median"] == pytest.approx(250)
    assert run["itl_ms"]["p99"] == 200 and run["latency_ms"]["mean"] == 1000


def test_prompts_share_a_prefix_and_are_repeatable() -> None:
    workload = Workload("m", False, 3, 20, 8, 4)
    prompts = [body["prompt"].split() for body in workload.bodies()]
    assert prompts == [body["prompt"].split() for body in workload.bodies()]
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1
    assert len({tuple(prompt[8:]) for prompt in prompts}) == 3 and len(prompts[0]) == 20
