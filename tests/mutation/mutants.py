"""The mutants of a source file: small changes of its syntax tree, each of which a test should notice.

A mutant replaces the text of one node, so that the lines around it, comments included, stay as they
are. Not mutated: imports, annotations, docstrings, text of messages, logging, ``assert``, decorators,
and what only a type checker reads.
"""

from __future__ import annotations

import ast
import difflib
import random
import re
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitXor: ast.BitOr,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
LOGGERS = {"logger", "logging", "log", "warnings"}


@dataclass(frozen=True)
class Mutant:
    """One change of a file.

    Args:
        kind: What is changed: "compare", "constant", "slice", "operator", "boolean", "branch", "not",
            "call" or "drop".
        function: The qualified name of the function or class that it is in; empty at the top level.
        start: Where the replaced text begins, in bytes of the file.
        end: Where it ends.
        text: What it is replaced by.
        line: The number of the first line.
        before: That line, without indentation.
        after: The line as it is changed.
    """

    kind: str
    function: str
    start: int
    end: int
    text: str
    line: int
    before: str
    after: str

    def apply(self, source: str) -> str:
        """The changed file.

        Args:
            source: The file that the mutant was made from.
        """
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def __str__(self) -> str:
        return f"{self.line}: {self.kind}: {self.before}  ->  {self.after}"


def mutants_of(source: str) -> list[Mutant]:
    """All mutants of a file, in the order of their lines; each compiles.

    Args:
        source: The file's text.

    Raises:
        SyntaxError: The file is no Python.
    """
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    compiling = (mutant for mutant, part in finder.mutants if _compiles(mutant, part, source))
    unique = {mutant.apply(source): mutant for mutant in compiling}
    return sorted(unique.values(), key=lambda mutant: (mutant.start, mutant.end, mutant.text))


class _Finder(ast.NodeVisitor):
    """Collects the mutants of a tree."""

    def __init__(self, source: str) -> None:
        self.source = source
        # each with the part of the file that says whether it compiles
        self.mutants: list[tuple[Mutant, tuple[int, int]]] = []
        self._lines = source.splitlines()
        self._offsets = [0]
        for line in source.encode().splitlines(keepends=True):
            self._offsets.append(self._offsets[-1] + len(line))
        self._scope: list[str] = []
        # where the outermost function begins and ends; the file, outside of functions
        self._part = (0, len(source.encode()))
        # names that the functions around a statement have bound above it
        self._bound: list[set[str]] = [set()]

    def _at(self, line: int, column: int) -> int:
        return self._offsets[line - 1] + column

    def _replace(self, kind: str, node: ast.expr | ast.stmt, text: str) -> None:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._at(node.lineno, node.col_offset)
        end = self._at(node.end_lineno, node.end_col_offset)
        mutant = Mutant(kind, ".".join(self._scope), start, end, text, node.lineno, "", "")
        before = self._lines[node.lineno - 1 : node.end_lineno]
        after = mutant.apply(self.source).splitlines()
        after = after[node.lineno - 1 : len(after) - len(self._lines) + node.end_lineno]
        for tag, first, last, new, new_last in difflib.SequenceMatcher(
            None, before, after, autojunk=False
        ).get_opcodes():
            if tag != "equal":
                mutant = Mutant(
                    kind, mutant.function, start, end, text, node.lineno + first,
                    _joined(before[first:last]), _joined(after[new:new_last]),
                )  # fmt: skip
                self.mutants.append((mutant, self._part))
                return

    # -- what is left alone

    def visit_Import(self, node: ast.Import) -> None:
        """Imports stay."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Imports stay."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Assertions are tests themselves."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Messages; and Python 3.11 has no positions within them."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """A field or a variable; its annotation stays."""
        if node.value is not None:
            self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self._bound[-1].add(node.target.id)

    def visit_Call(self, node: ast.Call) -> None:
        """A call of ``min``, ``any`` and their like becomes one of the opposite."""
        if isinstance(node.func, ast.Name) and node.func.id in ("cast", "TypeVar"):
            for argument in node.args[1:]:
                self.visit(argument)
            return
        if isinstance(node.func, ast.Name) and node.func.id in CALLS:
            self._replace("call", node.func, CALLS[node.func.id])
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        """``strict=True`` of ``zip`` is an assertion."""
        if node.arg != "strict":
            self.generic_visit(node)

    # -- definitions

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """A class: its body; that of a protocol is never run."""
        if any(_is_protocol(base) for base in node.bases):
            return
        self._scope.append(node.name)
        self._body(node.body)
        self._scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """A function: its defaults and its body."""
        whole = self._part
        if len(self._bound) == 1:
            assert node.end_lineno is not None
            first = min(part.lineno for part in (node, *node.decorator_list))
            self._part = (self._at(first, 0), self._at(node.end_lineno + 1, 0))
        self._scope.append(node.name)
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self._bound.append({argument.arg for argument in arguments})
        self._body(node.body)
        self._bound.pop()
        self._scope.pop()
        self._part = whole

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """As a function."""
        self.visit_FunctionDef(node)

    def _body(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if not _is_text(statement):
                self.visit(statement)

    # -- statements

    def visit_If(self, node: ast.If) -> None:
        """Takes the other branch."""
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        """Its body; the loop's condition is mutated as an expression."""
        if not isinstance(node.test, ast.Constant):
            self.visit(node.test)
        self._body([*node.body, *node.orelse])

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call for its effect is dropped."""
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Yield | ast.YieldFrom | ast.Await):
            self.generic_visit(node)
            return
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            if isinstance(call.func.value, ast.Name) and call.func.value.id in LOGGERS:
                return
        self._drop(node)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Dropped where that leaves a value: an attribute, an item, a name that was bound before."""
        names = {
            n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)
        }
        stored = [n for target in node.targets for n in ast.walk(target) if isinstance(n, ast.expr)]
        places = [n for n in stored if isinstance(getattr(n, "ctx", None), ast.Store)]
        if (
            self._scope
            and self._scope[-1] != "__init__"
            and all(
                isinstance(place, ast.Attribute | ast.Subscript | ast.Tuple | ast.List)
                or (isinstance(place, ast.Name) and place.id in self._bound[-1])
                for place in places
            )
        ):
            self._drop(node)
        self._bound[-1] |= names
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Dropped, and with the opposite operator."""
        self._drop(node)
        if type(node.op) in OPERATORS:
            changed = ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value)
            self._replace("operator", node, ast.unparse(changed))
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        """Replaces a returned value by None, or a bare ``return`` by ``pass``."""
        if node.value is None:
            self._drop(node)
        # None and False are the same to most callers
        elif not (isinstance(node.value, ast.Constant) and node.value.value in (None, False)):
            self._replace("drop", node, "return None")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Dropped; the message stays."""
        self._drop(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        """Dropped."""
        self._drop(node)

    def visit_Break(self, node: ast.Break) -> None:
        """Dropped."""
        self._drop(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        """Dropped."""
        self._drop(node)

    def _drop(self, node: ast.stmt) -> None:
        self._replace("drop", node, "pass")

    # -- expressions

    def _negate(self, test: ast.expr) -> None:
        """Swaps branches, unless another mutant of the condition does."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            if not isinstance(test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                return
        self._replace("branch", test, f"not ({ast.unparse(test)})")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Takes the other value."""
        self._negate(node.test)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """``not`` is removed."""
        if isinstance(node.op, ast.Not):
            self._replace("not", node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """``and`` for ``or``, and back; each operand left out."""
        other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        self._replace("boolean", node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
        for index in range(len(node.values)):
            rest = [*node.values[:index], *node.values[index + 1 :]]
            kept = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
            self._replace("boolean", node, f"({ast.unparse(kept)})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Each operator becomes its neighbor: ``<`` and ``<=``, ``==`` and ``!=``."""
        for index, op in enumerate(node.ops):
            ops = [*node.ops]
            ops[index] = COMPARISONS[type(op)]()
            changed = ast.Compare(node.left, ops, node.comparators)
            self._replace("compare", node, ast.unparse(changed))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Each operator becomes its opposite."""
        if type(node.op) in OPERATORS and not _is_text(node.left) and not _is_text(node.right):
            changed = ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
            self._replace("operator", node, f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        """A bound that is not a number moves by one."""
        for bound in (node.lower, node.upper):
            if bound is not None and not _is_number(bound):
                for step in ("+ 1", "- 1"):
                    self._replace("slice", bound, f"({ast.unparse(bound)}) {step}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """A number moves by one; True and False are swapped."""
        if isinstance(node.value, bool):
            self._replace("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace("constant", node, str(node.value + 1))
            lower = node.value - 1
            self._replace("constant", node, str(lower) if lower >= 0 else f"({lower})")
        elif isinstance(node.value, float):
            self._replace("constant", node, repr(node.value + 1))


def _compiles(mutant: Mutant, part: tuple[int, int], source: str) -> bool:
    """Whether a mutant is Python (``break`` outside of a loop is not)."""
    first, end = part
    data = source.encode()
    text = data[first : mutant.start] + mutant.text.encode() + data[mutant.end : end]
    if text[:1] == b" ":  # a method
        text = b"if True:\n" + text
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)


def _is_text(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else node
    return isinstance(value, ast.JoinedStr) or (
        isinstance(value, ast.Constant) and isinstance(value.value, str)
    )


def _is_number(node: ast.expr) -> bool:
    operand = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(operand, ast.Constant)


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Some of the mutants, the same ones for the same seed, in their order.

    Args:
        mutants: All of them.
        count: How many.
        seed: Chooses them.
    """
    chosen = set(random.Random(seed).sample(range(len(mutants)), min(count, len(mutants))))
    return [mutant for index, mutant in enumerate(mutants) if index in chosen]


def _is_protocol(base: ast.expr) -> bool:
    """Whether the base of a class is `typing.Protocol`, and no class that implements a network protocol."""
    return re.fullmatch(r"(\w+\.)*Protocol(\[.*\])?", ast.unparse(base)) is not None
