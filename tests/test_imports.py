"""The arrows between the packages go down only, and importing the graph API stays cheap."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from max._compat.module_paths import MODULES
from max._compat.names import NAMES

SRC = Path(__file__).parents[1] / "src" / "max"
EVERY = {
    "_config", "_dataclass", "_errors", "_host", "_html", "_lazy", "_load_steps", "_names", "_spelling", "_version",
    "dtype",
}  # fmt: skip
ENGINE_BASE = EVERY | {"driver", "mlir", "graph"}

# package -> the packages of `max` that it may import; function-local and TYPE_CHECKING imports count too
ALLOWED: dict[str, set[str]] = {
    "_version": set(),
    "_names": set(),
    "_traceback": {"_config"},
    "_config": {"_spelling"},
    "_dataclass": set(),
    "_errors": set(),
    "_host": {"_config", "_dataclass"},
    "_html": set(),
    "_lazy": set(),
    "_load_steps": set(),
    "_spelling": {"_lazy"},
    "_abi": {"_dataclass"},
    "dtype": {"_config", "_errors", "_host", "_spelling"},
    "interfaces": EVERY,
    "driver": EVERY,
    "mlir": EVERY,
    "graph": EVERY | {"driver", "mlir", "kernel"},  # kernels' signatures, for custom ops
    "kernel": EVERY | {"_abi"},
    "_backends": EVERY | {"driver", "kernel", "mlir"},
    "_backends.cpu": ENGINE_BASE | {"_abi", "kernel", "_backends", "_compiler"},
    "_compiler": ENGINE_BASE | {"_abi", "kernel", "_backends"},
    "_interpreter": ENGINE_BASE | {"kernel"},
    "engine": ENGINE_BASE | {"_abi", "kernel", "_backends", "_compiler", "_interpreter"},
    "experimental": ENGINE_BASE | {"kernel", "engine", "_compat"},  # its face only
    "diagnostics": set(),
    "profiler": EVERY,
    "torch": ENGINE_BASE | {"kernel", "engine", "importers"},
    "importers": ENGINE_BASE | {"engine", "_interpreter"},
    "onnx": EVERY | {"graph", "engine", "importers"},
    "tensorflow": EVERY | {"graph", "engine", "importers", "onnx"},
    "nn": ENGINE_BASE | {"kernel", "engine", "experimental", "interfaces", "_compat"},  # faces only
    "_compat": ENGINE_BASE | {"kernel", "engine", "experimental", "interfaces", "nn", "pipelines"},
    "pipelines": ENGINE_BASE | {"kernel", "engine", "interfaces", "nn", "_compat"},  # its face only
    "serve": ENGINE_BASE | {"kernel", "engine", "interfaces", "nn", "pipelines"},
    "entrypoints": ENGINE_BASE
    | {"kernel", "engine", "importers", "interfaces", "nn", "onnx", "pipelines", "serve", "torch"},
}
THIRD_PARTY_ENGINE = {"numpy", "ml_dtypes", "llvmlite", "xdsl"}
ENGINE_PACKAGES = {
    "_abi", "_config", "_host", "dtype", "driver", "mlir", "graph", "kernel",
    "_backends", "_backends.cpu", "_compiler", "_interpreter", "engine",
}  # fmt: skip
# optional, and only where a user hands the object in or asks for the format
OPTIONAL_ENGINE = {"torch", "gguf", "safetensors"}


APART = {"_backends.cpu"}
"""Folders with arrows of their own: a backend uses the compiler, which knows the interface of backends only."""


def package_of(path: Path) -> str:
    return package_named(path.relative_to(SRC).with_suffix("").parts)


def package_named(parts: Sequence[str]) -> str:
    """The package of a module of `max`, given its name without `max`."""
    inner = ".".join(parts[:2])
    return inner if inner in APART else parts[0]


NODES = (
    ast.Call,
    ast.Constant,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.If,
    ast.Import,
    ast.ImportFrom,
)


@functools.cache
def parsed(path: Path) -> tuple[ast.Module, list[ast.AST]]:
    """The syntax tree of a file, and its nodes of these kinds: each test looks at all files."""
    tree = ast.parse(path.read_text())
    return tree, [node for node in ast.walk(tree) if isinstance(node, NODES)]


def nodes_of(path: Path) -> list[ast.AST]:
    return parsed(path)[1]


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """The trees of all files take more memory than all other tests of a worker."""
    yield
    parsed.cache_clear()


def name_of(node: ast.expr) -> str:
    """The name, or the last name of a chain of attributes; "" for other expressions."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def called(call: ast.Call) -> str:
    """The last name of the function that a call names."""
    return name_of(call.func)


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports, at any depth of the file."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and called(node) == "lazy_module":
            assert isinstance(node.args[0], ast.Constant), path
            found.add(str(node.args[0].value))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or len(path.relative_to(SRC).parts) > node.level, path
            if node.level == 0 and node.module:
                found.add(node.module)
                if node.module == "max":
                    found |= {f"max.{alias.name}" for alias in node.names}
            elif node.level:
                base = path.relative_to(SRC).parts[: -node.level]
                found.add(".".join(["max", *base, *([node.module] if node.module else [])]))
    return found


FILES = sorted(p for p in SRC.rglob("*.py") if p != SRC / "__init__.py")


def test_every_package_has_its_arrows() -> None:
    assert {package_of(p) for p in FILES} <= set(ALLOWED)


def test_imports_go_down_only() -> None:
    wrong = []
    for path in FILES:
        package = package_of(path)
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "max" and len(parts) > 1:
                target = package_named(parts[1:])
                if target != package and target not in ALLOWED[package]:
                    wrong.append(f"{path.relative_to(SRC)} imports {name}")
    assert not wrong, "\n".join(wrong)


INTERFACES = {
    "max._backends",
    "max._backends.backend",
    "max._backends.program",
    "max._backends.regions",
    "max._backends.registry",
    "max._backends.kernel_call",
}


def test_compiler_and_engine_know_no_device() -> None:
    """Of backends and their kernels they import the interfaces; the registry loads a backend by its name."""
    wrong = [
        f"{path.relative_to(SRC)} imports {name}"
        for path in FILES
        if package_of(path) in ("_compiler", "engine")
        for name in imports_of(path)
        if name.startswith("max._backends") and name not in INTERFACES
    ]
    assert not wrong, "\n".join(wrong)


KINDS_ASKED = {
    "pipelines/config/model_config.py": "a virtual CPU device is refused as the first one, as inputs are on cpu:0",
    "pipelines/checkpoints/encodings.py": "a documented table: the encodings of the CPU and of GPUs",
}
"""Files above the backends that ask for the kind of a device, once each, and why; others ask what it can do."""


def questions_for_the_kind(path: Path) -> int:
    """How often a file reads ``is_host``, or compares the label, the API or the type of a device."""
    nodes = [*ast.walk(parsed(path)[0])]
    compared = [node.left for node in nodes if isinstance(node, ast.Compare)]
    names = [node.attr for node in compared if isinstance(node, ast.Attribute)]
    asked = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    return asked.count("is_host") + sum(map(names.count, ("label", "api", "device_type")))


def test_code_above_the_backends_asks_what_a_device_can_do() -> None:
    """Of the kind of a device depends nothing; `Backend`, `Device` and `DeviceMemory` say what each can do."""
    found = {
        path.relative_to(SRC).as_posix(): count
        for path in FILES
        if package_of(path) in ("_compiler", "engine", "pipelines")
        and (count := questions_for_the_kind(path))
    }
    assert found == dict.fromkeys(KINDS_ASKED, 1)


def test_the_engine_needs_only_its_four_dependencies() -> None:
    allowed = THIRD_PARTY_ENGINE | OPTIONAL_ENGINE | set(sys.stdlib_module_names) | {"max"}
    wrong = [
        f"{path.relative_to(SRC)} imports {name}"
        for path in FILES
        if package_of(path) in ENGINE_PACKAGES
        for name in imports_of(path)
        if name.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


PACKAGES = sorted({package_of(path) for path in FILES})
LOCAL_IMPORTS = {
    "entrypoints/cli/serve.py": "the worker starts before the server's packages are loaded",
    "entrypoints/cli/options/serve_plan.py": "the worker starts before the server's packages are loaded",
}
"""Files whose functions import from `max`, and why `max._lazy.lazy_module` does not fit there."""


@functools.cache
def files_imported_by(path: Path) -> set[Path]:
    """The files of `max` that a file imports by name, at any depth of the file (TYPE_CHECKING too)."""
    imported = {*files_loaded_by(path)}
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            # a name may be a submodule: that file is imported, and not what else its package imports
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if file_of(name) else node.module for name in names]
        else:
            continue
        imported |= {file for name in names if (file := file_of(name)) is not None}
    return imported


@functools.cache
def files_loaded_by(path: Path) -> set[Path]:
    """The files of `max` that a file loads by ``import_module`` or ``lazy_module``, or names as ``module:class``."""
    loaded: set[Path | None] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and called(node).endswith(LOADERS):
            name = node.args[0]
        elif (
            isinstance(node, ast.Constant) and ":" in str(node.value) and path.name != "__init__.py"
        ):
            name = node
        else:
            continue
        if isinstance(name, ast.Constant):
            loaded.add(file_of(str(name.value).partition(":")[0]))
        elif isinstance(name, ast.JoinedStr) and isinstance(name.values[0], ast.Constant):
            # any module of a package
            package = file_of(str(name.values[0].value).removesuffix("."))
            assert package, f"{path}: {ast.unparse(name)}"
            loaded |= {*package.parent.rglob("*.py")} - {path, package}
    return {file for file in loaded if file is not None}


LOADERS = ("import_module", "lazy_module")


@functools.cache
def file_of(module: str) -> Path | None:
    """The file of a module of `max`; None where there is none."""
    if module.split(".")[0] != "max":
        return None
    path = SRC.joinpath(*module.split(".")[1:])
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def circle_of_files(arrows: dict[Path, set[Path]]) -> list[Path]:
    """A circle in a graph of files, the first file again at its end; empty where there is none."""
    finished: set[Path] = set()

    def search(file: Path, trail: list[Path]) -> list[Path]:
        if file in trail:
            return [*trail[trail.index(file) :], file]
        if file not in finished:
            for target in sorted(arrows.get(file, ())):
                if circle := search(target, [*trail, file]):
                    return circle
            finished.add(file)
        return []

    return next((circle for file in sorted(arrows) if (circle := search(file, []))), [])


LOADED_FROM_ABOVE = {
    "experimental/tensors/properties.py": ("experimental/array_api/__init__.py",
        "an array returns its namespace, as the standard says"),
    "nn/kv_cache/cache_params.py": ("nn/kv_cache/cache_values.py",
        "a cache's shape gives the types of a graph's inputs"),
}  # fmt: skip
"""Files that load a file that imports them, when a method is called."""


def upward_targets(path: Path) -> set[Path]:
    name = path.relative_to(SRC).as_posix()
    if name not in LOADED_FROM_ABOVE:
        return set()
    target = SRC / LOADED_FROM_ABOVE[name][0]
    assert target in files_loaded_by(path), f"{name} does not load {target}"
    return {target}


@pytest.mark.parametrize("package", PACKAGES)
def test_files_import_each_other_in_one_direction_only(package: str) -> None:
    own = [path for path in FILES if package_of(path) == package]
    circle = circle_of_files(
        {path: (files_imported_by(path) & {*own}) - upward_targets(path) for path in own}
    )
    assert not circle, " imports\n".join(str(path.relative_to(SRC)) for path in circle)


def test_arrows_of_modules_that_are_loaded_by_name() -> None:
    registry = files_imported_by(SRC / "pipelines/registry/registry.py")
    names = (
        "encoders/embeddings_pipeline.py",
        "architectures/encoders/bert.py",
    )  # a table, an f-string
    assert {SRC / "pipelines" / name for name in names} <= registry
    tokenizer = files_imported_by(SRC / "pipelines/tokenization/hf_tokenizer.py")
    assert SRC / "pipelines/tokenization/chat_template.py" in tokenizer


def test_a_circle_of_files_is_found() -> None:
    a, b, c, d = (Path(name) for name in "abcd")
    assert circle_of_files({d: {a}, a: {b}, b: {c}, c: {a}}) == [a, b, c, a]
    assert circle_of_files({d: {a, b}, a: {b, c}, b: {c}, c: set()}) == []


FACES = {
    "__init__.py": "names that nothing defines are looked up there",
    "experimental/__init__.py": "meshes of devices",
    "nn/__init__.py": "documented names of layers in the interface of 25.x",
    "nn/conv.py": "V1 layers", "nn/embedding.py": "V1 layers", "nn/linear.py": "V1 layers", "nn/norm.py": "V1 layers",
    "nn/module_v3/__init__.py": "subgraphs of functions",
    "nn/quant_config.py": "QuantConfig",
    "pipelines/__init__.py": "declarations of architectures and configurations",
}  # fmt: skip
"""Documented modules that show the compatibility wing, `max._compat`, and what of it."""


def names_the_wing(path: Path) -> bool:
    """Whether a file imports the wing or names one of its modules in a text, at any depth of the file."""
    texts = {
        node.value
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    docstrings = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(parsed(path)[0])
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return any("max._compat" in text for text in (texts - docstrings) | imports_of(path))


def test_only_faces_name_the_compatibility_wing() -> None:
    """Forms and names of other versions are found through hooks that `max` and `max.pipelines` fill."""
    naming = {
        path.relative_to(SRC).as_posix()
        for path in FILES
        if package_of(path) != "_compat" and names_the_wing(path)
    }
    assert naming == FACES.keys() - {"__init__.py"}
    assert names_the_wing(SRC / "__init__.py")


def imported_names(path: Path) -> set[tuple[str, str]]:
    """The modules of `max` that a file imports names from, and these names."""
    return {
        (node.module, alias.name)
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module
        for alias in node.names
    }


def test_nothing_inside_imports_what_only_other_versions_have() -> None:
    """Neither a face that loads the wing at import, nor a name or module of the wing's tables."""
    inner = [
        path
        for path in FILES
        if package_of(path) != "_compat" and path.relative_to(SRC).as_posix() not in FACES
    ]
    loading = {
        SRC / name
        for name in FACES
        if any(
            m.startswith("max._compat") for n in parsed(SRC / name)[0].body for m in modules_of(n)
        )
    }
    assert SRC / "nn/linear.py" in loading
    wrong = []
    for path in inner:
        imports = {str(face.relative_to(SRC)) for face in files_imported_by(path) & loading}
        imports |= {name for name in imports_of(path) if name in MODULES}
        imports |= {
            f"{module}.{name}"
            for module, name in imported_names(path)
            if name in NAMES.get(module, {})
            and file_of(f"{module}.{name}") is None
            and name not in names_bound_in(module)
        }
        wrong += [f"{path.relative_to(SRC)} imports {name}" for name in imports]
    assert not wrong, "\n".join(wrong)


def names_bound_in(module: str) -> set[str]:
    """The names that a module binds or imports at its top."""
    path = file_of(module)
    assert path is not None
    tree = parsed(path)[0]
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return names_bound_by(tree) | imported | classes


TYPES_ONLY = {
    "pipelines/config/pipeline_config.py": "a config is read and checked without the engine",
    "graph/ops/devices/same_device.py": "the face of the ops shows its function without loading values",
}
"""Files that name types of modules which they never load."""


def names_bound_by(module: ast.Module) -> set[str]:
    """The functions and variables that a file binds at its top."""
    functions = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    targets = [
        target
        for node in module.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    names = {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return functions | names


def modules_of(node: ast.AST) -> list[str]:
    """The modules of `max` that an import statement names; with ``from``, the module and each name in it."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    else:
        return []
    return [name for name in names if name.split(".")[0] == "max"]


def local_imports(path: Path) -> list[str]:
    """The imports from `max` in functions of a file."""
    functions = [
        n for n in nodes_of(path) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return [
        f"{path.relative_to(SRC)}:{node.lineno} imports {modules_of(node)[0]} in {function.name}"
        for node in nodes_of(path)
        if isinstance(node, ast.stmt) and modules_of(node)
        for function in functions
        if function.lineno <= node.lineno <= (function.end_lineno or 0)
    ]


def test_no_function_imports_from_max() -> None:
    found = {path.relative_to(SRC).as_posix(): local_imports(path) for path in FILES}
    wrong = [text for name, texts in found.items() if name not in LOCAL_IMPORTS for text in texts]
    assert not wrong, "\n".join(wrong)
    assert all(found.get(name) for name in LOCAL_IMPORTS), "an exception that nothing needs"


def test_imports_for_types_only_are_of_lazy_modules() -> None:
    """Under ``if TYPE_CHECKING`` stand the modules that a file loads lazily: others are imported at the top."""
    wrong = []
    for path in FILES:
        tree, nodes = parsed(path)
        lazy = {
            str(node.args[0].value)
            for node in nodes
            if isinstance(node, ast.Call)
            and called(node) == "lazy_module"
            and isinstance(node.args[0], ast.Constant)
        }
        name = path.relative_to(SRC).as_posix()
        # a package that loads its names when they are used
        face = path.name == "__init__.py" and "__getattr__" in names_bound_by(tree)
        if face or name in TYPES_ONLY:
            continue
        for block in nodes:
            if not (isinstance(block, ast.If) and name_of(block.test) == "TYPE_CHECKING"):
                continue
            for node in block.body:
                if (modules := modules_of(node)) and not lazy & set(modules):
                    wrong.append(f"{path.relative_to(SRC)}:{node.lineno} imports {modules[0]}")
    assert not wrong, "\n".join(wrong)


def test_no_file_is_too_long_to_hold_in_the_head() -> None:
    long = {
        str(p.relative_to(SRC)): n for p in FILES if (n := len(p.read_text().splitlines())) > 1000
    }
    assert not long


def test_folders_say_an_order() -> None:
    """A folder has at most 20 modules: more of them are in folders below it."""
    counts = Counter(
        path.parent.relative_to(SRC).as_posix()
        for path in FILES
        if path.name != "__init__.py" and path.parent != SRC
    )
    assert {folder: count for folder, count in counts.items() if count > 20} == {}


SMALL = 40
"""Lines below which a file should be one with a neighbor, unless one of the next rules keeps it."""
SMALL_BY_DESIGN = {
    "pipelines/architectures/": "a family is a file, however little it differs from others",
    "pipelines/lib/": "documented modules, whose names are defined elsewhere",
    "nn/": "documented modules, most with one layer",
    "graph/ops/": "documented modules, and names that the face of the ops shows without a load",
    "_compiler/passes/": "a pass is a file",
}
"""The folders whose files may be small, and why."""
MOST_SMALL = 26
"""The number of small files elsewhere: those of a use in two packages, and those that are loaded alone."""


def test_small_files_are_one_with_a_neighbor() -> None:
    small = [
        name
        for path in FILES
        if not path.name.startswith("__") and len(path.read_text().splitlines()) < SMALL
        if not (name := path.relative_to(SRC).as_posix()).startswith((*SMALL_BY_DESIGN,))
    ]
    assert len(small) <= MOST_SMALL, "\n".join(small)


def test_environment_is_read_in_one_place() -> None:
    readers = [
        str(p.relative_to(SRC))
        for p in FILES
        if package_of(p) != "_config"
        and ("os.environ" in p.read_text() or "os.getenv" in p.read_text())
    ]
    assert not readers


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        (
            "max.graph",
            {"torch", "transformers", "llvmlite", "pydantic", "tokenizers", "safetensors", "click"},
        ),
        ("max.engine", {"torch", "transformers", "pydantic", "tokenizers", "click"}),
        (
            "max.entrypoints.cli",
            {"torch", "transformers", "llvmlite", "xdsl", "pydantic", "tokenizers", "numpy"},
        ),
    ],
)
def test_import_loads_no_more_than_needed(module: str, banned: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert not banned & set(out.stdout.split())


@pytest.mark.parametrize(
    ("module", "most"),
    [
        ("max.graph", 20),
        ("max.graph.ops", 50),
        ("max.experimental", 20),
        ("max.nn", 70),
    ],
)
def test_faces_load_names_when_they_are_used(module: str, most: int) -> None:
    code = f"import sys, {module}; print(sum(name.split('.')[0] == 'max' for name in sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(out.stdout) <= most


EACH_FIRST = """
import importlib, os, pkgutil, sys
import max.graph
failed = []
for module in pkgutil.walk_packages(max.graph.__path__, "max.graph."):
    if (child := os.fork()) == 0:
        try:
            importlib.import_module(module.name)
        except BaseException as error:
            print(module.name, error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_each_module_of_graphs_may_be_imported_first() -> None:
    """Names of `max.graph` are loaded when they are used, in any order."""
    out = subprocess.run(
        [sys.executable, "-c", EACH_FIRST], capture_output=True, text=True, check=True, timeout=120
    )
    assert out.stdout == ""
