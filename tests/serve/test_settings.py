"""Settings of `max serve` from the file `.env`, and the APIs that it has."""

from __future__ import annotations

import re
import time
from pathlib import Path

import click
import httpx
import pytest
from click.testing import CliRunner

from max.entrypoints.cli import cli
from max.entrypoints.cli.errors import CommandError
from max.entrypoints.cli.options.env_file import read_env_file

from .conftest import TINY


@pytest.fixture
def variables(monkeypatch) -> dict[str, str]:
    taken: dict[str, str] = {}
    monkeypatch.setattr("max.entrypoints.cli.options.env_file.set_missing_variables", taken.update)
    return taken


def test_the_lines_of_a_file(tmp_path: Path, variables) -> None:
    path = tmp_path / ".env"
    path.write_text(
        "# a comment\n\nMAX_SERVE_PORT=81 # another\nexport MAX_SERVE_HOST = 'a # b'\n"
        'MAX_SERVE_LOG_PREFIX="x\\n\\"y\\" # z"  # a third\nHF_TOKEN=a#b\nMAX_SERVE_UI=\n'
        "PATH=/nowhere\nLD_PRELOAD=x.so\nno assignment\nOTEL_SERVICE_NAME='' \nMODULAR_HOME=a=b\n"
        "MAX_SERVE_CORS_ORIGINS=#none\n1MAX_A=1\n"
    )
    read_env_file(path)
    assert variables == {
        "MAX_SERVE_PORT": "81",
        "MAX_SERVE_HOST": "a # b",
        "MAX_SERVE_LOG_PREFIX": 'x\n"y" # z',
        "HF_TOKEN": "a#b",
        "MAX_SERVE_UI": "",
        "OTEL_SERVICE_NAME": "",
        "MODULAR_HOME": "a=b",
        "MAX_SERVE_CORS_ORIGINS": "",
    }


@pytest.mark.parametrize("value", ['"open', "'open", "'a' b", '"a\\"'])
def test_a_quote_that_does_not_end(tmp_path: Path, variables, value: str) -> None:
    path = tmp_path / ".env"
    path.write_text(f"A=1\nMAX_SERVE_HOST={value}\n")
    with pytest.raises(CommandError, match=r"\.env:2.*quote"):
        read_env_file(path)
    path.write_bytes(b"MAX_SERVE_HOST=\xff")
    with pytest.raises(CommandError, match="cannot read"):
        read_env_file(path)
    path.write_bytes(b"MAX_SERVE_HOST=a\0b")
    with pytest.raises(CommandError, match=r"\.env:1.*MAX_SERVE_HOST has a zero byte"):
        read_env_file(path)
    read_env_file(tmp_path)  # a folder is no file
    read_env_file(tmp_path / "none")


def test_options_come_before_variables_and_these_before_the_file(
    start_server, tmp_path, monkeypatch
) -> None:
    """The file comes before one of ``--config-file``."""
    (tmp_path / ".env").write_text(
        "MAX_SERVE_PORT=1\nMAX_SERVE_MAX_REQUEST_BYTES=100\nMAX_SERVE_API_KEY=of-file\n"
        'MAX_SERVE_API_TYPES=["openai", "sagemaker"]\n'
    )
    (tmp_path / "serve.yaml").write_text(f"model: {TINY}\napi-key: of-yaml\nmax-length: 96\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAX_SERVE_MAX_REQUEST_BYTES", "200")
    server = start_server("--config-file", "serve.yaml").wait_ready()  # with --port 0
    with httpx.Client(base_url=server.url, timeout=300) as client:
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = "Bearer of-file"
        assert client.get("/v1/models").status_code == 200
        assert client.post("/tokenize", json={"prompt": "a" * 250}).status_code == 413
        assert client.post("/tokenize", json={"prompt": "a" * 120}).status_code == 200
        # the APIs that the file names, and no others
        for path in ("/v1/messages", "/v1/responses", "/api/chat"):
            assert client.post(path, json={}).status_code == 404
        assert client.get("/api/tags").status_code == 404
        assert client.get("/").status_code == client.get("/health").status_code == 200
        routes = client.get("/openapi.json").json()["paths"]
        assert "/v1/chat/completions" in routes and "/v1/responses" not in routes
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
        direct = client.post("/v1/chat/completions", json=body).json()
        answer = client.post("/invocations", json=body).json()
        # the second request finds the prefix of the first
        assert direct["usage"].pop("prompt_tokens_details") == {"cached_tokens": 0}
        assert answer["usage"].pop("prompt_tokens_details")["cached_tokens"] > 0
        assert answer["choices"] == direct["choices"] and answer["usage"] == direct["usage"]
        body = {"prompt": "a b", "max_tokens": 2, "temperature": 0, "stream": True}
        assert client.post("/invocations", json=body).text.endswith("data: [DONE]\n\n")
        wrong = client.post("/invocations", json={"prompt": 3})
        assert wrong.status_code == 400 and "prompt" in wrong.json()["error"]["param"]
        wrong = client.post("/invocations", json={"text": "a"})
        assert wrong.status_code == 400 and "messages, prompt, input" in wrong.text
        wrong = client.post("/invocations", json={"input": "a"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "model"
    assert server.stop() == 0


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ('["openai", "kserve"]', "no API 'kserve'; there are anthropic, llama.cpp, ollama, openai"),
        ('["openai"', "no JSON array"),
        ("[]", "no list"),
        ('"openai"', "no list"),
        ("soap", "no API 'soap'"),
    ],
)
def test_apis_that_there_are_not(monkeypatch, value: str, says: str) -> None:
    monkeypatch.setenv("MAX_SERVE_API_TYPES", value)
    result = CliRunner().invoke(cli, ["serve"], standalone_mode=False)
    assert isinstance(result.exception, click.UsageError)
    assert says in result.exception.format_message()


def metrics(client: httpx.Client) -> str:
    return client.get("/metrics").text


def test_prefixes_outlive_the_server(start_server, tmp_path: Path) -> None:
    """A restarted server takes the first tokens of a prompt from the folder."""
    hit_rates: list[float] = []
    texts: list[str] = []
    for _ in range(2):
        server = start_server(
            "--model", str(TINY), "--max-length", "256", "--kv-cache-folder", str(tmp_path / "kept"),
            "--kv-cache-page-size", "16", "--quantization-encoding", "float32", "--pretty-print-config",
            "--api-key", "secret-key",
        ).wait_ready()  # fmt: skip
        assert '"max_length": 256' in server.output and "secret-key" not in server.output
        headers = {"Authorization": "Bearer secret-key"}
        with httpx.Client(base_url=server.url, timeout=300, headers=headers) as client:
            body = {"prompt": [9] * 99, "max_tokens": 8, "temperature": 0}
            texts.append(client.post("/v1/completions", json=body).json()["choices"][0]["text"])
            deadline = time.monotonic() + 300
            # the worker reports its counts now and then
            while not re.search(
                r'maxserve_step_time_milliseconds_count{kind="prompt"} [1-9]',
                text := metrics(client),
            ):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            found = re.search(r"^maxserve_cache_hit_rate (\S+)$", text, re.MULTILINE)
            hit_rates.append(float(found[1]) if found else -1.0)
        assert server.stop() == 0
    assert texts[0] == texts[1]
    assert hit_rates == [0, pytest.approx(96 / 99)]


def test_the_help_of_a_word() -> None:
    whole = CliRunner().invoke(cli, ["serve", "--help"]).output
    for word in ("prefix", "--KV_cache", "Several models"):
        done = CliRunner().invoke(cli, ["serve", f"--help={word}"])
        assert done.exit_code == 0
        options = set(re.findall(r"^  (--[\w-]+)", done.output, re.MULTILINE))
        assert options and len(done.output) < len(whole) / 3
        assert options < set(re.findall(r"^  (--[\w-]+)", whole, re.MULTILINE))
    assert options == {"--models-dir", "--max-loaded-models", "--idle-timeout"}
    done = CliRunner().invoke(cli, ["serve", "--help=zebra"])
    assert done.exit_code == 2 and "'zebra'" in done.output


def test_a_host_that_is_not_this_machine_is_an_error_of_the_host() -> None:
    """192.0.2.1 is reserved for documentation: no machine has it."""
    words = ["serve", "--model", str(TINY), "--host", "192.0.2.1"]
    error = CliRunner().invoke(cli, words, standalone_mode=False).exception
    assert isinstance(error, CommandError)
    assert "cannot listen on 192.0.2.1:8000" in str(error) and "another --host" in error.remedy
