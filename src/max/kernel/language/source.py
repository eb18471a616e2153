"""Syntax trees of Python functions and source texts, and the values of the names in them."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import re
import textwrap
import types
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

from max._dataclass import dataclass
from max._host.process_caches import cached_results
from max._host.reentry import reentrant_lock
from max.kernel.errors import KernelError

FunctionNode = ast.FunctionDef | ast.Lambda


@dataclass(frozen=True, eq=False)
class FunctionSource:
    """A function's syntax tree with the values that its free names have."""

    node: FunctionNode
    file: str
    globals: Mapping[str, Any]
    closure: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        return getattr(self.node, "name", "<lambda>")

    @property
    def scope(self) -> Mapping[str, Any]:
        """The values of the names that are visible at its definition."""
        return ChainMap(self.closure, self.globals)  # type: ignore[arg-type]  # read only


_parsing = reentrant_lock()


def _parse(text: str, file: str) -> ast.Module:
    """Parses a file; one thread at a time, as CPython 3.11 counts the recursion of all threads together."""
    with _parsing:
        return ast.parse(text, file)


@cached_results(8192)
def _function_at(file: str, text: str, line: int) -> ast.FunctionDef | None:
    """The function that starts on a line of a file (first decorator, or ``def``).

    A function at the top level is parsed by itself, from its first line to the next statement of the file: a kernel
    needs few functions of a large file. Where that is no function, as the lines of a text stand there, the whole file
    is parsed.
    """
    lines = text.split("\n")
    if lines[line - 1 : line] and lines[line - 1].startswith(("@", "def ")):
        first = end = line - 1
        while end < len(lines) and lines[end].startswith("@"):
            end += 1
        end += 1
        # a statement of the file: no indented line, closing bracket, comment or empty line
        while end < len(lines) and not _STATEMENT.match(lines[end]):
            end += 1
        try:
            # the empty lines keep the numbers of lines
            (node,) = _parse("\n" * first + "\n".join(lines[first:end]), file).body
        except (SyntaxError, ValueError):
            pass
        else:
            if isinstance(node, ast.FunctionDef):
                return node
    return _functions_of_file(file, text).get(line)


_STATEMENT = re.compile(r"[^\s)\]}#]")


@cached_results(512)
def _functions_of_file(file: str, text: str) -> dict[int, ast.FunctionDef]:
    """The functions of a file by the line of their first decorator, and by that of their ``def``."""
    functions: dict[int, ast.FunctionDef] = {}
    for node in _statements(_parse(text, file).body):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            functions[first] = functions[node.lineno] = node
    return functions


def _statements(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The statements of a body and of nested bodies; expressions, which are most of a tree, are not visited."""
    for node in nodes:
        yield node
        for name in _BODIES:
            if inner := getattr(node, name, None):
                yield from _statements(inner)


_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
"""The fields of statements, handlers and cases that hold statements, or handlers and cases."""


def source_of(fn: types.FunctionType) -> FunctionSource:
    """The syntax tree of a Python function.

    Raises:
        KernelError: the source is not at hand.
    """
    code = fn.__code__
    lines = linecache.getlines(code.co_filename, fn.__globals__)
    if not lines:
        raise KernelError(
            f"the source of {fn.__qualname__} ({code.co_filename}) is not at hand; use k.from_source"
        )
    node = _function_at(code.co_filename, "".join(lines), code.co_firstlineno)
    if node is None or node.name != fn.__name__:
        raise KernelError(
            f"{fn.__qualname__} is not at {code.co_filename}:{code.co_firstlineno}; did the file change?"
        )
    closure: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            closure[name] = cell.cell_contents
        except ValueError:  # a cell that is not filled yet: an error only where the name is used
            continue
    return FunctionSource(node, code.co_filename, fn.__globals__, closure)


class Function:
    """A function of the kernel language; calling it runs it in plain Python."""

    def __init__(self, fn: Callable[..., Any], source: FunctionSource | None = None) -> None:
        self.__name__: str = fn.__name__
        functools.update_wrapper(self, fn)
        self._fn = fn  # after the update, which copies the attributes of a wrapped kernel
        self._source = source

    @property
    def source(self) -> FunctionSource:
        """The function's syntax tree."""
        if self._source is None:
            self._source = source_of(self._fn)  # pyright: ignore[reportArgumentType]
        return self._source

    @property
    def name(self) -> str:
        """The name of the Python function."""
        return self.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)


class InlineFunction(Function):
    """A helper, inlined where a kernel calls it, and generic in the types of its arguments."""

    #: Whether its machine code is a separate function, see `outlined`.
    outlined = False

    def __repr__(self) -> str:
        return f"<inline function {self.__name__}>"


class Kernel(Function):
    """A kernel. ``specialize`` compiles it for given arguments; a call runs it in plain Python."""

    #: The op's name where the kernel was registered.
    symbol: str | None = None

    def __repr__(self) -> str:
        return f"<kernel {self.symbol or self.__name__}>"

    @property
    def location(self) -> tuple[str, int]:
        """File and line of the definition."""
        return self.source.file, self.source.node.lineno


def kernel(fn: Callable[..., Any]) -> Kernel:
    """Marks a function as a kernel."""
    return Kernel(fn)


def inline(fn: Callable[..., Any]) -> InlineFunction:
    """Marks a function as a helper of kernels: inlined at each call."""
    return InlineFunction(fn)


def outlined(fn: Callable[..., Any]) -> InlineFunction:
    """Marks a function as a helper without a result whose machine code all kernels share.

    The frontend inlines it like any other helper, and compiles the body once for equal calls. Its code is a function of
    its own, compiled once for all kernels that call it with arguments of equal types: for long loops that many kernels
    have in common. A call costs a few nanoseconds, and variables of the caller that it writes are in memory there.
    """
    function = InlineFunction(fn)
    function.outlined = True
    return function


_source_numbers = itertools.count(1)


def from_source(text: str, name: str, globals: Mapping[str, Any] | None = None) -> Kernel:
    """A kernel from source text, for generated code. The text shows up in errors and debuggers.

    Args:
        text: one or more function definitions; those other than the kernel are inlined where it calls them.
        name: which of the definitions is the kernel.
        globals: the values of the names that the text uses.

    Raises:
        KernelError: the text does not parse, or does not define ``name``.
    """
    file, functions = _parse_functions(textwrap.dedent(text), name)
    namespace: dict[str, Any] = dict(globals or {})
    for node in functions.values():
        if node.name != name:
            namespace[node.name] = InlineFunction(
                _Lazy(node, file, namespace), FunctionSource(node, file, namespace)
            )
    return Kernel(
        _Lazy(functions[name], file, namespace), FunctionSource(functions[name], file, namespace)
    )


@cached_results(1024)
def _parse_functions(text: str, name: str) -> tuple[str, dict[str, ast.FunctionDef]]:
    """The file name under which a text is shown, and its functions."""
    file = f"<kernel {name} {next(_source_numbers)}>"
    # where tracebacks and debuggers find the text
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    try:
        tree = _parse(text, file)
    except SyntaxError as error:
        raise KernelError(
            f"{file}:{error.lineno}:{error.offset}: {error.msg}\n    {error.text or ''}"
        ) from None
    functions: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            raise KernelError(f"{file}:{node.lineno}: only function definitions are allowed here")
        functions[node.name] = node
    if name not in functions:
        raise KernelError(
            f"{file} does not define {name!r}; it defines {', '.join(functions) or 'nothing'}"
        )
    return file, functions


class _Lazy:
    """A function of a source text, created when it first runs in plain Python."""

    def __init__(self, node: ast.FunctionDef, file: str, namespace: dict[str, Any]) -> None:
        self.node, self.file, self.namespace = node, file, namespace
        self.__name__ = self.__qualname__ = node.name
        self.__doc__ = ast.get_docstring(node)
        self.__module__ = "max.kernel"
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            self._function = self._make()
        return self._function(*args, **kwargs)

    def _make(self) -> Callable[..., Any]:
        # without decorators: it is a plain function here
        bare = ast.copy_location(ast.FunctionDef(**dict(ast.iter_fields(self.node))), self.node)
        bare.decorator_list = []
        scope = dict(self.namespace)
        exec(compile(ast.Module([bare], []), self.file, "exec"), scope)
        return scope[self.node.name]


def assigned_names(nodes: list[ast.stmt]) -> frozenset[str]:
    """The names that statements assign, without those of nested functions."""
    names: set[str] = set()
    for node in nodes:
        names |= _assigned_names(node)
    return frozenset(names)


def _assigned_names(node: ast.AST) -> frozenset[str]:
    # kept on the node: a loop may be compiled several times
    cached = getattr(node, "_assigned_names", None)
    if cached is None:
        cached = frozenset(_walk_assigned(node))
        node._assigned_names = cached  # type: ignore[attr-defined]
    return cached


def _walk_assigned(node: ast.AST) -> Iterator[str]:
    """The names that a statement assigns, without those of lambdas and comprehensions."""
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Store):
            yield node.id
        return
    if isinstance(node, ast.FunctionDef):
        yield node.name
        return
    if isinstance(node, (ast.Lambda, ast.ListComp, ast.GeneratorExp)):
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk_assigned(child)


def returns_early(node: FunctionNode) -> bool:
    """Whether a ``return`` may stand inside of control flow."""
    if isinstance(node, ast.Lambda):
        return False
    cached = getattr(node, "_returns_early", None)
    if cached is None:
        cached = any(
            isinstance(n, ast.Return)
            for stmt in node.body
            if not isinstance(stmt, ast.Return)
            for n in _statements([stmt])
        )
        node._returns_early = cached  # type: ignore[attr-defined]
    return cached
