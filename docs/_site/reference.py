"""Pages of the API reference, from the signatures and docstrings of the imported package.

One page a module of `MODULES`. A page has the module's own public names, in order of their kind and name, with an
anchor that is the full name (``max.graph.Graph.output``). Members that come from a private base class stand in the
class that a program uses.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar, get_origin

from max._host.reentry import cached_property

# the groups of the navigation, and the modules of each
MODULES: dict[str, tuple[str, ...]] = {
    "Graphs": (
        "max.graph",
        "max.graph.ops",
        "max.graph.dim",
        "max.graph.shape",
        "max.graph.type",
        "max.graph.quantization",
        "max.graph.weights",
        "max.dtype",
    ),
    "Running": ("max.driver", "max.engine", "max.profiler", "max.diagnostics.gpu"),
    "Eager tensors and PyTorch": (
        "max.experimental.tensor",
        "max.experimental.functional",
        "max.experimental.random",
        "max.experimental.array_api",
        "max.nn.module_v3",
        "max.torch",
    ),
    "Kernels": ("max.kernel",),
    "Layers": (
        "max.nn.layer",
        "max.nn.linear",
        "max.nn.embedding",
        "max.nn.norm",
        "max.nn.conv",
        "max.nn.conv_transpose",
        "max.nn.rotary_embedding",
        "max.nn.sequential",
        "max.nn.clamp",
        "max.nn.comm",
        "max.nn.moe",
        "max.nn.lora",
        "max.nn.float8_config",
        "max.nn.quant_config",
        "max.nn.identity",
        "max.nn.hooks",
        "max.nn.sampling",
        "max.nn.kernels",
        "max.nn.attention.attention_with_rope",
        "max.nn.attention.interfaces",
        "max.nn.attention.mask_config",
        "max.nn.attention.multi_latent_attention",
        "max.nn.attention.multihead_attention",
        "max.nn.attention.ragged_attention",
        "max.nn.kv_cache.cache_params",
        "max.nn.kv_cache.manager",
        "max.nn.transformer.transformer",
        "max.nn.transformer.distributed_transformer",
    ),
    "Pipelines": (
        "max.entrypoints.llm",
        "max.interfaces",
        "max.pipelines.core",
        "max.pipelines.architectures",
        "max.pipelines.lib.config",
        "max.pipelines.lib.embeddings_pipeline",
        "max.pipelines.lib.hf_utils",
        "max.pipelines.lib.interfaces",
        "max.pipelines.lib.log_probabilities",
        "max.pipelines.lib.pipeline_variants.text_generation",
        "max.pipelines.lib.registry",
        "max.pipelines.lib.sampling.sampling",
        "max.pipelines.lib.tokenizer",
    ),
}

# packages that export the names of several pages: title of the group -> package
PACKAGES = {"Layers": "max.nn", "Pipelines": "max.pipelines"}

_SECTION = re.compile(
    r"^(Args|Returns|Raises|Yields|Attributes|Example|Examples|Note|Parameters):+\s*$"
)
_ENTRY = re.compile(r"^([*\w.]+(?:, [*\w.]+)*)(?: \([^)]*\))?: (.*)$")
_SAME_FIELDS = re.compile(r"The fields are those of :class:`(\w+)`")
_DEFAULTS = (
    (re.compile(r" at 0x[0-9a-f]+"), ""),
    (re.compile(r"<([A-Z]\w*\.\w+): [^<>]*>"), r"\1"),
    (re.compile(r"<class '(?:[\w.]+\.)?(\w+)'>"), r"\1"),
    (re.compile(r"<function (?:[\w.]+\.)?(\w+)>"), r"\1"),
    (re.compile(r"<factory>"), "..."),
)
_PATH = re.compile(r"\ADocumented path of (.*?)(?:: see `[\w.]+`)?\.")
_ROLE = re.compile(r":(?:class|func|obj|meth|attr|mod):(`[^`]+`)")


_PROPERTIES = (property, functools.cached_property, cached_property)


def page_name(module: str) -> str:
    """The page's path in the site's sources."""
    return f"reference/{module}.md"


def render(module_name: str) -> str:
    """A module's page, as Markdown."""
    module = importlib.import_module(module_name)
    # where the code lies matters to its authors only
    doc = _PATH.sub(
        lambda match: f"{match[1][0].upper()}{match[1][1:]}.", inspect.getdoc(module) or ""
    )
    parts = [f"# {module_name}", _markdown(doc)]
    members = sorted(_public(module), key=lambda item: (_rank(item[1]), item[0].lower()))
    for name, value in members:
        parts += _entry(module_name, name, value)
    return "\n\n".join(part for part in parts if part) + "\n"


def render_package(package: str) -> str:
    """A page that lists what a package exports, with a link to each name's own entry."""
    module = importlib.import_module(package)
    parts = [f"# {package}", _markdown(inspect.getdoc(module) or "")]
    lines: list[str] = []
    for name in sorted({n for n in dir(module) if not n.startswith("_")}, key=str.lower):
        value = getattr(module, name)
        home = _entries_by_value().get(id(value))
        if home is None:
            continue
        page, entry = home
        link = f'[`{name}`]({page}.md#{page}.{entry}){{ id="{package}.{name}" }}'
        lines.append(f"| {link} | {_summary(value)} |")
    return "\n\n".join([*parts, "\n".join(["| name | |", "|---|---|", *lines])]) + "\n"


@functools.cache
def _entries_by_value() -> dict[int, tuple[str, str]]:
    """The page and the name of each class and function that has an entry."""
    found: dict[int, tuple[str, str]] = {}
    for page in (module for group in MODULES.values() for module in group):
        for name, value in _public(importlib.import_module(page)):
            if callable(value):
                # the entry under the value's own name, not one under an earlier name
                if id(value) not in found or getattr(value, "__name__", None) == name:
                    found[id(value)] = (page, name)
    return found


def _summary(value: Any) -> str:
    """The first sentence of a docstring, for a cell."""
    text = "" if not inspect.isclass(value) and not callable(value) else inspect.getdoc(value) or ""
    first = _one_line(_ROLE.sub(r"\1", text).split("\n\n")[0])
    return re.split(r"(?<=\.) (?=[A-Z])", first)[0].replace("|", "\\|")


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The names that belong to a module: those of `__all__`, else what is defined in it or in private parts of it."""
    listed = getattr(module, "__all__", None)
    names = listed if listed is not None else [n for n in dir(module) if not n.startswith("_")]
    for name in names:
        value = getattr(module, name, None)
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        home = getattr(value, "__module__", None)
        is_ours = isinstance(home, str) and home.partition(".")[0] == "max"
        if listed is None and (not is_ours or _is_elsewhere(module.__name__, home)):
            continue
        yield name, value


def _is_elsewhere(module: str, home: str | None) -> bool:
    """Whether a name's home is a module with a page of its own, or outside the package of `module`."""
    pages = {page for group in MODULES.values() for page in group}
    return home != module and (home in pages or not f"{home}.".startswith(module.split("._")[0]))


def _rank(value: Any) -> int:
    if inspect.isclass(value):
        return 0
    return 1 if callable(value) else 2


def _entry(module: str, name: str, value: Any) -> list[str]:
    path = f"{module}.{name}"
    if inspect.isclass(value):
        parts = [_heading(2, name, path), _code(f"class {name}{_signature(value)}")]
        parts.append(_markdown(_class_doc(value)))
        docs = _attribute_docs(value)
        if issubclass(value, enum.Enum):
            parts.append(
                "\n".join(
                    f'- <code id="{path}.{key}">{key}</code> = `{member.value!r}`'
                    + (f": {_one_line(docs[key])}" if key in docs else "")
                    for key, member in value.__members__.items()
                )
            )
        parts.append(_inherited(value, path))
        for member, attribute in _members(value):
            parts += _member(path, member, attribute, docs.get(member, ""))
        return parts
    # an alias of a callable type is no function
    if callable(value) and get_origin(value) is None and not isinstance(value, TypeVar):
        return [
            _heading(2, f"{name}()", path),
            _code(f"{name}{_signature(value)}"),
            _markdown(inspect.getdoc(value) or ""),
        ]
    text = repr(value)
    shown = "" if len(text) > 120 or " at 0x" in text else _code(f"{name} = {text}")
    return [_heading(2, name, path), shown, _markdown(_constant_doc(module, name))]


def _class_doc(value: type) -> str:
    """The class's own docstring; a dataclass's generated one only repeats the signature."""
    text = inspect.getdoc(value) or ""
    return "" if text.startswith(f"{value.__name__}(") else text


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public members, those of private bases included; special methods and members of enumerations are left out."""
    seen: dict[str, Any] = {}
    for base in cls.__mro__:
        home = getattr(base, "__module__", "")
        if base is object or home.partition(".")[0] != "max":
            continue
        if base is not cls and not _is_private(base):
            continue
        annotations = {
            name: annotation
            for name, annotation in vars(base).get("__annotations__", {}).items()
            if not name.startswith("_")
        }
        for name, value in {**annotations, **vars(base)}.items():
            if (not name.startswith("_") or name == "__call__") and name not in seen:
                # a field shows its type, not its slot or default
                is_code = callable(value) or isinstance(value, _PROPERTIES)
                is_code = is_code or isinstance(value, classmethod | staticmethod)
                seen[name] = value if is_code else annotations.get(name, "")
    if issubclass(cls, enum.Enum):
        seen = {name: value for name, value in seen.items() if name not in cls.__members__}
    yield from sorted(seen.items())


def _inherited(cls: type, path: str) -> str:
    """A line for each public base class of the package, with the names that come from it."""
    seen = {name for name, _ in _members(cls)} | set(getattr(cls, "__members__", ()))
    lines: list[str] = []
    for base in cls.__mro__[1:]:
        home = getattr(base, "__module__", "")
        if home.partition(".")[0] != "max" or _is_private(base):
            continue
        names = sorted(
            name
            for name in {**vars(base).get("__annotations__", {}), **vars(base)}
            if not name.startswith("_") and name not in seen
        )
        seen.update(names)
        if names:
            marked = ", ".join(f'<code id="{path}.{name}">{name}</code>' for name in names)
            lines.append(f"From `{base.__name__}`: {marked}")
    return "\n\n".join(lines)


def _is_private(base: type) -> bool:
    """Whether no page shows a base class, so that its members stand in the classes that a program uses."""
    home, name = base.__module__, base.__name__
    if name.startswith("_") or any(part.startswith("_") for part in home.split(".")):
        return True
    pages = {page for group in MODULES.values() for page in group}
    loaded = [sys.modules[page] for page in pages if page in sys.modules]
    return home not in pages and not any(
        getattr(page, name, None) is base for page in loaded if name in getattr(page, "__all__", ())
    )


def _member(owner: str, name: str, value: Any, doc: str) -> list[str]:
    """A member's heading, signature and text; `doc` is the text of a field."""
    path = f"{owner}.{name}"
    if isinstance(value, _PROPERTIES):
        if isinstance(value, property):
            function = value.fget
        else:
            # the engine's own class names its function otherwise
            function = getattr(value, "function", None) or value.func
        returns = _returns(function)
        shown = f"property {name}{f': {returns}' if returns else ''}"
        doc = inspect.getdoc(value) or inspect.getdoc(function) or doc
        return [_heading(3, name, path), _code(shown), _markdown(doc)]
    inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    if isinstance(inner, FunctionType) or (callable(inner) and not inspect.isclass(inner)):
        kind = type(value).__name__ + " " if inner is not value else ""
        return [
            _heading(3, f"{name}()", path),
            _code(f"{kind}{name}{_signature(inner)}"),
            _markdown(inspect.getdoc(inner) or ""),
        ]
    # an annotation of a field, or a class attribute
    shown = value if isinstance(value, str) else getattr(value, "__name__", "")
    code = _code(f"{name}: {shown}" if shown else name)
    return [_heading(3, name, path), code, _markdown(doc)]


def _attribute_docs(cls: type) -> dict[str, str]:
    """The text of each field: the string under it, else its entry in the docstring of its class."""
    docs: dict[str, str] = {}
    for base in reversed([b for b in cls.__mro__ if b.__module__.partition(".")[0] == "max"]):
        for function in (base, vars(base).get("__init__")):
            docs.update(_entries(inspect.getdoc(function) or ""))
        docs.update(_class_field_docs(base))
    same = _SAME_FIELDS.search(inspect.getdoc(cls) or "")
    if same:
        docs = _attribute_docs(getattr(sys.modules[cls.__module__], same.group(1))) | docs
    if dataclasses.is_dataclass(cls):
        docs.update({f.name: _option_doc(f) for f in dataclasses.fields(cls) if f.metadata})
    return docs


def _option_doc(field: dataclasses.Field[Any]) -> str:
    """What a field of a configuration does, and why it does nothing here."""
    texts = [field.metadata.get(key, "") for key in ("help", "no_effect", "unsupported")]
    marks = ("", "No effect here: ", "Not supported: ")
    return "\n\n".join(mark + text for mark, text in zip(marks, texts, strict=True) if text)


def _entries(doc: str) -> dict[str, str]:
    """The entries ``name: text`` of the sections Args and Attributes."""
    result: dict[str, str] = {}
    lines = doc.split("\n")
    for position, line in enumerate(lines):
        section = _SECTION.match(line)
        if section is None or section.group(1) not in ("Args", "Attributes", "Parameters"):
            continue
        names: list[str] = []
        for text in _indented(lines, position + 1)[0]:
            entry = _ENTRY.match(text)
            if entry:
                names = entry.group(1).split(", ")
                result.update(dict.fromkeys(names, entry.group(2)))
            else:
                result.update({name: f"{result[name]} {text.strip()}" for name in names})
    return result


def _class_field_docs(cls: type) -> dict[str, str]:
    """The strings under the fields of a class's body and of its `__init__`."""
    body: Sequence[ast.stmt] = _tree(_file(cls)).body
    for part in cls.__qualname__.split("."):
        found = [n for n in body if isinstance(n, ast.ClassDef) and n.name == part]
        if not found:
            return {}
        body = found[-1].body
    docs: dict[str, str] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            docs.update(_strings_under(node.body))
    return {**docs, **_strings_under(body)}


def _constant_doc(module: str, name: str) -> str:
    """The string under a constant, in the module or where the module imports it from."""
    body = _tree(getattr(sys.modules.get(module), "__file__", None)).body
    # a name that is loaded at its use is imported for type checkers
    checked = [n for n in body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    for node in [*body, *(inner for block in checked for inner in block.body)]:
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            imported = {alias.asname or alias.name: alias.name for alias in node.names}
            if name in imported:
                return _constant_doc(node.module, imported[name])
    return _strings_under(body).get(name, "")


def _strings_under(body: Sequence[ast.stmt]) -> dict[str, str]:
    """The docstring of each assigned name or ``self`` attribute that a string follows."""
    docs: dict[str, str] = {}
    for node, below in zip(body, body[1:], strict=False):
        match below:
            case ast.Expr(ast.Constant(str(text))):
                pass
            case _:
                continue
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            name = getattr(target, "attr", None) or getattr(target, "id", None)
            if isinstance(name, str):
                docs[name] = inspect.cleandoc(text)
    return docs


def _file(cls: type) -> str | None:
    """The source file of a class, which `__module__` may not tell: that is the public name."""
    for function in vars(cls).values():
        function = inspect.unwrap(function) if callable(function) else None
        # a dataclass of Python 3.13 has a method of the standard library
        if not str(getattr(function, "__module__", None)).startswith("max."):
            continue
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename.endswith(".py"):
            return code.co_filename
    return getattr(sys.modules.get(cls.__module__), "__file__", None)


@functools.cache
def _tree(source: str | None) -> ast.Module:
    return ast.parse(Path(source).read_text()) if source else ast.Module([], [])


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _returns(function: Any) -> str:
    annotation = getattr(function, "__annotations__", {}).get("return", "")
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")


def _signature(value: Any) -> str:
    """The signature, a parameter a line where one line would be long; empty where there is none."""
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    text = _plain(str(signature))
    text = re.sub(r"'([^']*)'", _unquoted, text)
    if len(text) < 88:
        return text
    lines = [f"    {_unquote_annotation(str(p))}," for p in signature.parameters.values()]
    head, _, returns = text.rpartition(") -> ")
    tail = f") -> {returns}" if head else ")"
    markers = _with_markers(signature, lines)
    return "(\n" + "\n".join(markers) + f"\n{tail}"


def _with_markers(signature: inspect.Signature, lines: list[str]) -> list[str]:
    """The lines of parameters with ``/`` and ``*`` between them where kinds change."""
    result: list[str] = []
    previous = None
    for parameter, line in zip(signature.parameters.values(), lines, strict=True):
        if previous is parameter.POSITIONAL_ONLY and parameter.kind is not previous:
            result.append("    /,")
        if parameter.kind is parameter.KEYWORD_ONLY and previous not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            result.append("    *,")
        result.append(line)
        previous = parameter.kind
    return result


def _unquoted(match: re.Match[str]) -> str:
    """An annotation that is text loses its quotes; a default that is text keeps them."""
    before = match.string[: match.start()]
    return match.group(1) if before.endswith((": ", "-> ")) else match.group(0)


def _unquote_annotation(text: str) -> str:
    return re.sub(r"'([^']*)'", _unquoted, _plain(text))


def _plain(text: str) -> str:
    """Defaults by their name: members of enumerations, classes, functions; values that a call makes as ``...``."""
    for pattern, name in _DEFAULTS:
        text = pattern.sub(name, text)
    return text


def _heading(level: int, title: str, anchor: str) -> str:
    if not anchor.endswith("__"):
        return f"{'#' * level} `{title}` {{ #{anchor} }}"
    # two underscores around a name would be emphasis: the heading has another anchor, an empty element this one
    owner, _, name = anchor.rpartition(".")
    plain = f"{owner}.{name.strip('_')}-operator"
    return f'{"#" * level} `{title}` {{ #{plain} }}\n\n<span id="{anchor}"></span>'


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _markdown(doc: str) -> str:
    """A docstring as Markdown: its sections become lists, its literal blocks become code."""
    lines = _ROLE.sub(r"\1", doc).split("\n")
    result: list[str] = []
    position = 0
    while position < len(lines):
        line = lines[position]
        section = _SECTION.match(line)
        block, after = _indented(lines, position + 1)
        if section and block:
            result += ["", f"**{section.group(1)}**", ""]
            is_text = section.group(1) in ("Returns", "Yields", "Note")
            result += block if is_text or ">>>" in "".join(block) else _list(block)
            position = after
        elif line.rstrip().endswith("::") and block:
            # a line of its own only marks the block
            text = line.rstrip()[:-1] if line.strip() != "::" else ""
            result += [text, "", "```python", *block, "```", ""]
            position = after
        elif line.lstrip().startswith(">>>"):
            after = position
            while after < len(lines) and lines[after].strip():
                after += 1
            result += ["```pycon", *[part.strip() for part in lines[position:after]], "```"]
            position = after
        else:
            result.append(line)
            position += 1
    return "\n".join(result).strip()


def _indented(lines: list[str], start: int) -> tuple[list[str], int]:
    """The block of indented lines from `start` on, without its indentation, and the position after it."""
    end = start
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
        end += 1
    block = inspect.cleandoc("\n".join(["", *lines[start:end]])).split("\n")
    return ([] if block == [""] else block), end


def _list(block: list[str]) -> list[str]:
    """The entries ``name: text`` of a section as a list; lines that go on stay with their entry."""
    result: list[str] = []
    for line in block:
        entry = _ENTRY.match(line)
        if entry:
            result.append(f"- `{entry.group(1)}`: {entry.group(2)}")
        elif result and line.startswith(" "):
            result.append(f"    {line.strip()}")
        else:
            result.append(line)
    return result
