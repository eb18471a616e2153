"""Compiles templates to code that counts its work.

Steps are counted where code may run more than once: at the beginning of loops' bodies, macros and blocks, by the size
of the body. Bytes are counted where values become text, are joined or cut. Calls, filters and arithmetic count in the
environment, which the code calls for them.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context

from max.pipelines.tokenization.templates.budget import Budget, TemplateLimitError

__all__ = ["CountingCodeGenerator", "CountingContext", "add_steps"]

_NODES_PER_STEP = 8
_MOST_NAMES_AND_BRANCHES = 1 << 20
"""The bound of the product of both; published ones have up to 6,000."""
_CHARACTERS_PER_NODE = 16
_NODES_PER_ITEM, _NODES_PER_PAIR = 4, 12  # what literals add, for the memory of their elements


class CountingContext(Context):
    """The variables of a rendering, with its budget."""

    budget: Budget

    def derived(self, locals: dict[str, Any] | None = None) -> CountingContext:
        """As jinja's, with the same budget.

        Args:
            locals: More variables.
        """
        context: Any = super().derived(locals)
        context.budget = self.budget
        return context


def add_steps(template: nodes.Template) -> None:
    """Adds statements that count steps to a template's syntax tree.

    Args:
        template: The tree; it is changed.

    Raises:
        TemplateLimitError: Its compilation would take long.
    """
    names = {name.name for name in template.find_all(nodes.Name)}
    branches = sum(
        1 for _ in template.find_all((nodes.If, nodes.For, nodes.Macro, nodes.CallBlock))
    )
    # jinja copies the table of names for each branch
    if len(names) * branches > _MOST_NAMES_AND_BRANCHES:
        raise TemplateLimitError(
            f"it has {len(names)} names and {branches} branches, which are too many"
        )
    _weigh_and_count(template)


def _weigh_and_count(node: nodes.Node) -> int:
    """Adds the statements below a node; returns its weight in nodes."""
    weight = 1
    if isinstance(node, nodes.TemplateData):
        weight += len(node.data) // _CHARACTERS_PER_NODE
    elif isinstance(node, nodes.Const) and isinstance(node.value, str):
        weight += len(node.value) // _CHARACTERS_PER_NODE
    elif isinstance(node, (nodes.List, nodes.Tuple)):
        weight += _NODES_PER_ITEM * len(node.items)
    elif isinstance(node, nodes.Dict):
        weight += _NODES_PER_PAIR * len(node.items)
    weight += sum(map(_weigh_and_count, node.iter_child_nodes()))
    if isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
        count = _counting_expression(1 + weight // _NODES_PER_STEP, node.lineno)
        node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        # elements that the test leaves out are counted too
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(count, node.test, lineno=node.lineno)
    return weight


def _counting_expression(steps: int, line: int) -> nodes.Expr:
    """An expression that counts steps and is true."""
    # jinja's class refuses to be called
    code = object.__new__(nodes.InternalName)
    nodes.Node.__init__(code, f"budget.step({steps})", lineno=line)
    return code


class CountingCodeGenerator(CodeGenerator):
    """Writes code that passes values by the budget where they become text, are joined, cut or compared."""

    def write_commons(self) -> None:
        """Begins a function of the template."""
        super().write_commons()
        self.writeline("budget = context.budget")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: object) -> None:
        if frame.eval_ctx.volatile:
            self.write("budget.output_text(escape if context.eval_ctx.autoescape else str, ")
        elif frame.eval_ctx.autoescape:
            self.write("budget.output_text(escape, ")
        else:
            self.write("budget.text(")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Writes ``a ~ b``.

        Args:
            node: The expression.
            frame: Its place.
        """
        if frame.eval_ctx.volatile:
            join = "markup_join if context.eval_ctx.volatile else str_join"
        else:
            join = "markup_join" if frame.eval_ctx.autoescape else "str_join"
        self.write(f"budget.concatenate({join}, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """Writes a comparison; one with a literal compares no more than the literal.

        Args:
            node: The expression.
            frame: Its place.
        """
        last = node.ops[0]
        if len(node.ops) == 1 and last.op in ("in", "notin") and not _is_literal(last.expr):
            self.write("(not budget.contains(" if last.op == "notin" else "(budget.contains(")
            self.visit(node.expr, frame)
            self.write(", ")
            self.visit(last.expr, frame)
            self.write("))")
            return
        if len(node.ops) == 1 and (_is_literal(node.expr) or _is_literal(last.expr)):
            super().visit_Compare(node, frame)
            return
        self.write("(")
        self._operand(node.expr, frame)
        for each in node.ops:
            self.write(f" {_OPERATORS[each.op]} ")
            self._operand(each.expr, frame)
        self.write(")")

    def _operand(self, node: nodes.Expr, frame: Frame) -> None:
        self.write("budget.operand(")
        self.visit(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """Writes ``value[key]`` or ``value[start:stop:step]``.

        Args:
            node: The expression.
            frame: Its place.
        """
        where = node.arg
        if isinstance(where, nodes.Const):
            super().visit_Getitem(node, frame)
        elif isinstance(where, nodes.Slice):
            self.write("budget.part(")
            self.visit(node.node, frame)
            self.write(", slice(")
            for each in (where.start, where.stop, where.step):
                if each is None:
                    self.write("None")
                else:
                    self.visit(each, frame)
                self.write(", ")
            self.write("))")
        else:
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self.write(", budget.key(")
            self.visit(where, frame)
            self.write("))")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """Writes ``{key: value}``.

        Args:
            node: The expression.
            frame: Its place.
        """
        self.write("{")
        for each in node.items:
            self.write("budget.key(")
            self.visit(each.key, frame)
            self.write("): ")
            self.visit(each.value, frame)
            self.write(", ")
        self.write("}")


_OPERATORS = {
    "eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in", "notin": "not in",
}  # fmt: skip


def _is_literal(node: nodes.Expr) -> bool:
    """Whether a node is a text, number or truth value, or a list of those."""
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)
