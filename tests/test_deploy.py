"""The files of deploy/: what they name exists, and the options that they give are those of the commands."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from pathlib import Path

import click
import yaml

from max.entrypoints.cli.serve import _settings, serve

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def check_serve(words: list[str]) -> None:
    """Parses a command line of ``max serve`` as the command does."""
    assert words[0] == "serve"
    context = serve.make_context("serve", words[1:])
    _settings(dict(context.params))


def check_variables(names: set[str]) -> None:
    """The variables of the server are those of its options."""
    known: set[str] = set()
    for parameter in serve.params:
        if isinstance(parameter, click.Option):
            found = parameter.envvar or ()
            known |= {found} if isinstance(found, str) else set(found)
    known |= {"MAX_MODELS_DIR", "MAX_CACHE_DIR", "HF_HUB_OFFLINE", "RAY_ADDRESS", "MODEL"}
    assert not names - known


def test_the_image() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    variables = re.findall(r"(\w+)=\S+", " ".join(re.findall(r"^ENV (.*)$", text, re.M)))
    assert variables
    check_variables(set(variables))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {"serve", "ray"} <= set(project["project"]["optional-dependencies"])
    assert re.search(r"^ARG EXTRAS=serve$", text, re.M) and "/src[$EXTRAS]" in text
    assert "USER 1000" in text
    # what a clone has besides the package stays outside: files of a layer count, also those that a later one removes
    copied = [
        each
        for words in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M)
        for each in words.split()
    ]
    assert all((ROOT / each).exists() for each in copied) and "." not in copied
    needed = {"pyproject.toml", project["project"]["readme"]}
    needed |= {each.split("/")[0] for each in project["project"]["license-files"]}
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed |= {each.split("/")[0] for each in wheel["packages"]}
    assert needed == set(copied)
    (mounted,) = re.findall(r"source=([^,]+),", text)
    assert (ROOT / mounted / "config.json").is_file()


def test_caches_are_folders_of_the_server_alone() -> None:
    """Each user may write to a pod's empty volume, and a folder with such rights is no cache."""
    text = (DEPLOY / "Dockerfile").read_text()
    cache = re.search(r"MAX_CACHE_DIR=(/home\S+)", text)
    assert cache is not None
    cluster = next(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    (service,) = compose["services"].values()
    mounts = [volume.split(":")[1] for volume in service["volumes"]]
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        for container in group["template"]["spec"]["containers"]:
            mounts += [mount["mountPath"] for mount in container["volumeMounts"]]
    parents = [mount for mount in mounts if Path(cache[1]).is_relative_to(mount)]
    assert len(parents) == 4 and cache[1] not in parents


def test_compose() -> None:
    (service,) = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    check_serve([re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in service["command"]])
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_the_unit(tmp_path: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(DEPLOY / "supremum.service")
    words = shlex.split(unit["Service"]["ExecStart"])
    keys = tmp_path / "keys"
    keys.write_text("secret")
    check_serve([str(keys) if word == "/etc/supremum/keys" else word for word in words[1:]])
    check_variables({word.split("=")[0] for word in shlex.split(unit["Service"]["Environment"])})


def test_kubernetes() -> None:
    """Each selector finds a label, each mount a volume, each probe a port."""
    documents = list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))
    assert [each["kind"] for each in documents] == ["RayCluster", "Service", "NetworkPolicy"]
    cluster, service, policy = documents
    head = cluster["spec"]["headGroupSpec"]
    groups = cluster["spec"]["workerGroupSpecs"]
    for group in (head, *groups):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        # of Ray: KubeRay's own probes need Ray's dashboard, and named ports replace those of its service
        ray, raylet = pod["containers"][0], int(group["rayStartParams"]["node-manager-port"])
        assert {"readinessProbe", "livenessProbe"} <= set(ray) and "ports" not in ray
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            ports = {port["name"] for port in container.get("ports", ())} or {raylet}
            for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
                for action in ("httpGet", "tcpSocket"):
                    port = container.get(probe, {}).get(action, {}).get("port")
                    assert port is None or port in ports
            check_variables({each["name"] for each in container.get("env", ())})
    # the server joins Ray through the other container of its pod
    assert head["template"]["spec"]["shareProcessNamespace"] is True
    for container in head["template"]["spec"]["containers"]:
        assert {"name": "ray", "mountPath": "/tmp/ray"} in container["volumeMounts"]
    server = head["template"]["spec"]["containers"][1]
    check_serve(["m" if word == "$(MODEL)" else word for word in server["args"]])
    replicas = dict(zip(server["args"], server["args"][1:], strict=False))
    (workers,) = groups
    assert int(replicas["--max-replicas"]) <= workers["maxReplicas"]
    assert (
        replicas["--ray-cpus"]
        == workers["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]
    )
    name = cluster["metadata"]["name"]
    assert service["spec"]["selector"]["ray.io/cluster"] == name
    assert policy["spec"]["podSelector"]["matchLabels"]["ray.io/cluster"] == name
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in server["ports"]}
