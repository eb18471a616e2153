"""The image of deploy/Dockerfile: its instructions are whole, and a server runs without the files it leaves out."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TINY = ROOT / "models" / "tiny-chat"
FORMS = {
    "FROM": r"(?P<base>[\w:./-]+)(?: AS (?P<name>\w+))?",
    "ARG": r"\w+(=\S+)?",
    "RUN": r"(--mount=\S+ )?.+",
    "COPY": r"(--from=\w+ )?(\S+ )+\S+",
    "USER": r"\d+",
    "ENV": r"(\w+=\S+ ?)+",
    "EXPOSE": r"\d+",
    "HEALTHCHECK": r"--start-period=\d+s CMD (?P<json>\[.+\])",
    "ENTRYPOINT": r"(?P<json>\[.+\])",
    "CMD": r"(?P<json>\[.+\])",
}
"""The instructions that the file uses, and what their words look like."""


@dataclass
class Stage:
    """An image of the file: the stage or image that it starts from, its name, and its instructions."""

    base: str
    name: str
    steps: list[tuple[str, str]]

    def runs(self) -> list[str]:
        return [re.sub(r"^--mount=\S+ +", "", words) for word, words in self.steps if word == "RUN"]


def stages() -> list[Stage]:
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if line and not line.startswith("#"))
    found: list[Stage] = []
    for line in re.sub(r" *\\\n *", " ", text).splitlines():
        word, words = line.split(" ", 1)
        form = re.fullmatch(FORMS[word], words)
        assert form is not None, line
        if word == "FROM":
            found.append(Stage(form["base"], form["name"] or "", []))
        else:
            found[-1].steps.append((word, words))
        if "json" in form.groupdict():
            assert all(isinstance(each, str) for each in json.loads(form["json"]))
    return found


def test_the_instructions() -> None:
    """Each is one of Docker's, each shell command parses, each stage that another one needs is there."""
    python, build, last = stages()
    assert python.base.startswith("debian:") and build.base == last.base == python.name
    copied = [
        re.match(r"--from=(\w+) (\S+) ", words) for word, words in last.steps if word == "COPY"
    ]
    assert [each and each.groups() for each in copied] == [(build.name, "/install/usr/local")]
    for stage in (python, build, last):
        for command in stage.runs():
            subprocess.run(["sh", "-n", "-c", command], check=True)
    # what installs and what apt has fetched is not in the image, nor what it needs only while it is built
    kept = " ".join([*python.runs(), *last.runs()])
    assert not re.search(r"\bpip\b|binutils|python3-\w", kept)
    assert "apt-get clean" in kept and "rm -r /var/lib/apt/lists/*" in kept
    # Debian has no program named `python`
    started = [words for word, words in last.steps if word in ("RUN", "HEALTHCHECK", "ENTRYPOINT")]
    assert not re.search(r"\bpython\b(?!3)", " ".join(started))


def needed() -> Iterator[str]:
    """The distributions that the image installs, besides this one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    left = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    seen: set[str] = set()
    while left:
        requirement = Requirement(left.pop())
        name = canonicalize_name(requirement.name)
        extras = [{"extra": extra} for extra in ("", *requirement.extras)]
        marker = requirement.marker
        if name in seen or marker and not any(marker.evaluate(each) for each in extras):
            continue
        seen.add(name)
        yield name
        for line in distribution(name).requires or ():
            inner = Requirement(line)
            if inner.marker is None or any(inner.marker.evaluate(each) for each in extras):
                inner.marker = None
                left.append(str(inner))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of what the image installs, as links, after the image's own command has left files out."""
    folder = tmp_path_factory.mktemp("image")
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python3*/site-packages")
    for name in needed():
        for file in distribution(name).files or ():
            source = Path(str(file.locate()))
            if file.parts[0] != ".." and "__pycache__" not in file.parts and source.is_file():
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                (site / file).symlink_to(source)
    (command,) = [each for each in stages()[1].runs() if re.search(r"\brm -rf? ", each)]
    assert "strip " not in command  # it would follow the links
    before = {str(each.relative_to(site)) for each in site.rglob("*")}
    command = command.replace("/install/usr/local", str(folder))
    subprocess.run(["sh", "-ec", command.replace("dist-packages", "site-packages")], check=True)
    removed = before - {str(each.relative_to(site)) for each in site.rglob("*")}
    for part in (
        "numpy/f2py/",
        "numpy/_core/tests/",
        "numpy/_core/_simd.",
        "hf_xet/",
        ".pyi",
        ".a",
    ):
        assert any(part in f"{each}|" for each in removed), (
            f"no {part} is installed: needless words"
        )
    assert shutil.which("python3", path=folder / "bin")
    return folder


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "MAX_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
    }


_IMPORTS = """
import importlib, pkgutil, sys
import max
for module in pkgutil.walk_packages(max.__path__, "max.", onerror=lambda name: None):
    if module.name.rpartition(".")[2] != "__main__":
        try:
            importlib.import_module(module.name)
        except ImportError as e:
            print(module.name, e)
import numpy, numpy.fft, numpy.linalg, numpy.random, numpy.testing, huggingface_hub.file_download
print(len(sys.modules), numpy.linalg.svd(numpy.eye(3))[1].sum(), sys.prefix)
"""


def test_each_module_imports_without_what_is_left_out(installed: Path) -> None:
    """The modules that cannot be imported are those of extras that the image does not have."""
    done = subprocess.run(
        [installed / "bin" / "python3", "-c", _IMPORTS],
        env=environment(), capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *failed, last = done.stdout.splitlines()
    modules, ones, prefix = last.split()
    assert int(modules) > 1000 and float(ones) == 3 and Path(prefix) == installed
    extras = ("max.importers.torch", "max.onnx.backend ", "max.torch")
    assert [line for line in failed if not line.startswith(extras)] == []


def test_a_server_runs_without_what_is_left_out(installed: Path) -> None:
    """It answers by a schema, and ends by itself with SIGTERM."""
    serve = subprocess.Popen(
        [installed / "bin" / "python3", "-c", "from max.entrypoints.cli import main; main()", "serve", TINY,
         "--port", "0", "--metrics-port", "0", "--served-model-name", "tiny"],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert serve.stdout is not None
        lines = iter(serve.stdout)
        ready = next((line for line in lines if "Server ready on" in line), None)
        assert ready is not None
        url = ready.split()[3]
        schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json={
                "model": "tiny",
                "messages": [{"role": "user", "content": "Give a seven"}],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": schema},
                },
            },
            timeout=120,
        )
        assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"a": 7}
        serve.terminate()
        assert serve.wait(60) == 0
    finally:
        serve.kill()
        serve.communicate()
