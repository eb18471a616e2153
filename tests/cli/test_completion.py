"""Completion of commands and options in shells, and help in groups."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from max.entrypoints.cli import COMMANDS, GROUPS, cli
from max.entrypoints.cli.options.config_options import GroupedCommand

SCRIPT = Path(sys.executable).with_name("max")


def completed(*words: str) -> list[str]:
    """What is offered for the last word."""
    result = subprocess.run(
        [sys.executable, "-c", "from max.entrypoints.cli import main; main()"],
        env={
            **os.environ, "_MAX_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        },
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert not result.stderr
    return [line.partition(",")[2] for line in result.stdout.splitlines()]


def test_commands_and_options_are_completed() -> None:
    assert completed("max", "ru") == ["run", "run-batch"]
    offered = completed("max", "serve", "--max-qu")
    assert offered[0] == "--max-queue" and all(name.startswith("--max-qu") for name in offered)
    assert "hermes" in completed("max", "serve", "--tool-parser", "her")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_of_its_shell(shell: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["--completion", shell])
    assert result.exit_code == 0 and f"_MAX_COMPLETE={shell}_complete" in result.stdout
    if (program := shutil.which(shell)) is not None:
        script = tmp_path / "script"
        script.write_text(result.stdout)
        subprocess.run([program, "-n", str(script)], check=True, timeout=60)


def test_bash_completes_with_it() -> None:
    if not (SCRIPT.exists() and shutil.which("bash")):
        pytest.skip("there is no bash, or no max beside this Python")
    code = (
        f'PATH="{SCRIPT.parent}:$PATH"; eval "$(max --completion bash)"; '
        'COMP_WORDS=(max run-); COMP_CWORD=1; _max_completion max; echo "${COMPREPLY[@]}"'
    )
    result = subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "run-batch"


def test_bash_completes_names_and_paths_of_models(tmp_path: Path) -> None:
    if not (SCRIPT.exists() and shutil.which("bash")):
        pytest.skip("there is no bash, or no max beside this Python")
    for name in ("tinyfolder/x", "models/lab/tiny"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "models/lab/tiny" / name).write_text("{}")
    (tmp_path / "tiny b.gguf").touch()
    (tmp_path / "models" / "names.toml").write_text('tinyname = "lab/tiny"\n')
    code = f"""
PATH="{SCRIPT.parent}:$PATH"; eval "$(max --completion bash)"
for line in "max serve tin" "max generate --model lab" "max show ti" "max rm lab/t" "max pull tinyf"; do
COMP_WORDS=($line); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); COMPREPLY=(); _max_completion max
printf '<%s>' "${{COMPREPLY[@]}}"; echo; done"""
    env = {**os.environ, "MAX_MODELS_DIR": str(tmp_path / "models"), "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        ["bash", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    lines = [sorted(line[1:-1].split("><")) for line in result.stdout.splitlines()]
    both = ["tiny b.gguf", "tinyfolder", "tinyname"]
    assert lines == [both, ["lab/tiny"], both, ["lab/tiny"], ["tinyfolder"]], result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_80_columns_and_begins_with_what_is_needed(name: str) -> None:
    text = CliRunner().invoke(cli, [name, "--help"], terminal_width=80).stdout
    assert [line for line in text.splitlines() if len(line) > 80] == []
    command = cli.get_command(None, name)  # type: ignore[arg-type]
    headings = [line for line in text.splitlines() if line.endswith("ptions:") and line[0] != " "]
    if isinstance(command, GroupedCommand):
        if any(p.required and isinstance(p, click.Option) for p in command.params):
            assert headings[0] == "Required options:"
        assert headings[-1] == "Other options:"
        assert "--log-level" in text.partition("Other options:")[2]


def test_help_is_in_groups() -> None:
    names = [name for group in GROUPS.values() for name in group]
    assert sorted(names) == sorted(COMMANDS)
    text = CliRunner().invoke(cli, ["--help"]).stdout
    assert all(f"{group}:" in text for group in GROUPS)
    text = CliRunner().invoke(cli, ["serve", "--help"]).stdout
    headings = ["Model:", "Server:", "Clients:", "Several models:", "Logs and traces:", "KV cache:"]
    places = [text.index(f"\n{heading}\n") for heading in headings]
    assert places == sorted(places)
    parameters = {p.name: p for p in cli.get_command(None, "serve").params}  # type: ignore[arg-type]
    shown = [name for name, p in parameters.items() if not getattr(p, "hidden", False)]
    assert all(max(parameters[name].opts, key=len) in text for name in shown)


def test_a_warm_cache_is_that_of_a_later_run(tmp_path: Path) -> None:
    """The second command compiles nothing: it makes no new entry."""
    tiny = Path(__file__).parents[2] / "models" / "tiny-chat"
    env = {**os.environ, "MAX_CACHE_DIR": str(tmp_path)}

    def run(*arguments: str) -> str:
        code = "from max.entrypoints.cli import main; main()"
        result = subprocess.run(
            [sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout

    def entries() -> set[Path]:
        return {path for path in (tmp_path / "object").rglob("*") if path.is_file()}

    options = ("--model", str(tiny), "--max-length", "128", "--quantization-encoding", "float32")
    assert str(tmp_path) in run("warm-cache", *options)
    warm = entries()
    assert warm
    prompt = ("--prompt", "Hi", "--max-new-tokens", "4", "--top-k", "1")
    run("generate", *options, *prompt)
    assert entries() == warm
