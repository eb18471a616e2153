"""Pages of the API reference, from the signatures and docstrings of the imported package.

One page a module of `MODULES`. A page has the module's own public names, in order of their kind and name, with an
anchor that is the full name (``max.graph.Graph.output``). Members that come from a private base class stand in the
class that a program uses.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

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

_SECTION = re.compile(
    r"^(Args|Returns|Raises|Yields|Attributes|Example|Examples|Note|Parameters):+\s*$"
)
_ENTRY = re.compile(r"^([*\w.]+(?:, [*\w.]+)*)(?: \([^)]*\))?: (.*)$")
_ROLE = re.compile(r":(?:class|func|obj|meth|attr|mod):(`[^`]+`)")


def page_name(module: str) -> str:
    """The page's path in the site's sources."""
    return f"reference/{module}.md"


def render(module_name: str) -> str:
    """A module's page, as Markdown."""
    module = importlib.import_module(module_name)
    parts = [f"# {module_name}", _markdown(inspect.getdoc(module) or "")]
    members = sorted(_public(module), key=lambda item: (_rank(item[1]), item[0].lower()))
    for name, value in members:
        parts += _entry(module_name, name, value)
    return "\n\n".join(part for part in parts if part) + "\n"


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
        if issubclass(value, enum.Enum):
            parts.append(
                "\n".join(
                    f'- <code id="{path}.{key}">{key}</code> = `{member.value!r}`'
                    for key, member in value.__members__.items()
                )
            )
        parts.append(_inherited(value, path))
        for member, attribute in _members(value):
            parts += _member(path, member, attribute)
        return parts
    if callable(value):
        return [
            _heading(2, f"{name}()", path),
            _code(f"{name}{_signature(value)}"),
            _markdown(inspect.getdoc(value) or ""),
        ]
    text = repr(value)
    shown = "" if len(text) > 120 or " at 0x" in text else _code(f"{name} = {text}")
    return [_heading(2, name, path), shown]


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
        if base is not cls and not base.__name__.startswith("_") and not _is_private(home):
            continue
        annotations = {
            name: annotation
            for name, annotation in vars(base).get("__annotations__", {}).items()
            if not name.startswith("_")
        }
        for name, value in {**annotations, **vars(base)}.items():
            if not name.startswith("_") and name not in seen:
                # a field shows its type, not its slot or default
                is_code = callable(value) or isinstance(value, property | functools.cached_property)
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
        if home.partition(".")[0] != "max" or base.__name__.startswith("_") or _is_private(home):
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


def _is_private(module: str) -> bool:
    return any(part.startswith("_") for part in module.split("."))


def _member(owner: str, name: str, value: Any) -> list[str]:
    path = f"{owner}.{name}"
    if isinstance(value, property | functools.cached_property):
        function = value.fget if isinstance(value, property) else value.func
        returns = _returns(function)
        shown = f"property {name}{f': {returns}' if returns else ''}"
        doc = inspect.getdoc(value) or inspect.getdoc(function) or ""
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
    return [_heading(3, name, path), _code(f"{name}: {shown}" if shown else name)]


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
    text = re.sub(r" at 0x[0-9a-f]+", "", str(signature))
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
    return re.sub(r"'([^']*)'", _unquoted, re.sub(r" at 0x[0-9a-f]+", "", text))


def _heading(level: int, title: str, anchor: str) -> str:
    return f"{'#' * level} `{title}` {{ #{anchor} }}"


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
