"""Coding agents: where their configuration is, and how a server of ours is added to it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from max._config import process_environment
from max.entrypoints.cli.errors import CommandError

PROVIDER = "supremum"
"""The name of our server in configurations."""
_NO_KEY = "none"
_KEPT = ".before-max"


@dataclass(frozen=True)
class Endpoint:
    """A server and a model of it.

    Args:
        url: The server's address, without ``/v1``.
        model: The model.
        context: The tokens of its context; 0: unknown.
        key: The server's key; None: none.
    """

    url: str
    model: str
    context: int
    key: str | None

    @property
    def token(self) -> str:
        """The key for clients, which refuse to have none."""
        return self.key or _NO_KEY

    @property
    def output(self) -> int:
        """Tokens of an answer that leave room for the prompt."""
        return min(8192, self.context // 2) if self.context else 8192


@dataclass(frozen=True)
class ConfigFile:
    """A file of an agent's configuration.

    Args:
        path: Where it is.
        own_text: The file with nothing but our server.
        merge: The text of an existing file with our server in it.
    """

    path: Path
    own_text: str
    merge: Callable[[str], str]


@dataclass(frozen=True)
class Agent:
    """A coding agent.

    Args:
        command: Its program.
        install: The command that installs it.
        files: Its files for a server.
        arguments: The arguments that choose server and model.
        variables: Variables of its environment.
    """

    command: str
    install: str
    files: Callable[[Endpoint], list[ConfigFile]]
    arguments: Callable[[Endpoint], list[str]]
    variables: Callable[[Endpoint], dict[str, str]] = lambda endpoint: {}

    def environment_of(self, endpoint: Endpoint) -> dict[str, str]:
        """The environment of its process.

        Args:
            endpoint: The server.
        """
        return {**process_environment(), **self.variables(endpoint)}


def written_files(agent: Agent, endpoint: Endpoint) -> Iterator[tuple[Path, Path | None]]:
    """Writes the files of an agent; a file with another text is kept beside the new one.

    Args:
        agent: The agent.
        endpoint: The server.

    Yields:
        Each file that was written, and where its former text is; None: it had none.

    Raises:
        CommandError: A file cannot be read or written.
    """
    for file in agent.files(endpoint):
        try:
            former = file.path.read_text(encoding="utf-8") if file.path.exists() else None
            text = file.own_text if former is None else file.merge(former)
            if text == former:
                continue
            kept = None if former is None else _back_up(file.path)
            file.path.parent.mkdir(parents=True, exist_ok=True)
            # a link of the user's stays one
            file.path.write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CommandError(
                f"{file.path} cannot be changed: {' '.join(str(error).split())}",
                f"Change it by hand: `max launch {agent.command} {shlex.quote(endpoint.model)} --print` shows "
                "what belongs in it.",
            ) from error
        yield file.path, kept


def _back_up(path: Path) -> Path:
    """Copies a file to a free name beside it."""
    number, kept = 1, path.with_name(f"{path.name}{_KEPT}")
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}{_KEPT}-{number}")
    shutil.copy2(path, kept)
    return kept


def _merged_json(values: dict[str, Any]) -> Callable[[str], str]:
    """A function that puts values into the text of a JSON file, whose other values stay."""

    def merge(text: str) -> str:
        own = json.loads(text) if text.strip() else {}
        if not isinstance(own, dict):
            raise ValueError("it has no JSON object")
        before = json.dumps(own)
        _put(cast("dict[str, Any]", own), values)
        return text if json.dumps(own) == before else json.dumps(own, indent=2) + "\n"

    return merge


def _put(own: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        inner = own.get(key)
        if isinstance(inner, dict) and isinstance(value, dict):
            _put(cast("dict[str, Any]", inner), cast("dict[str, Any]", value))
        else:
            own[key] = value


def _json_file(path: Path, values: dict[str, Any]) -> ConfigFile:
    return ConfigFile(path, json.dumps(values, indent=2) + "\n", _merged_json(values))


def _own_file(name: str, values: dict[str, Any]) -> ConfigFile:
    """A file in a folder of ours, which the agent reads by an argument: the user's own stay as they are."""
    text = json.dumps(values, indent=2) + "\n"
    return ConfigFile(Path.home() / ".max" / "agents" / name, text, lambda former: text)


def _opencode(endpoint: Endpoint) -> list[ConfigFile]:
    limit = {"limit": {"context": endpoint.context, "output": endpoint.output}}
    model = {"name": endpoint.model, **(limit if endpoint.context else {})}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Supremum",
        "options": {"baseURL": f"{endpoint.url}/v1", "apiKey": endpoint.token},
        "models": {endpoint.model: model},
    }
    values = {"$schema": "https://opencode.ai/config.json", "provider": {PROVIDER: provider}}
    folder = _folder("XDG_CONFIG_HOME", ".config") / "opencode"
    return [_json_file(folder / "opencode.json", values)]


def _codex(endpoint: Endpoint) -> list[ConfigFile]:
    table = f"model_providers.{PROVIDER}"
    lines = [
        f"[{table}]",
        'name = "Supremum"',
        f"base_url = {json.dumps(f'{endpoint.url}/v1')}",
        'wire_api = "responses"',
    ]
    if endpoint.key:
        lines.append(f"http_headers = {{ Authorization = {json.dumps(f'Bearer {endpoint.key}')} }}")
    text = "\n".join(lines) + "\n"

    def merge(former: str) -> str:
        tomllib.loads(former)  # what is no TOML is not changed
        # the table of an earlier launch, up to the next one
        heading = re.compile(rf"^\[{re.escape(table)}\][^\n]*\n(?:(?!\[)[^\n]*\n?)*", re.M)
        rest = heading.sub("", former).rstrip("\n")
        merged = f"{rest}\n\n{text}" if rest else text
        tomllib.loads(merged)
        return merged

    return [ConfigFile(_folder("CODEX_HOME", ".codex") / "config.toml", text, merge)]


def _codex_arguments(endpoint: Endpoint) -> list[str]:
    settings = [f"model_provider={PROVIDER}", f"model={json.dumps(endpoint.model)}"]
    if endpoint.context:
        settings.append(f"model_context_window={endpoint.context}")
    return [word for setting in settings for word in ("-c", setting)]


def _claude(endpoint: Endpoint) -> list[ConfigFile]:
    variables = {
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.token,
        "ANTHROPIC_MODEL": endpoint.model,
        "ANTHROPIC_SMALL_FAST_MODEL": endpoint.model,
        **{
            f"ANTHROPIC_DEFAULT_{size}_MODEL": endpoint.model
            for size in ("HAIKU", "SONNET", "OPUS")
        },
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # a line at the begin of each prompt that differs from request to request, so that no prefix is cached
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    return [_own_file("claude.json", {"env": variables})]


def _cline(endpoint: Endpoint) -> list[ConfigFile]:
    settings = {
        "provider": "openai-compatible",
        "apiKey": endpoint.token,
        "model": endpoint.model,
        "baseUrl": f"{endpoint.url}/v1",
    }
    # an entry without a time is not read
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    values = {"version": 1, "providers": {"openai-compatible": entry}}
    path = Path.home() / ".cline" / "data" / "settings" / "providers.json"
    return [_json_file(path, values)]


def _aider(endpoint: Endpoint) -> list[ConfigFile]:
    # JSON is YAML too
    values: dict[str, Any] = {
        "model": f"openai/{endpoint.model}",
        "openai-api-base": f"{endpoint.url}/v1",
        "openai-api-key": endpoint.token,
    }
    files = [_own_file("aider.conf.yml", values)]
    if endpoint.context:
        facts = {
            "max_tokens": endpoint.output,
            "max_input_tokens": endpoint.context,
            "max_output_tokens": endpoint.output,
            "input_cost_per_token": 0.0,
            "output_cost_per_token": 0.0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
        metadata = _own_file("aider.metadata.json", {f"openai/{endpoint.model}": facts})
        files[0] = _own_file(
            "aider.conf.yml", {**values, "model-metadata-file": str(metadata.path)}
        )
        files.append(metadata)
    return files


def _folder(variable: str, name: str) -> Path:
    """The folder of a variable of the environment, else one in the user's."""
    value = process_environment().get(variable)
    return Path(value) if value else Path.home() / name


AGENTS = {
    "opencode": Agent(
        "opencode", "npm install -g opencode-ai", _opencode,
        lambda endpoint: ["--model", f"{PROVIDER}/{endpoint.model}"],
    ),
    "codex": Agent("codex", "npm install -g @openai/codex", _codex, _codex_arguments),
    "claude": Agent(
        "claude", "npm install -g @anthropic-ai/claude-code", _claude,
        lambda endpoint: ["--settings", str(_claude(endpoint)[0].path)],
    ),
    "cline": Agent(
        "cline", "npm install -g cline", _cline,
        lambda endpoint: ["-P", "openai-compatible", "-m", endpoint.model],
    ),
    "aider": Agent(
        "aider", "pip install aider-chat", _aider,
        lambda endpoint: ["--config", str(_aider(endpoint)[0].path)],
    ),
}  # fmt: skip
"""The agents by name."""
