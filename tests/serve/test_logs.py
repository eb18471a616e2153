"""The log of a server: its level, its file, its form, by the variables that scripts set."""

from __future__ import annotations

import json

import httpx
import pytest
from click.testing import CliRunner

from max.entrypoints.cli import cli
from max.entrypoints.cli.errors import CommandError

from .conftest import TINY


def test_lines_of_json_with_a_prefix_and_a_file(start_server, tmp_path, monkeypatch) -> None:
    path = tmp_path / "serve.log"
    monkeypatch.setenv("MAX_SERVE_LOGS_CONSOLE_LEVEL", "INFO")
    monkeypatch.setenv("MAX_SERVE_LOGS_FILE_PATH", str(path))
    monkeypatch.setenv("MAX_SERVE_LOG_PREFIX", "50% of it")
    monkeypatch.setenv("MODULAR_STRUCTURED_LOGGING", "1")
    monkeypatch.setenv("MAX_SERVE_SCHEDULER_STATS_LOG_INTERVAL_S", "0.05")
    server = start_server("--model", str(TINY), "--max-length", "256", "--log-requests")
    server.wait_ready()
    body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True}
    headers = {"X-Request-Id": "my-id"}
    with httpx.Client(base_url=server.url, timeout=300, headers=headers) as client:
        for _ in range(3):
            assert client.post("/v1/completions", json=body).status_code == 200
    assert server.stop() == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line["prefix"] == "50% of it" and line["level"] == "info" for line in lines)
    (request, *_) = [line for line in lines if line["logger"] == "max.serve.requests"]
    assert request["request_id"] == "my-id" and "POST /v1/completions 200" in request["message"]
    loads = [line["message"] for line in lines if " running, " in line["message"]]
    assert any(" 1 running, 0 waiting" in line for line in loads)
    # the console has the same lines
    console = [json.loads(line) for line in server.lines if line.startswith("{")]
    assert sorted(map(str, console)) == sorted(map(str, lines))


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("MAX_SERVE_LOGS_CONSOLE_LEVEL", "loud", "'debug', 'info', 'warning'"),
        ("MAX_SERVE_LOGS_FILE_PATH", "/no/such/folder/log", "log"),
        ("MODULAR_STRUCTURED_LOGGING", "perhaps", "structured"),
    ],
)
def test_values_that_do_not_fit(monkeypatch, variable: str, value: str, says: str) -> None:
    monkeypatch.setenv(variable, value)
    result = CliRunner().invoke(cli, ["serve", "--model", str(TINY), "--port", "0"])
    assert result.exit_code != 0
    error = result.exception
    assert says in (
        f"{error.problem} {error.remedy}" if isinstance(error, CommandError) else result.output
    )
