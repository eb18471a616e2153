"""Real coding agents against a server of ours with a scripted model: each finishes a small edit of a file.

They are installed from npm and PyPI into a folder of the tests, or taken from the one that AGENTS_FOLDER names; without
these the tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BEFORE, AFTER = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
WHOLE = f"calc.py\n```\n{AFTER}```"
"""A file as aider's models write it."""
PROMPT, DONE = "Mend add in calc.py", "The sum is right now."
SED = "sed -i 's/a - b/a + b/' calc.py"

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Case:
    """An agent, its package, what the model answers, and how the agent is asked."""

    name: str
    package: str
    script: list[dict[str, Any]]
    arguments: list[str]


def call(tool: str, **arguments: object) -> dict[str, Any]:
    return {"name": tool, "arguments": arguments}


CASES = [
    Case(
        "opencode", "opencode-ai",
        [
            call("read", filePath="{file}"),
            call("edit", filePath="{file}", oldString="a - b", newString="a + b"),
        ],
        ["run", PROMPT],
    ),
    Case(
        "codex", "@openai/codex", [call("exec_command", cmd=SED)],
        ["exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", PROMPT],
    ),
    Case(
        "claude", "@anthropic-ai/claude-code",
        [
            call("Read", file_path="{file}"),
            call("Edit", file_path="{file}", old_string="a - b", new_string="a + b"),
        ],
        ["-p", PROMPT, "--permission-mode", "acceptEdits"],
    ),
    Case(
        "cline", "cline",
        [call("editor", path="{file}", old_text="a - b", new_text="a + b")],
        [PROMPT],
    ),
    Case(
        "aider", "aider-chat", [],
        ["--yes-always", "--no-check-update", "--no-show-model-warnings", "--no-analytics", "--no-git",
         "--message", PROMPT, "calc.py"],
    ),
]  # fmt: skip


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = os.environ.get("AGENTS_FOLDER")
    return Path(folder) if folder else tmp_path_factory.mktemp("npm")


def program_of(case: Case, packages: Path) -> Path:
    """The agent's program, installed first if it is not there."""
    folder = packages / case.package.rpartition("/")[2]
    if case.name == "aider":
        return python_program(case, folder)
    program = folder / "node_modules" / ".bin" / case.name
    if not program.exists():
        if shutil.which("npm") is None:
            pytest.skip("there is no npm")
        words = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", case.package]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.skip(f"npm does not install {case.package}: {done.stderr[-200:]}")
    return program


def python_program(case: Case, folder: Path) -> Path:
    """The same of an agent from PyPI, in an environment of its own."""
    program = folder / "bin" / case.name
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=600)
        words = [str(folder / "bin" / "pip"), "install", "-q", case.package]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.skip(f"pip does not install {case.package}: {done.stderr[-200:]}")
    return program


@dataclass
class Scripted:
    """A running server, its log, and the folder of the prompts that its model got."""

    url: str
    log: Path
    prompts: Path


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "calc.py").write_text(BEFORE)
    return folder


@pytest.fixture
def scripted(request: pytest.FixtureRequest, tmp_path: Path, work: Path) -> Iterator[Scripted]:
    case: Case = request.param
    done = DONE if case.script else f"{DONE}\n\n{WHOLE}"
    text = json.dumps([*case.script, done]).replace("{file}", str(work / "calc.py"))
    script, prompts, log = tmp_path / "script.json", tmp_path / "prompts", tmp_path / "log"
    script.write_text(text)
    prompts.mkdir()
    with open(log, "w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.agents.scripted_server", str(script), str(prompts)],
            cwd=ROOT, stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"},
        )  # fmt: skip
    try:
        url = None
        for _ in range(2400):
            url = re.search(r"Server ready on (\S+)", log.read_text())
            if url or process.poll() is not None:
                break
            time.sleep(0.1)
        assert url, log.read_text()
        yield Scripted(url[1], log, prompts)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.parametrize(
    ("case", "scripted"),
    [(c, c) for c in CASES],
    indirect=["scripted"],
    ids=[c.name for c in CASES],
)
def test_an_agent_edits_a_file(
    case: Case, scripted: Scripted, packages: Path, tmp_path: Path, work: Path
) -> None:
    program = program_of(case, packages)
    subprocess.run(["git", "init", "-q", "."], cwd=work, check=False)
    home = tmp_path / "home"
    home.mkdir()
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "ANTHROPIC_", "OPENAI_"))
    }
    env = {
        **kept, "HOME": str(home), "PWD": str(work), "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"), "OPENCODE_DISABLE_AUTOUPDATE": "1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    launch = [sys.executable, "-c", "from max.entrypoints.cli import main; main()", "launch"]
    done = subprocess.run(
        [*launch, case.name, "--url", scripted.url, "--", *case.arguments],
        cwd=work, env=env, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert (work / "calc.py").read_text() == AFTER, said + scripted.log.read_text()
    assert done.returncode == 0 and DONE in said
    statuses = re.findall(r"(POST|GET) (\S+) (\d+) ", scripted.log.read_text())
    refused = [each for each in statuses if each[2] >= "400" and each[0] == "POST"]
    assert not refused, scripted.log.read_text()
    if case.script:
        check_prefixes(scripted.prompts)


def check_prefixes(prompts: Path) -> None:
    """What the model has read is read once: a turn's prompt begins with the one before it."""
    texts = [path.read_text() for path in sorted(prompts.iterdir())]
    turns = [text for text in texts if "<s>tools: " in text]
    assert len(turns) >= 2
    for before, after in zip(turns, turns[1:], strict=False):
        assert after.startswith(before), os.path.commonprefix([before, after])[-200:]
