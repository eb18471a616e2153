"""Random programs: compiled = interpreted. A failing case prints its source."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import kernel as k
from tests.kernel_language.harness import both, compiled, interpreted

WIDTH = 4


class Program:
    """Writes a kernel: scalars a, b, c (i64), x, y (f32 with integral values), vectors u, v (f32)."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.functions: list[str] = []
        self.loops = 0

    def pick(self, *options: str) -> str:
        return self.random.choice(options)

    def integer(self, depth: int = 2) -> str:
        if depth == 0 or self.random.random() < 0.3:
            return self.pick(
                "a", "b", "c", str(self.random.randint(-5, 9)), "data[abs(a) % 8]", "n"
            )
        p, q = self.integer(depth - 1), self.integer(depth - 1)
        return self.pick(
            f"({p} + {q})",
            f"({p} - {q})",
            f"({p} * {self.random.randint(-3, 3)})",
            f"({p} // {self.divisor(q)})",
            f"({p} % {self.divisor(q)})",
            f"k.min({p}, {q})",
            f"k.max({p}, {q})",
            f"({p} if {self.condition(depth - 1)} else {q})",
            f"({p} & 63 | 2)",
            f"helper({p}, {q})",
        )

    def divisor(self, q: str) -> str:
        """A literal, a size, or, rarely, what may be 0 at run time: a 0 that is known at compile time is refused."""
        if self.random.random() < 0.1:
            return self.pick(f"({q} + data[0] - data[0])", "n", "k.max(n, 0)")
        size = "data.shape[0]"
        return self.pick(
            "2", "3", "-4", "-1", "7", size, f"k.min({size}, {size} * 2)", f"k.max({q}, 1)",
            f"(abs({q}) + 1)", f"-({size} + 1)", f"({q} | 1)", f"({q} & 7 | 8)",
        )  # fmt: skip

    def small(self) -> str:
        """An f32 that stays exact."""
        return f"k.f32({self.integer(1)} % 100)"

    def condition(self, depth: int = 1) -> str:
        p, q = self.integer(depth), self.integer(depth)
        simple = f"{p} {self.pick('<', '<=', '==', '!=', '>', '>=')} {q}"
        if depth and self.random.random() < 0.4:
            return f"({simple}) {self.pick('and', 'or')} ({self.condition(depth - 1)})"
        return self.pick(simple, f"not ({simple})", f"k.any(u > {self.small()})")

    def emit(self, pad: str, line: str) -> None:
        self.lines.append(pad + line)

    def statement(self, pad: str, depth: int, in_loop: bool) -> None:
        choice = self.random.random()
        if depth and choice < 0.22:
            self.emit(pad, f"if {self.condition()}:")
            self.block(pad + "    ", depth - 1, in_loop)
            if self.random.random() < 0.6:
                self.emit(pad, "else:")
                self.block(pad + "    ", depth - 1, in_loop)
        elif depth and choice < 0.4:
            self.loops += 1
            i = f"i{self.loops}"
            bound = self.random.randint(0, 4)
            header = self.pick(
                f"for {i} in range({bound}):",
                f"for {i} in range(abs({self.integer(1)}) % 4):",
                f"for {i} in range({bound}, -2, -2):",
                f"for {i} in k.static_range({bound}):",
                f"for {i}, m{i} in k.vectors(abs({self.integer(1)}) % 11, {WIDTH}):",
            )
            self.emit(pad, header)
            self.emit(pad + "    ", f"a += {i}")
            self.block(pad + "    ", depth - 1, True)
        elif in_loop and choice < 0.48:
            self.emit(pad, f"if {self.condition()}:")
            self.emit(pad + "    ", self.pick("break", "continue"))
        elif choice < 0.7:
            self.emit(
                pad, f"{self.pick('a', 'b', 'c')} {self.pick('=', '+=', '-=')} {self.integer()}"
            )
        elif choice < 0.78:
            self.emit(
                pad, f"{self.pick('x', 'y')} = {self.pick('x - y', 'k.max(x, y)', self.small())}"
            )
        elif choice < 0.9:
            first, second = self.pick("u", "v"), self.pick("u", "v")
            expression = self.pick(
                f"k.select({first} < {second}, {second}, x)",
                f"k.min({first}, {second}) + 1.0",
                f"{first} - {second}",
                f"k.shuffle({first}, {second}, (1, 7, 2, 4))",
                f"t[{self.random.randint(0, 2)}]",
                f"t[abs({self.integer(1)}) % 3]",
            )
            self.emit(
                pad, f"{self.pick('u', 'v')} = k.select(k.abs({first}) < 1000.0, {expression}, 0.0)"
            )
        elif choice < 0.95:
            self.emit(
                pad,
                f"t[{self.pick('0', '1', f'abs({self.integer(1)}) % 3')}] = {self.pick('u', 'v')}",
            )
        else:
            self.emit(pad, f"a, b, c = {self.pick('b, a, c', 'c, a, b', 'pair(a, b)[0], b, c')}")

    def block(self, pad: str, depth: int, in_loop: bool) -> None:
        for _ in range(self.random.randint(1, 3)):
            self.statement(pad, depth, in_loop)

    def text(self) -> str:
        self.emit("", "def helper(p, q):")
        self.emit("    ", f"if p {self.pick('<', '>', '==')} {self.random.randint(-3, 3)}:")
        self.emit("    ", f"    return {self.pick('p + q', 'q - 1', '7')}")
        if self.random.random() < 0.5:
            self.emit("    ", "for j in range(3):")
            self.emit("    ", "    if q > 2 * j:")
            self.emit("    ", "        return p - j")
        self.emit("    ", f"return {self.pick('p', 'q', 'k.min(p, q)')}")
        self.emit("", "def pair(p, q):")
        self.emit("    ", "if p < q:")
        self.emit("    ", "    return p, 1")
        self.emit("    ", "return q, p")
        self.emit("", "def program(out: k.Output, outs: k.Output, data: k.Input, n: k.i64):")
        pad = "    "
        for line in (
            "a, b, c = n, 3, n * 2",
            "x, y = k.f32(1), k.f32(n)",
            f"u = k.splat(k.f32(2), {WIDTH})",
            f"v = k.cast(k.iota(k.i32, {WIDTH}), k.f32)",
            f"t = k.tile(k.f32, 3, width={WIDTH}, fill=0.5)",
        ):
            self.emit(pad, line)
        for _ in range(self.random.randint(2, 6)):
            self.statement(pad, 3, False)
        for i, name in enumerate(("a", "b", "c")):
            self.emit(pad, f"out[{i}] = {name}")
        self.emit(pad, "outs[0, 0] = x")
        self.emit(pad, "outs[0, 1] = y")
        for i, name in enumerate(("u", "v", "t[0]", "t[1]", "t[2]")):
            self.emit(pad, f"outs.store({i + 1}, 0, value={name})")
        return "\n".join(self.lines) + "\n"


def check(seed: int, n: int) -> None:
    text = Program(seed).text()
    fn = k.from_source(text, "program", {"k": k})
    args = [np.zeros(3, np.int64), np.zeros((6, WIDTH), np.float32), np.arange(8) * 3 - 7, np.int64(n)]  # fmt: skip
    try:
        try:
            both(fn, args)
        except ZeroDivisionError:
            for run in (compiled, interpreted):
                with pytest.raises(ZeroDivisionError):
                    run(fn, args)
    except Exception as error:
        raise AssertionError(f"seed {seed}, n {n}\n{text}") from error


def test_no_divisor_is_the_number_0():
    """The program of this seed divided by the literal 0, which is refused at compile time."""
    check(122321, 0)


@given(seed=st.integers(0, 10**9), n=st.integers(-6, 6))
@settings(max_examples=60)
def test_random_programs(seed, n):
    check(seed, n)


@pytest.mark.long
@given(seed=st.integers(0, 10**9), n=st.integers(-6, 6))
@settings(max_examples=3000)
def test_many_random_programs(seed, n):
    check(seed, n)
