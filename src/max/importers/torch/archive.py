"""Files of torch: archives of exported programs (``.pt2``) and of TorchScript, as untrusted input.

torch's own loader reads them. Of an exported program it calls functions by the names that the file has, evaluates
expressions of sizes as Python, and unpickles what it cannot load safely: all of that is checked before.
"""

from __future__ import annotations

import json
import os
import re
import threading
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max._config import with_variable
from max.importers.archives import check_entries
from max.importers.errors import ModelFileError, error_line

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

__all__ = ["kind_of", "load_program", "load_script"]

_MOST_TEXT = 512 << 20
"""Bytes of the description of a graph."""
_MOST_DEPTH = 200


# two leading underscores would reach attributes of Python's objects
_TARGET = re.compile(r"torch\.ops\.([A-Za-z]\w*)\.(?!__)\w+(\.(?!__)\w+)?")
_FUNCTIONS_OF_TORCH = re.compile(r"torch\.(sym_\w+|_sym_\w+)")
_OPERATORS = {
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "eq", "ne", "lt", "le", "gt", "ge", "and_",
    "or_", "xor", "invert", "not_", "getitem", "lshift", "rshift", "abs",
}  # fmt: skip
_MATHEMATICS = {"trunc", "floor", "ceil", "sqrt", "log", "log2", "exp", "pow"}

_TOKEN = re.compile(
    r"\s*(?:'[A-Za-z]\w*'|(?P<name>[A-Za-z_]\w*)|\d{1,20}(?:\.\d{1,20})?|[-+*/(),=<>&|~!%])"
)
_NAMES = {
    "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Max", "Min", "Mod", "FloorDiv", "PythonMod",
    "CleanDiv",
    "CeilDiv", "ModularIndexing", "Where", "TruncToInt", "FloorToInt", "CeilToInt", "RoundToInt", "RoundDecimal",
    "ToFloat",
    "IntTrueDiv", "FloatTrueDiv", "PowByNatural", "FloatPow", "Identity", "LShift", "RShift", "BitwiseFn_bitwise_and",
    "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Equality", "Unequality", "StrictLessThan", "LessThan", "StrictGreaterThan",
    "GreaterThan", "And", "Or", "Not", "true", "false", "True", "False", "integer", "positive", "nonnegative", "real",
    "finite", "precision", "prec", "evaluate", "zero", "nonzero", "even", "odd", "negative", "nonpositive",
    "int_oo", "oo",
    "Floor", "floor", "ceiling", "Abs", "One", "Zero", "S", "Half", "NegativeOne",
}  # fmt: skip
_SYMBOL = re.compile(r"(s|u|z|zuf|zf|f|d|b)\d+|[a-z]\w{0,40}")
# a power of sizes may take any amount of memory: only exponents of one digit pass
_POWER = re.compile(r"Pow\(|PowByNatural\(|FloatPow\(|LShift\(|\*\*")
_SMALL_POWER = re.compile(r", Integer\(-?\d\)\)")

# the variable that makes loading safe is the whole process's
_LOADING = threading.Lock()


def kind_of(path: Path) -> str:
    """What a file of torch is: "program" (of torch.export), "script", or "pickle".

    Raises:
        ModelFileError: It is no zip archive, or an archive that is damaged.
    """
    with _open_archive(path) as archive:
        return _kind(archive)


def _kind(archive: zipfile.ZipFile) -> str:
    # all entries lie in a folder with the name of the file
    names = {info.filename.partition("/")[2] for info in archive.infolist()}
    if (
        any(n.startswith("models/") and n.endswith(".json") for n in names)
        or "archive_format" in names
    ):
        return "program"
    whole = {info.filename for info in archive.infolist()}
    if "serialized_exported_program.json" in whole:
        return "program"
    if "constants.pkl" in names and any(n.startswith("code/") for n in names):
        return "script"
    return "pickle"


@contextmanager
def _open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            check_entries(path, archive)
            yield archive
    except zipfile.BadZipFile as error:
        raise ModelFileError(f"{path} is no archive of torch: {error}") from error


def load_script(path: str | os.PathLike[str]) -> torch.jit.ScriptModule:
    """A TorchScript module on the CPU.

    Raises:
        ModelFileError: The file holds none.
    """
    import torch

    file = Path(path)
    kind = kind_of(file)
    if kind != "script":
        what = (
            "a program of torch.export"
            if kind == "program"
            else "pickled tensors or modules (torch.save)"
        )
        raise ModelFileError(
            f"{file} holds {what}, expected a TorchScript module, which torch.jit.save writes"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(str(file), map_location="cpu").train(False)
    except Exception as error:
        raise ModelFileError(f"{file} cannot be read: {error_line(error)}") from error


def load_program(path: str | os.PathLike[str]) -> ExportedProgram:
    """A program that torch.export.save wrote.

    Raises:
        ModelFileError: The file holds none, or objects that only unpickling can make.
    """
    import torch

    file = Path(path)
    with _open_archive(file) as archive:
        if _kind(archive) != "program":
            raise ModelFileError(f"{file} is no program of torch.export")
        _check_program(file, archive)
    try:
        with _safe_loading(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(str(file))
    except Exception as error:
        raise ModelFileError(f"{file} cannot be read: {error_line(error)}") from error


@contextmanager
def _safe_loading() -> Iterator[None]:
    """torch.load reads tensors only meanwhile, as its environment variable for that asks."""
    with _LOADING, with_variable("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1"):
        yield


def _check_program(path: Path, archive: zipfile.ZipFile) -> None:
    for info in archive.infolist():
        base = info.filename.rsplit("/", 1)[-1]
        if base.startswith(("opaque_obj", "custom_obj")):
            raise ModelFileError(
                f"{path} holds the object {base!r}, which only unpickling can make"
            )
        if not base.endswith(".json"):
            continue
        if info.file_size > _MOST_TEXT:
            raise ModelFileError(f"{path}: {info.filename!r} has {info.file_size} bytes of text")
        try:
            description = json.loads(archive.read(info))
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{path}: {info.filename!r} is damaged: {error}") from error
        _check_description(path, description)


def _check_description(path: Path, description: Any) -> None:
    """Raises an error if torch would call or evaluate anything but ops and expressions of sizes."""
    # a list instead of calls: the file chooses the depth
    pending: list[tuple[Any, int]] = [(description, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > _MOST_DEPTH:
            raise ModelFileError(f"{path}: the program is nested deeper than {_MOST_DEPTH} levels")
        if isinstance(value, list):
            pending += [(item, depth + 1) for item in value]
        elif isinstance(value, dict):
            # a node of the program: torch calls its target
            if isinstance(target := value.get("target"), str) and "inputs" in value:
                _check_target(path, target)
            if isinstance(expression := value.get("expr_str"), str):
                check_expression(path, expression)
            if isinstance(value.get("dims"), dict):
                for name in value["dims"]:
                    check_expression(path, str(name))
            pending += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, str) and "defaultdict" in value:
            raise ModelFileError(f"{path}: an input or output is a defaultdict")


def _check_target(path: Path, target: str) -> None:
    import torch

    found = _TARGET.fullmatch(target)
    if found is not None:
        # `torch.ops` has more attributes than namespaces of ops
        namespace = getattr(torch.ops, found[1], None)
        if isinstance(namespace, torch._ops._OpNamespace) or found[1] == "higher_order":  # pyright: ignore[reportAttributeAccessIssue]
            return
    module, _, name = target.partition(".")
    if module == "_operator" and name in _OPERATORS or module == "math" and name in _MATHEMATICS:
        return
    if _FUNCTIONS_OF_TORCH.fullmatch(target):
        return
    raise ModelFileError(f"{path}: the program calls {target!r}, which is no op")


def check_expression(path: Path, text: str) -> None:
    """Raises an error if a text is no expression of sizes."""
    place = 0
    text = text.strip()
    if len(text) > 10_000 or text.count("(") > 500:
        raise ModelFileError(f"{path}: an expression of sizes has {len(text)} characters")
    while place < len(text):
        found = _TOKEN.match(text, place)
        name = found["name"] if found else None
        if found is None or (name and name not in _NAMES and not _SYMBOL.fullmatch(name)):
            raise ModelFileError(f"{path}: {text[:80]!r} is no expression of sizes")
        if name and "__" in name:
            raise ModelFileError(f"{path}: {text[:80]!r} is no expression of sizes")
        place = found.end()
    powers = len(_POWER.findall(text))
    if powers > 4 or "**" in text or powers > len(_SMALL_POWER.findall(text)):
        raise ModelFileError(f"{path}: {text[:80]!r} has powers of sizes")
