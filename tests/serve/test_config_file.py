"""Options of `max serve` from a file."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from max.entrypoints.cli import cli
from max.entrypoints.cli.errors import CommandError

from .conftest import TINY


def test_the_command_line_and_variables_come_before_the_file(
    start_server, tmp_path, monkeypatch
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        f"model: {TINY}\n--served-model-name: of-file\nmax_length: 96\nport: 1\n"
        "api-key: [one, two]\nui: false\nmax-queue: 3\nmax-request-bytes: 300\n"
    )
    monkeypatch.setenv("MAX_SERVE_MAX_REQUEST_BYTES", "200")
    server = start_server("--config-file", str(path)).wait_ready()  # its --port 0 comes first
    with httpx.Client(base_url=server.url, timeout=300) as client:
        assert client.get("/").status_code == 404
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = "Bearer two"
        assert client.get("/v1/models").json()["data"][0]["id"] == "of-file"
        assert client.post("/tokenize", json={"prompt": "a"}).json()["max_model_len"] == 96
        assert client.post("/tokenize", json={"prompt": "a" * 250}).status_code == 413
    assert server.stop() == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("modle: a", "Did you mean model?"),
        ("port: {a: 1}", "mapping"),
        ("port: [1, 2]", "list"),
        ("- a", "no mapping"),
        ("a: [", "YAML"),
        ("config-file: other.yaml", "no option"),
        (json.dumps({"port": "many"}), "port"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    result = CliRunner().invoke(cli, ["serve", "--config-file", str(path)])
    error = result.exception
    lines = f"{error.problem} {error.remedy}" if isinstance(error, CommandError) else result.output
    assert result.exit_code != 0 and says in lines
