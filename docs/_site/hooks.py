"""What mkdocs runs while it builds the site: generated pages, and links and lists as they are written for GitHub."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import absent_torch  # beside this file, whose folder mkdocs puts on the path
from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

import reference

ROOT = Path(__file__).parents[2]

# pages that stand outside docs/, and where the site has them
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples/index.md",
}
_SHIM, _LOCAL_SHIM = "https://unpkg.com/iframe-worker/shim", "assets/iframe-worker.js"
_LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^```.*?^```", re.M | re.S)
_CELL = re.compile(r"<td\b.*?</td>", re.S)
_SHORT = 24  # characters
_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")


def on_config(config: Any) -> Any:
    """Adds the groups of the reference and the examples to the navigation."""
    # the sources beside this file, not an installed copy; mkdocs restores the path that a hook sets on import
    sys.path.insert(0, str(ROOT / "src"))
    absent_torch.import_without_torch("max.torch")
    groups: list[Any] = ["reference/index.md"]
    for title, modules in reference.MODULES.items():
        package = [reference.PACKAGES[title]] if title in reference.PACKAGES else []
        groups.append({title: [{m: reference.page_name(m)} for m in (*package, *modules)]})
    for entry in config.nav:
        if "API" in entry:
            entry["API"] = groups
        if "Examples" in entry:
            entry["Examples"] = [
                "examples/index.md",
                *[{p.stem: f"examples/{p.stem}.md"} for p in _programs()],
            ]
        for part in entry.get("Inside", []):
            if isinstance(part, dict):
                for pages in part.values():
                    folder = Path(pages[0]).parent
                    pages += [
                        f"{folder}/{p.name}"
                        for p in sorted((ROOT / "docs" / folder).glob("[0-9]*.md"))
                    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made: reference, examples, and pages and files that stand outside docs/."""
    pages = {"reference/index.md": _reference_index()}
    for modules in reference.MODULES.values():
        pages.update({reference.page_name(m): reference.render(m) for m in modules})
    for package in reference.PACKAGES.values():
        pages[reference.page_name(package)] = reference.render_package(package)
    for program in _programs():
        pages[f"examples/{program.stem}.md"] = _program_page(program)
    for source, page in OUTSIDE.items():
        if page != "index.md":
            pages[page] = _relinked((ROOT / source).read_text(), Path(source), Path(page))
    pages.update({f"deploy/{path.name}": path.read_text() for path in (ROOT / "deploy").iterdir()})
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ go to the site's page of that file; a list may follow its paragraph directly."""
    source = Path("docs") / page.file.src_uri
    if not page.file.generated_by:
        markdown = _relinked(markdown, source, Path(page.file.src_uri))
    return _outside_fences(_spaced_lists, markdown.replace("<!-- run -->\n", ""))


def on_page_content(html: str, **_: Any) -> str:
    """Lets names in tables break after their separators, never within a word; short ones on narrow pages only.

    Args:
        html: The page's body.
    """

    def breakable(code: re.Match[str]) -> str:
        mark = '<wbr class="narrow">' if len(code[0]) <= _SHORT else "<wbr>"
        text = re.sub(r"(?<=\w)([_/.])(?=\w\w)", rf"\1{mark}", code[0])
        return re.sub(r"(?<![\w-])--?\w+", r'<span class="unbroken">\g<0></span>', text)

    return _CELL.sub(lambda cell: _CODE.sub(breakable, cell[0]), html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The theme's worker for pages that are opened as files comes from this site, not from another host."""
    return output.replace(_SHIM, get_relative_url(_LOCAL_SHIM, page.url))


def on_post_template(output_content: str, **_: Any) -> str:
    """The same for the page of missing addresses."""
    return output_content.replace(_SHIM, _LOCAL_SHIM)


def _programs() -> list[Path]:
    return sorted((ROOT / "examples").glob("[!_]*.py"))


def _reference_index() -> str:
    lines = [
        "# API reference",
        "",
        "Each page has the names of one module, with the signatures and docstrings of the package. Names of earlier "
        "versions of MAX are importable under their paths; they stand here under the present ones "
        "([from MAX to Supremum](../tutorials/from-max.md)).",
        "",
    ]
    for title, modules in reference.MODULES.items():
        lines += [f"## {title}", ""]
        if title in reference.PACKAGES:
            package = reference.PACKAGES[title]
            lines.append(f"- [`{package}`]({package}.md): all names that the package exports")
        lines += [f"- [`{m}`]({m}.md)" for m in modules] + [""]
    return "\n".join(lines)


def _program_page(program: Path) -> str:
    """The docstring as text, then the code."""
    module = ast.parse(program.read_text())
    # its lines are joined: the page wraps them
    doc = re.sub(r"(?<=\S)\n(?=\S)", " ", ast.get_docstring(module) or "").replace("``", "`")
    code = "".join(program.read_text().splitlines(keepends=True)[module.body[0].end_lineno :])
    title = program.stem.replace("_", " ").capitalize()
    parts = [f"# {title}", doc, f"`examples/{program.name}`", f"```python\n{code.lstrip()}```"]
    return "\n\n".join(parts) + "\n"


def _relinked(markdown: str, source: Path, page: Path) -> str:
    """The text of `source` (a path from the root) with its links as those of `page` (a path in the site)."""

    def replaced(match: re.Match[str]) -> str:
        target = (ROOT / source.parent / match.group(1)).resolve()
        try:
            name = target.relative_to(ROOT).as_posix()
        except ValueError:
            return match.group(0)
        if name in OUTSIDE:
            name = OUTSIDE[name]
        elif re.fullmatch(r"examples/\w+\.py", name):
            name = name.replace(".py", ".md")
        elif name.startswith("docs/"):
            name = name.removeprefix("docs/")
        elif name.startswith("deploy/"):
            pass  # the site has a copy
        else:
            return match.group(0)
        up = "../" * (len(page.parts) - 1)
        return f"]({up}{name}{match.group(2) or ''})"

    return _outside_fences(lambda text: _LINK.sub(replaced, text), markdown)


def _outside_fences(change: Any, markdown: str) -> str:
    """Applies a change to the text between fenced blocks."""
    result, position = [], 0
    for fence in _FENCE.finditer(markdown):
        result += [change(markdown[position : fence.start()]), fence.group(0)]
        position = fence.end()
    return "".join([*result, change(markdown[position:])])


def _spaced_lists(text: str) -> str:
    """A blank line before lists, fences, and headings under tables, which Python-Markdown needs and GitHub does not."""
    text = re.sub(r"^(?![-*] |[|#>\s]|\d+\. )(.+)\n(?=(?:- |\d+\. ))", r"\1\n\n", text, flags=re.M)
    text = re.sub(r"(?<=\|\n)(?=#)", "\n", text)
    return re.sub(r"(?<=\S)\n\Z", "\n\n", text) if text.endswith("\n") else text
