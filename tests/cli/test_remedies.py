"""What commands tell the user to type works: each command in a message is one, and remedies of errors are typed in."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from max.entrypoints.cli import COMMANDS, cli
from max.entrypoints.cli.agents import launch
from max.pipelines.store.local import ModelStore
from max.pipelines.store.pull import pull
from max.pipelines.store.sources import open_source
from tests.cli.harness import CommandLine
from tests.cli.hub_server import HubServer

SRC = Path(__file__).parents[2] / "src" / "max"
TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
IN_TICKS = re.compile(r"`(max [^`]+)`")


def texts_of(path: Path, messages: bool = False) -> Iterator[str]:
    """The texts of a file, with N for what is filled in; with ``messages`` no docstrings."""
    tree = ast.parse(path.read_text())
    # docstrings, and the parts of texts that are filled in
    skipped = (
        {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)} if messages else set()
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= set(node.values)
        if node in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.Constant) else "N" for v in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def commands_in_messages() -> list[tuple[str, str]]:
    found = {
        (" ".join(command.split()), path.relative_to(SRC).as_posix())
        for folder in ("entrypoints", "pipelines", "serve", "engine")
        for path in sorted((SRC / folder).rglob("*.py"))
        for text in texts_of(path)
        for command in IN_TICKS.findall(text)
    }
    return sorted(found)


def test_each_command_in_a_message_is_one() -> None:
    """Names of commands, subcommands and options; what stands for a value is not looked at."""
    mentioned = commands_in_messages()
    assert len(mentioned) > 40
    wrong: list[tuple[str, str]] = []
    for text, where in mentioned:
        words = text.split()[1:]
        name = words[0]
        if name.startswith("-"):
            continue
        if name not in COMMANDS:
            if name != "N" and name != "<command>":
                wrong.append((text, where))
            continue
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        if isinstance(command, click.Group) and len(words) > 1 and not words[1].startswith("-"):
            command = command.commands.get(words[1])
            if command is None:
                wrong.append((text, where))
                continue
        known = {opt for p in command.params for opt in (*p.opts, *p.secondary_opts)}
        before = words[: words.index("--")] if "--" in words else words
        used = {word.partition("=")[0].rstrip("…,") for word in before if word.startswith("--")}
        if not used <= known | {"--help", "--"}:
            wrong.append((text, where))
    assert wrong == []


@pytest.fixture
def max_(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> CommandLine:
    """A machine with a model and its copy with settings, two folders of other models, and no agents."""
    pull(open_source(str(TINY)), ModelStore(tmp_path / "models", hub=False), "lab/tiny")
    for name, config in (("unknown", {"architectures": ["LlamoForCausalLM"]}), ("nameless", {})):
        shutil.copytree(TINY, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "Modelfile").write_text("FROM lab/tiny\nSYSTEM Be brief.\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = shutil.which
    monkeypatch.setattr(
        launch.shutil, "which", lambda name: None if name == "codex" else found(name)
    )
    max_ = CommandLine(tmp_path / "models", capfd)
    max_.done("create", "settings")
    return max_


ERRORS = [
    ["generate", "What is it?"],
    ["generate", "lab/tinyy", "x"],
    ["generate", "zzzzzz", "x"],
    ["generate", "lab/tiny"],
    ["generate", "lab/tiny", "x", "--modle", "x"],
    ["generate", "lab/tiny", "x", "-ngl", "9"],
    ["chat"],
    ["chat", "--url", "http://127.0.0.1:9"],
    ["chat", "--url", "localhost:8000"],
    ["generate", "lab/tiny", "--prompt"],
    ["warm-cache"],
    ["serve", "--tsk", "x"],
    ["serve", "lab/tinyy"],
    ["run", "lab/tinyy", "x"],
    ["show", "absent"],
    ["rm", "absent"],
    ["pull", "lab"],
    ["pull", "lab/tiny:Q9"],
    ["cache", "clear", "wieghts"],
    ["lab/tiny", "x"],
    ["genrate", "x"],
    ["launch", "codex", "--url", "http://127.0.0.1:9", "--print"],
    ["ps", "--url", "http://127.0.0.1:9"],
    ["perplexity", "lab/tiny"],
    ["run"],
    ["version"],
    ["stop"],
    ["benchmark", "--url", "http://127.0.0.1:9"],
    ["cluster", "drain"],
    ["launch", "codex"],
    ["launch", "codex", "lab/tiny"],
    ["launch", "codex", "--print"],
    ["pull", str(TINY), "--name", "lab/tiny"],
    ["run-batch"],
    ["run-batch", "a", "b", "c", "d"],
    ["generate", "unknown", "x"],
    ["generate", "nameless", "x"],
    ["generate", "settings", "x"],
    ["quantize", "lab/tiny"],
    ["encode", "lab/tiny"],
    ["warm-interpreter-cache"],
]
# what a user puts for the words of a remedy
VALUES = {
    "MODEL": "lab/tiny",
    "[PROMPT]": "hi",
    "PROMPT": "hi",
    "AGENT": "codex",
    "org/model": str(TINY),
    "[MODEL]": "lab/tiny",
}
LONG = {
    "serve": ["--help"], "chat": ["--help"], "warm-cache": ["--help"], "launch": ["--print"],
    "cluster": ["--help"], "run-batch": ["--help"],
}  # fmt: skip
"""Commands that do not end by themselves, or take long: that they are understood is enough."""


@pytest.mark.parametrize("words", ERRORS, ids=" ".join)
def test_the_remedy_of_an_error_is_typed_in(
    max_: CommandLine, words: list[str], tmp_path: Path
) -> None:
    lines = max_.refused(*words)
    remedy = lines[1]
    assert lines[0].startswith("max: error: ") and remedy
    if meant := re.search(r"Did you mean '?([^'? ]+)'?", remedy + lines[0]):
        right = meant[1]
        wrong = next(w for w in words if w.lower() != right.lower() and _near(w, right))
        again = max_(*[right if word == wrong else word for word in words], "--help")
        assert again.code == 0, again.err
    commands = IN_TICKS.findall(remedy)
    assert commands or meant or remedy.startswith(("Give", "There", "Leave", "Unset")), remedy
    for command in commands:
        typed = [VALUES.get(word, word) for word in shlex.split(command)[1:]]
        more = [option for option in LONG.get(typed[0], []) if option not in typed]
        if "--help" in typed:
            more = []
        said = max_(*typed, *more)
        assert said.code == 0, (command, said)


ELSEWHERE = {
    "max run FILE --help": "test_mistakes.py: test_help_after_a_model_is_that_of_what_runs_it",
}
"""Remedies that other tests type in."""
REASONS = "absent_options.py"
"""The file whose texts say why an option is absent."""


def test_all_remedies_are_typed_in(max_: CommandLine) -> None:
    """A command in a message is in the remedy of one of the errors above, or another test types it in."""
    printed = {
        command for words in ERRORS for command in IN_TICKS.findall(" ".join(max_.refused(*words)))
    }
    told = {
        " ".join(command.split())
        for folder in ("entrypoints", "pipelines")
        for path in (SRC / folder).rglob("*.py")
        if path.name != REASONS
        for text in texts_of(path, messages=True)
        for command in IN_TICKS.findall(text)
        if len(command.split()) > 2  # the name of a command alone may be what a text is about
    }

    def fits(template: str) -> bool:
        pattern = re.escape(template).replace("N", r"\S+")
        return any(re.fullmatch(pattern, command) for command in printed)

    assert {each for each in told if not fits(each)} == set(ELSEWHERE)
    for place in ELSEWHERE.values():
        file, _, test = place.partition(": ")
        assert f"def {test}(" in (Path(__file__).parent / file).read_text(), place


def _near(word: str, right: str) -> bool:
    return len(set(word) & set(right)) >= len(set(right)) - 2


def test_the_remedy_of_a_model_of_the_hub(
    hub: HubServer,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Offline the error says how the model is got; online that works, and the first command then does."""
    from huggingface_hub import constants

    hub.files = {path.name: path.read_bytes() for path in TINY.iterdir() if path.is_file()}
    max_ = CommandLine(tmp_path / "models", capfd)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    words = ["generate", "org/model", "What is the capital of Norway?", "--no-stats"]
    lines = max_.refused(*words)
    assert IN_TICKS.search(lines[1]), lines
    (command,) = IN_TICKS.findall(lines[1])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    max_.done(*shlex.split(command)[1:])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert max_.done(*words) == "The capital of Norway is Oslo.\n"
