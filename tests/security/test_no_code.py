"""The source has no place where a file's or a request's content becomes code, but those of the tables below.

No pickle of a checkpoint or a socket is loaded, no template is rendered outside the sandbox, no code of a checkpoint is
imported (CVE-2025-32434, CVE-2026-22807, CVE-2026-5760, CVE-2025-32444, CVE-2026-3059).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "max"

# what a call names (its last one or two names) -> the files that may call it, each for a reason
ALLOWED: dict[str, dict[str, str]] = {
    "pickle.loads": {
        "engine/load/program_store.py": "programs in the cache of the user, or of an engine that proves its key",
        "generation/process/channel.py": "objects between an engine and its parent; the server uses MessageCodec",
        "serve/routers/handover.py": "what an owner leaves to the next one in a folder of the user alone",
    },
    "pickle.load": {},
    "pickle.Unpickler": {},
    "Unpickler": {},
    "marshal.loads": {},
    "marshal.load": {},
    "shelve.open": {},
    "dill.loads": {},
    "cloudpickle.loads": {},
    "joblib.load": {},
    "torch.load": {},
    "read_pickle": {},
    "yaml.load": {},
    "yaml.unsafe_load": {},
    "yaml.full_load": {},
    "jinja2.Environment": {},
    "jinja2.Template": {},
    "NativeEnvironment": {},
    "SandboxedEnvironment": {},
    "ImmutableSandboxedEnvironment": {},
    "_Environment": {"tokenization/chat_template.py": "the sandbox itself"},
    "exec": {
        "max/_dataclass.py": "the code of __init__",
        "mlir/sizes.py": "formulas of sizes",
        "engine/run/input_binding.py": "checks of inputs",
        "language/source.py": "a kernel of the program",
        "experimental/replay/matching.py": "the code of a recording's checks",
    },
    "eval": {"interpreter/interpret.py": "an expression of a kernel of the program"},
    "os.system": {},
    "os.popen": {},
    "create_subprocess_shell": {},
    "os.execv": {},
    "ctypes.PyDLL": {},
    "spec_from_file_location": {
        "language/extensions.py": "kernels in files that the program names"
    },
    "runpy.run_path": {},
    "get_class_from_dynamic_module": {},
    "AutoConfig.from_pretrained": {},
    "AutoModel.from_pretrained": {},
    "AutoModelForCausalLM.from_pretrained": {},
    "AutoTokenizer.from_pretrained": {
        "tokenization/hf_tokenizer.py": "older tokenizer files; code of the model runs with --trust-remote-code alone",
    },
}

IMPORTED = {
    "pickle": (
        "engine/load/program_store.py",
        "generation/process/channel.py",
        "serve/routers/handover.py",
    ),
    "jinja2": (
        "tokenization/chat_template.py",
        *(f"tokenization/templates/{name}.py" for name in ("budget", "calls", "code", "filters")),
    ),
    # whose own code of a model's folder runs with --trust-remote-code alone, and pickled weights do not
    "transformers": (
        "tokenization/hf_tokenizer.py",
        "cli/generation/torch_engine.py",
        "torch/causal_lm.py",
    ),
    **dict.fromkeys(("dill", "cloudpickle", "joblib", "marshal", "shelve", "runpy"), ()),
}
"""The files that may import a package."""


@functools.cache
def trees() -> list[tuple[Path, ast.AST]]:
    paths = sorted(SRC.rglob("*.py"))
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name(id=name):
                yield name, node
            case ast.Attribute(value=ast.Name(id=first), attr=name):
                yield f"{first}.{name}", node
                yield name, node
            case ast.Attribute(attr=name):
                yield name, node


def found(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """The calls of the table, each once by its longest name."""
    seen: set[int] = set()
    for name, node in calls(tree):
        if name in ALLOWED and id(node) not in seen:
            seen.add(id(node))
            yield name, node


@pytest.mark.any_target
def test_nothing_becomes_code() -> None:
    used: set[tuple[str, str]] = set()
    wrong: list[str] = []
    for path, tree in trees():
        for name, node in found(tree):
            place = next((p for p in ALLOWED[name] if str(path).endswith(f"/{p}")), None)
            if place is None:
                wrong.append(f"{path}:{node.lineno}: {name} is called; {sorted(ALLOWED[name])} may")
            else:
                used.add((name, place))
    listed = {(name, place) for name, places in ALLOWED.items() for place in places}
    assert not wrong and used == listed, (wrong, sorted(listed - used))


@pytest.mark.any_target
def test_packages_that_run_code() -> None:
    for path, tree in trees():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in {name.partition(".")[0] for name in names} & IMPORTED.keys():
                assert str(path).endswith(IMPORTED[name]), f"{path}:{node.lineno}: imports {name}"


@pytest.mark.any_target
def test_arguments_that_allow_code() -> None:
    for path, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.keyword) or node.arg is None:
                continue
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            where = f"{path}:{node.value.lineno}: {node.arg}={value!r}"
            assert not (
                node.arg in ("allow_pickle", "trust_remote_code", "shell", "autoescape")
                and value is True
            ), where
            assert not (node.arg in ("weights_only", "safe") and value is False), where


@pytest.mark.parametrize(
    "code",
    [
        "pickle.loads(x)",
        "import pickle as p\nUnpickler(f).load()",
        "torch.load(path)",
        "jinja2.Environment()",
        "os.system('ls')",
        "yaml.load(f)",
        "AutoModel.from_pretrained(x)",
        "exec(code)",
    ],
)
def test_the_lint_notices(code: str) -> None:
    assert list(found(ast.parse(code)))
