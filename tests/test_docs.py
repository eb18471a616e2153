"""The documentation is true: paths exist, the map of folders is complete, code blocks run."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.encoders.harness import checkpoint
from tests.encoders.test_text_encoder import write_tokenizer
from tests.serve.conftest import RunningServer

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
)
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_paths_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    named = re.findall(r"`((?:src|docs|tests|benchmarks|examples|models)/[\w./-]+)`", text)
    links = [m for m in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)]
    missing = [p for p in named if not (ROOT / p).exists()]
    missing += [p for p in links if not (page.parent / p).exists()]
    assert not missing


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and Python-Markdown make them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M
    )
    texts = [
        re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", h)).strip().lower() for h in headings
    ]
    return {re.sub(r"\s+", "-", text) for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_linked_headings_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", text)
    missing = [
        f"{target}#{anchor}"
        for target, anchor in links
        # a picture's says for which colors it is
        if (not target or target.endswith(".md"))
        and anchor not in anchors_of(page.parent / target if target else page)
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_lines_are_short(page: Path) -> None:
    """Prose is wrapped at 120, but for tables, code and what `python -m max._config` writes."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("folder", ["decisions", "log"])
def test_folders_list_their_pages(folder: str) -> None:
    listed = re.findall(r"\]\(([\w.-]+\.md)\)", (ROOT / "docs" / folder / "README.md").read_text())
    pages = {p.name for p in (ROOT / "docs" / folder).glob("*.md")} - {"README.md"}
    assert set(listed) == pages


def test_architecture_names_each_folder_of_the_source() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = {
        p.name
        for p in (ROOT / "src" / "max").iterdir()
        if (p.is_dir() and any(p.glob("*.py")))
        or (p.suffix == ".py" and p.stem not in ("__init__", "_version"))
    }
    source = ROOT / "src" / "max"
    packages |= {str(p.parent.relative_to(source)) for p in source.glob("*/**/__init__.py")}
    assert not {p for p in packages if f"`src/max/{p}`" not in page}


MARK = re.compile(r"^<!-- run(?:: ([\w ]+))? -->\n", re.M)
BLOCK = re.compile(r"(?:^<!-- run(?:: ([\w ]+))? -->\n)?^```python\n(.*?)^```", re.M | re.S)
# its blocks are one program with a test of its own
KERNEL_LANGUAGE = "kernel-language.md"


def programs() -> list[object]:
    """The programs of each page: a block begins one under a `<!-- run -->` mark, else it continues the one before.

    ``<!-- run: server openai -->`` names what a program needs: a server of the bundled model, an encoder's folder, or
    packages that may not be installed.
    """
    parameters: list[object] = []
    for page in PAGES:
        if page.name == KERNEL_LANGUAGE:
            continue
        blocks: list[tuple[list[str], list[str]]] = []
        for match in BLOCK.finditer(page.read_text()):
            needs, code = match.groups()
            if match.group(0).startswith("<!--") or not blocks:
                blocks.append(((needs or "").split(), [code]))
            else:
                blocks[-1][1].append(code)
        for number, (needs, codes) in enumerate(blocks):
            parameters.append(pytest.param(needs, "\n".join(codes), id=f"{page.stem}-{number}"))
    return parameters


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_each_mark_stands_over_a_block(page: Path) -> None:
    text = page.read_text()
    runs = [m for m in BLOCK.finditer(text) if m.group(0).startswith("<!--")]
    assert len(runs) == len(MARK.findall(text))


@pytest.mark.parametrize("needs, code", programs())
def test_code_blocks_run(
    needs: list[str], code: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """As a script of its own, from the project's root, warnings as errors."""
    for need in needs:
        if need == "server":
            server: RunningServer = request.getfixturevalue("documented_server")
            code = code.replace("http://127.0.0.1:8000", server.url)
        elif need == "encoder":
            folder: Path = request.getfixturevalue("encoder_folder")
            code = code.replace("models/all-MiniLM-L6-v2", str(folder))
        elif importlib.util.find_spec(need) is None:
            pytest.skip(f"{need} is not installed")
    script = tmp_path / "block.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=ROOT,
        # blocks of one model compile it once
        env={**os.environ, "MAX_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    # `print(x)  # value` in the block states the line that it prints
    stated = re.findall(r"^ *print\(.*\)  # (.+)$", code, re.M)
    printed = done.stdout.splitlines()
    assert [s for s in stated if s not in printed] == [], done.stdout


@pytest.fixture(scope="session")
def documented_server() -> Iterator[RunningServer]:
    """The server that the pages about serving start."""
    server = RunningServer("--model", "models/tiny-chat", "--max-length", "512")
    yield server.wait_ready()
    server.stop()


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained encoder with a tokenizer, for pages that name one of the hub."""
    source, _ = checkpoint("Bert")
    folder = tmp_path_factory.mktemp("encoder")
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((source / name).read_bytes())
    write_tokenizer(folder)
    return folder


def test_the_pictures_are_those_of_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python docs/_site/pictures.py` writes them."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "_site")
    pictures = importlib.import_module("pictures")
    drawn = pictures.pictures()
    assert set(drawn) == {path.name for path in pictures.FOLDER.glob("*.svg")}
    stale = [name for name, text in drawn.items() if (pictures.FOLDER / name).read_text() != text]
    assert stale == []


def test_the_tables_of_the_dialect_are_those_of_the_specifications(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`python docs/_site/dialect.py` writes them."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "_site")
    dialect = importlib.import_module("dialect")
    text = dialect.PAGE.read_text()
    assert text == dialect.page(text), "run `python docs/_site/dialect.py`"
    with pytest.raises(ValueError, match="has no line"):
        dialect.page("# Another page")


def test_the_reference_has_a_page_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name that a module exports has a heading with its full name, once."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "_site")
    reference = importlib.import_module("reference")
    for name in (name for group in reference.MODULES.values() for name in group):
        text = reference.render(name)
        anchors = re.findall(r"^#+ .*\{ #(\S+) \}$", text, re.M)
        assert len(anchors) == len(set(anchors)), name
        exported = getattr(importlib.import_module(name), "__all__", ())
        values = {n: getattr(sys.modules[name], n) for n in exported if n[0] != "_"}
        ours = {
            f"{name}.{n}"
            for n, value in values.items()
            if not inspect.ismodule(value) and getattr(value, "__module__", "").startswith("max")
        }
        assert ours <= set(anchors)
        assert len(re.findall("^```", text, re.M)) % 2 == 0, name


def test_links_out_of_the_folder_are_of_what_the_site_has() -> None:
    """Other files are no pages of the site, and `make docs` fails at their links."""
    pages = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md"}
    strays = []
    for page in (ROOT / "docs").rglob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for link in re.findall(r"\]\((\.\./[^)#:\s]+)", text):
            name = os.path.relpath(page.parent / link, ROOT)
            known = name in pages or re.match(r"docs/|deploy/[^/]+$|examples/\w+\.py$", name)
            strays += [] if known else [f"{page.name}: {link}"]
    assert strays == []


def test_the_reference_of_torch_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make docs` installs none; the pages are the same, and nothing sees the stand-in afterwards."""
    folder = ROOT / "docs" / "_site"
    code = """
import sys
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
class Absent:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import absent_torch, reference
absent_torch.import_without_torch("max.torch")
assert not [n for n in sys.modules if n.split(".")[0] == "torch"]
sys.stdout.write(reference.render("max.torch"))
"""
    env = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT / 'src'}"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    monkeypatch.syspath_prepend(folder)
    assert result.stdout == importlib.import_module("reference").render("max.torch")


def test_each_class_and_function_of_the_reference_has_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below its signature; fields have the text under them, or their entry in the docstring of their class."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "_site")
    reference = importlib.import_module("reference")
    heading = re.compile(r"^#+ `(.*?)` \{ #(\S+) \}$", re.M)
    bare, fields, bare_fields = [], 0, []
    for module in (module for group in reference.MODULES.values() for module in group):
        parts = heading.split(reference.render(module))
        for title, anchor, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            has_text = bool(re.sub(r"^```.*?^```", "", body, flags=re.M | re.S).strip())
            if title.endswith("()") or re.match(r"\s*```python\n(class|property) ", body):
                bare += [] if has_text else [anchor]
            else:
                fields += 1
                bare_fields += [] if has_text else [anchor]
    # a name of Python's that the reference lists
    assert bare == ["max.graph.ops.Callable"]
    assert len(bare_fields) < fields / 10, bare_fields


def test_the_reference_reads_the_text_of_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the field, of an argument, of an option, of a constant that another module defines."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "_site")
    reference = importlib.import_module("reference")

    def text(anchor: str) -> str:
        module = max(
            (m for g in reference.MODULES.values() for m in g if anchor.startswith(f"{m}.")),
            key=len,
        )
        return reference.render(module).partition(f"{{ #{anchor} }}")[2].partition("\n#")[0]

    assert "The free memory." in text("max.diagnostics.gpu.MemoryStats.free_bytes")
    assert "Texts that end the generation." in text("max.interfaces.SamplingParams.stop")
    assert "Texts that end the generation." in text("max.interfaces.SamplingParamsInput.stop")
    assert "Tokens per page" in text("max.pipelines.lib.config.KVCacheConfig.kv_cache_page_size")
    assert "A function that makes a pipeline" in text("max.interfaces.PipelinesFactory")
    assert "queries" in text("max.nn.attention.attention_with_rope.AttentionWithRope.q_proj")
    assert "The inputs in order." in text("max.engine.Model.call-operator")
    package = reference.render_package("max.nn")
    assert 'max.nn.linear.md#max.nn.linear.Linear){ id="max.nn.Linear" }' in package
