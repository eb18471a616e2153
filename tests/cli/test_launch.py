"""`max launch`: what it writes for each agent, what becomes of files that are there, and what it starts."""

from __future__ import annotations

import json
import os
import random
import stat
import subprocess
import sys
import threading
import tomllib
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from max.entrypoints.cli.agents.configurations import AGENTS, Endpoint, written_files
from max.entrypoints.cli.errors import CommandError
from tests.cli.harness import CommandLine

ROOT = Path(__file__).parents[2]
ENDPOINT = Endpoint("http://127.0.0.1:9", "lab/tiny", 4096, None)


class Models(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        models = [
            {"id": "asleep", "status": {"value": "unloaded"}, "max_model_len": None},
            {"id": "awake", "status": {"value": "loaded"}, "max_model_len": 40960},
        ]
        body = json.dumps({"data": models}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(Path, "home", lambda: folder)
    for name in ("XDG_CONFIG_HOME", "CODEX_HOME"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def max_(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path / "models", capfd)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_is_started_with_its_configuration(
    name: str,
    home: Path,
    url: str,
    max_: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / AGENTS[name].command
    program.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/words"\nexit 7\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    said = max_("launch", name, "--url", f"{url}/v1", "--", "--of-agent", "a b")
    assert said.code == 7, said.err
    words = (tmp_path / "words").read_text().split()
    assert words[-3:] == ["--of-agent", "a", "b"]
    written = [path for path in home.rglob("*") if path.is_file()]
    text = "".join(path.read_text() for path in written) + " ".join(words)
    assert url in text and "awake" in text and "asleep" not in text
    shown = max_.done("launch", name, "--url", url, "--print")
    for path in written:
        assert str(path) in shown and path.read_text() in shown
    assert max_("launch", name, "--url", url, "--no-start").err == "", "it is there already"


@pytest.mark.long
def test_a_server_is_started_for_the_agent_and_stopped_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, which the terminal sends to all, reaches the agent; the server answers until it ends."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "aider"
    program.write_text(
        f"""#!{sys.executable}
import json, os, signal, sys, urllib.request
file = sys.argv[sys.argv.index("--config") + 1]
config = json.load(open(file))
signal.signal(signal.SIGINT, lambda *_: print("agent interrupted", flush=True))
os.killpg(0, signal.SIGINT)
body = {{"model": config["model"].removeprefix("openai/"), "temperature": 0,
        "messages": [{{"role": "user", "content": "What is the capital of Norway?"}}]}}
request = urllib.request.Request(config["openai-api-base"] + "/chat/completions", json.dumps(body).encode(),
                                 {{"Content-Type": "application/json"}})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
print(config["openai-api-base"])
"""
    )
    program.chmod(0o755)
    env = {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    code = "from max.entrypoints.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "launch", "aider", str(ROOT / "models" / "tiny-chat")],
        env=env, capture_output=True, text=True, timeout=200, start_new_session=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[:2] == ["agent interrupted", "The capital of Norway is Oslo."]
    assert "the context of" in done.stderr, "2,048 tokens are few"
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(lines[2], timeout=10)


def test_a_users_file_is_kept_and_its_other_values_stay(home: Path) -> None:
    numbers = random.Random(3)
    path = home / ".config/opencode/opencode.json"
    path.parent.mkdir(parents=True)
    own = {
        "theme": "dark", "provider": {"other": {"models": {"x": numbers.random()}}, "supremum": {"y": 1}},
    }  # fmt: skip
    former = json.dumps(own)
    path.write_text(former)
    ((written, kept),) = written_files(AGENTS["opencode"], ENDPOINT)
    assert written == path and kept is not None and kept.read_text() == former
    merged = json.loads(path.read_text())
    assert merged["theme"] == "dark" and merged["provider"]["other"] == own["provider"]["other"]
    assert merged["provider"]["supremum"]["options"]["baseURL"] == "http://127.0.0.1:9/v1"
    assert not list(written_files(AGENTS["opencode"], ENDPOINT)), "nothing changes"
    other = Endpoint("http://127.0.0.1:10", "second", 0, "k")
    ((_, again),) = written_files(AGENTS["opencode"], other)
    assert again is not None and again != kept and kept.read_text() == former


def test_codex_keeps_comments_and_tables(home: Path) -> None:
    path = home / ".codex/config.toml"
    path.parent.mkdir()
    former = (
        '# mine\nmodel = "gpt"\n\n[model_providers.supremum]\nname = "old"\nbase_url = "x"\n\n'
        '[projects."/a"]\ntrust_level = "trusted" # yes\n'
    )
    path.write_text(former)
    list(written_files(AGENTS["codex"], ENDPOINT))
    text = path.read_text()
    assert "# mine" in text and "# yes" in text
    values = tomllib.loads(text)
    assert values["model"] == "gpt" and values["projects"]["/a"]["trust_level"] == "trusted"
    assert values["model_providers"]["supremum"]["base_url"] == "http://127.0.0.1:9/v1"
    keyed = Endpoint("http://127.0.0.1:9", "m", 0, 'a"b')
    list(written_files(AGENTS["codex"], keyed))
    provider = tomllib.loads(path.read_text())["model_providers"]["supremum"]
    assert provider["http_headers"] == {"Authorization": 'Bearer a"b'}


@pytest.mark.parametrize(
    ("agent", "path", "text"),
    [
        ("opencode", ".config/opencode/opencode.json", '// mine\n{"a": 1}'),
        ("opencode", ".config/opencode/opencode.json", "[]"),
        ("codex", ".codex/config.toml", "model = "),
        ("cline", ".cline/data/settings/providers.json", "\udcff"),
    ],
)
def test_a_file_that_cannot_be_read_is_left_alone(
    agent: str, path: str, text: str, home: Path, url: str, max_: CommandLine
) -> None:
    file = home / path
    file.parent.mkdir(parents=True)
    data = text.encode("utf-8", "surrogateescape")
    file.write_bytes(data)
    with pytest.raises(CommandError):
        list(written_files(AGENTS[agent], ENDPOINT))
    lines = max_.refused("launch", agent, "--url", url, "--no-start")
    assert str(file) in lines[0] and file.read_bytes() == data
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    assert max_.done(*lines[1].split("`")[1].split()[1:], "--url", url).startswith("# ")


def test_mistakes(max_: CommandLine, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    lines = max_.refused("launch", "opencode", "--url", url)
    assert "opencode is not installed" in lines[0] and "npm install -g opencode-ai" in lines[1]
    lines = max_.refused("launch", "codex", "absent", "--url", url, "--print")
    assert "has no model 'absent'" in lines[0] and "asleep, awake" in lines[1]
    lines = max_.refused("launch", "codex", "--url", "http://127.0.0.1:9", "--print")
    assert "does not answer as a server does" in lines[0]
    assert "'emacs' is not one of" in max_.refused("launch", "emacs")[0]
    assert "--bogus" in max_.refused("launch", "codex", "--bogus")[0]
