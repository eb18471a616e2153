"""`max cluster`: the machines and replicas of a running server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar, cast

import click

from max.entrypoints.cli.errors import CommandError
from max.entrypoints.cli.options.server_options import base_url, key_option

Function = TypeVar("Function", bound=Callable[..., Any])


def _server_options(function: Function) -> Function:
    """The options that name the server."""
    function = key_option("A key of the server.")(function)
    return click.option(
        "--url",
        default="http://127.0.0.1:8000",
        show_default=True,
        help="The address of the server.",
    )(function)


@click.group(
    "cluster",
    short_help="Show or change the replicas of a running server.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
def cluster() -> None:
    """Show or change the machines and replicas of a running server.

    A replica is an engine of a model: `max serve --replicas` has several, `--ray` has them on the machines of a
    cluster.
    """


@cluster.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_server_options
def status(as_json: bool, url: str, api_key: str | None) -> None:
    """What runs where, with the requests and the cache of each replica."""
    found = _ask_server(url, api_key, "/cluster", None)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for node in found["nodes"]:
        alive = "" if node["alive"] else ", lost"
        click.echo(f"node {node['node'][:12]}  {node['address']}, {node['cpus']:g} cores{alive}")
    for model in found["models"]:
        click.echo(f"{model['model']}: {model['state']}")
        for each in model["replicas"]:
            place = f" on {each['node'][:12]}" if each["node"] else ""
            state = each["state"] + (f" ({each['loading']})" if each["loading"] else "")
            share = each["cached_tokens"] / max(each["prompt_tokens"], 1)
            click.echo(
                f"  replica {each['replica']}{place}: {state}, {each['requests']} requests "
                f"({each['running']} running, {each['waiting']} waiting), {each['used_pages']} of "
                f"{each['total_pages']} pages, {share:.0%} of prompts cached, {each['restarts']} restarts"
            )
            if start := each.get("start"):  # servers of before have none
                click.echo(
                    f"    started with {start['compiled_parts']} parts compiled, "
                    f"{start['packed_weights']} weights packed, {start['fetched_entries']} from other machines "
                    f"({start['fetched_bytes'] / 1e6:.1f} MB)"
                )
    for each in found.get("routers", ()):  # servers of before have none
        click.echo(
            f"router {each['router']}, process {each['pid']}: {each['state']}, {each['requests']} requests"
        )
    if not found["models"]:
        click.echo("no model is loaded")


@cluster.command("drain")
@click.argument("node", required=False)
@click.option("--model", help="The model of --replica, if there are several.")
@click.option("--replica", type=click.IntRange(min=0), help="One replica instead of a machine.")
@_server_options
def drain(
    node: str | None, model: str | None, replica: int | None, url: str, api_key: str | None
) -> None:
    """Move the replicas of a machine elsewhere; no request is lost.

    NODE is the address of a machine, or the begin of its identifier, as `max cluster status` shows them. Ends when the
    last request there has ended.
    """
    if (node is None) == (replica is None):
        raise CommandError("give a NODE or --replica", "`max cluster status` lists both.")
    body = {"node": node, "model": model, "replica": replica}
    _say_replaced(_ask_server(url, api_key, "/cluster/drain", body))


@cluster.command("upgrade")
@click.argument("model", required=False)
@click.option("--routers", is_flag=True, help="The server processes of --routers instead.")
@_server_options
def upgrade(model: str | None, routers: bool, url: str, api_key: str | None) -> None:
    """Replace the replicas of MODEL, or the routers, one after another; no request is lost.

    The new ones read the model's files and the program anew.
    """
    if routers and model is not None:
        raise CommandError("give a MODEL or --routers", "They are replaced one by one.")
    body = {"routers": True} if routers else {"model": model}
    answer = _ask_server(url, api_key, "/cluster/upgrade", body)
    if routers:
        for each in answer["replaced"]:
            click.echo(f"router {each['by']} replaces {each['router']}")
    else:
        _say_replaced(answer)


def _say_replaced(answer: dict[str, Any]) -> None:
    for each in answer["replaced"]:
        click.echo(f"{each['model']}: replica {each['by']} replaces {each['replica']}")
    if not answer["replaced"]:
        click.echo("no replica runs there")


def _ask_server(
    url: str, key: str | None, path: str, body: dict[str, Any] | None
) -> dict[str, Any]:
    """The answer of the server."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None
    if body is not None:
        data = json.dumps(
            {name: value for name, value in body.items() if value is not None}
        ).encode()
    try:
        request = urllib.request.Request(base_url(url) + path, data, headers)
        # no limit: what replaces a replica is loaded before the answer
        with urllib.request.urlopen(request, timeout=None) as answer:
            return cast("dict[str, Any]", json.load(answer))
    except urllib.error.HTTPError as error:
        raise CommandError(_message(error), "") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise CommandError(
            f"no server answers at {url}: {reason}", "Give its address with --url."
        ) from error


def _message(error: urllib.error.HTTPError) -> str:
    """The message of a refusal."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code}: {error.reason}"
