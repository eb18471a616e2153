"""`max list`: the architectures that can run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from max._lazy import lazy_module
from max.entrypoints.cli import log_level_option

# loaded when a command runs, not for its help or for completions of a shell
if TYPE_CHECKING:
    from max.pipelines.registry import registry
else:
    registry = lazy_module("max.pipelines.registry.registry")


@click.command("list", short_help="Show the architectures that can run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--custom-architectures",
    multiple=True,
    metavar="TEXT",
    help="Modules with your own architectures, as module or folder:module.",
)
@log_level_option
def list_architectures(as_json: bool, custom_architectures: tuple[str, ...]) -> None:
    """Show the architectures that can run, their encodings, and models of each."""
    architecture_registry = registry.PIPELINE_REGISTRY
    architecture_registry.load_own()
    architecture_registry.load_custom(list(custom_architectures))
    architectures = sorted(architecture_registry.architectures.values(), key=lambda a: a.name)
    if as_json:
        entries = {
            a.name: {
                "task": a.task.value,
                "example_repo_ids": a.example_repo_ids,
                "default_encoding": a.default_encoding.value,
                "supported_encodings": [e.value for e in a.supported_encodings],
            }
            for a in architectures
        }
        click.echo(json.dumps({"architectures": entries}, indent=2))
        return
    for architecture in architectures:
        encodings = [
            f"{e.value} (default)" if e == architecture.default_encoding else e.value
            for e in architecture.supported_encodings
        ]
        click.echo(architecture.name)
        click.echo(f"    task       {architecture.task.value}")
        click.echo(f"    encodings  {', '.join(encodings)}")
        for repo in architecture.example_repo_ids:
            click.echo(f"    example    {repo}")
