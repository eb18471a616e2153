"""Kernels broken at random: the compiler answers with errors of its own, or compiles."""

from __future__ import annotations

import ast
import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import kernel as k
from max.kernel.ir.spec import verify
from max.kernel.language.source import FunctionSource, Kernel
from tests.kernel_language import test_language as language
from tests.kernel_language import test_targets as targets

F, I = k.TensorSpec(k.f32, (None,)), k.TensorSpec(k.i64, (None,))  # noqa: E741
F2 = k.TensorSpec(k.f32, (None, None))
KERNELS = [
    (language.saxpy, [F, F, F, k.f32], {"W": 8}),
    (language.transpose, [F2, F2], {}),
    (language.first_negative, [I, F2], {}),
    (language.unrolled_exit, [I, I], {}),
    (language.uses_functions, [F, F], {"epilogue": language.negate}),
    (language.uses_search, [k.TensorSpec(k.i64, (2, 2)), k.TensorSpec(k.i32, (None,)), k.i32], {}),
    (language.variadic, [F, F, F], {}),
    (language.guarded_access, [I, I, k.i64], {}),
    (language.lanes, [k.TensorSpec(k.i32, (10, 8)), k.TensorSpec(k.i32, (16,))], {}),
    (language.tiles, [F2, F2], {"M": 3, "N": 2, "W": 4}),
    (language.strided, [F2, F2, k.TensorSpec(k.i32, (None,))], {"W": 4}),
    (language.views, [F2, F2], {}),
    (language.compile_time, [F, F], {"mode": "other", "table": (1, 2, 3)}),
    (language.two_phases, [F, F, F], {}),
    (targets.everything, [F2, F2, F2], {"W": 8}),
]


class Mutator(ast.NodeTransformer):
    """Changes one node: a name, a number, an operator, an attribute, an argument, a statement."""

    def __init__(self, tree: ast.AST, seed: int) -> None:
        self.random = random.Random(seed)
        nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.expr, ast.stmt)) and n is not tree]
        self.chosen = self.random.choice(nodes)
        self.names = [n.id for n in nodes if isinstance(n, ast.Name)] + [
            "None",
            "missing",
            "max",
            "k",
            "True",
        ]
        self.attributes = [n.attr for n in nodes if isinstance(n, ast.Attribute)] + [
            "nothing",
            "shape",
            "load",
        ]

    def visit(self, node: ast.AST) -> ast.AST:
        if node is not self.chosen:
            return self.generic_visit(node)
        pick = self.random.choice
        if isinstance(node, ast.Attribute) and self.random.random() < 0.5:
            node.attr = pick(self.attributes)
        elif isinstance(node, ast.Call) and self.random.random() < 0.7:
            if node.args and self.random.random() < 0.5:
                node.args.pop(self.random.randrange(len(node.args)))
            elif node.keywords and self.random.random() < 0.7:
                node.keywords.pop()
            else:
                node.args.append(ast.Name(pick(self.names), ast.Load()))
        elif isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            new = pick(
                [
                    ast.Name(pick(self.names), ast.Load()),
                    ast.Constant(pick([0, -1, 1.5, 10**20, "text", None, True, float("nan")])),
                    ast.Tuple([ast.Name(pick(self.names), ast.Load())] * 2, ast.Load()),
                    ast.UnaryOp(pick([ast.USub(), ast.Not(), ast.Invert()]), node),
                    ast.BinOp(node, pick([ast.Add(), ast.Div(), ast.Mod(), ast.Pow(), ast.LShift()]),
                        ast.Name(pick(self.names), ast.Load())),
                    ast.Subscript(node, ast.Name(pick(self.names), ast.Load()), ast.Load()),
                    ast.Attribute(node, pick(self.attributes), ast.Load()),
                    ast.Compare(node, [ast.Lt()], [ast.Name(pick(self.names), ast.Load())]),
                    ast.Call(node, [], []),
                    ast.Starred(node, ast.Load()),
                ]
            )  # fmt: skip
            return ast.copy_location(new, node)
        elif isinstance(node, ast.stmt):
            new = pick(
                [
                    ast.Pass(),
                    ast.Break(),
                    ast.Return(ast.Name(pick(self.names), ast.Load())),
                    ast.Continue(),
                ]
            )
            return ast.copy_location(new, node)
        return node


def check(index: int, seed: int) -> None:
    fn, specs, params = KERNELS[index]
    tree = copy.deepcopy(fn.source.node)
    mutated = ast.fix_missing_locations(Mutator(tree, seed).visit(tree))
    source = FunctionSource(mutated, fn.source.file, fn.source.globals, fn.source.closure)
    try:
        ir = k.specialize(Kernel(fn, source), specs, params)
    except k.KernelError as error:
        assert all(d.location.line > 0 for d in error.diagnostics)
        return
    except Exception as error:
        raise AssertionError(f"kernel {index}, seed {seed}\n{ast.unparse(mutated)}") from error
    verify(ir)


@given(index=st.integers(0, len(KERNELS) - 1), seed=st.integers(0, 10**9))
@settings(max_examples=150)
def test_random_mistakes(index, seed):
    check(index, seed)


@pytest.mark.long
@given(index=st.integers(0, len(KERNELS) - 1), seed=st.integers(0, 10**9))
@settings(max_examples=10000)
def test_many_random_mistakes(index, seed):
    check(index, seed)
