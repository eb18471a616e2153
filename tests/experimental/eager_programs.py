"""Random programs on eager tensors, repeated with one thing changed, each value compared with NumPy's.

A program is drawn as source code, so that each call has a line of its own, as in programs that traces follow. Each
statement computes a tensor (``t3``) and the same with NumPy (``a3``). Between repetitions sizes, dtypes, numbers,
arrays, the tensors that are read or held, written memory and the order of statements change; memory is exported and
written later, values are deleted, kept and asked for in another order, statements raise, and two threads run one
program. Integers and bools are values of their own, whose dtypes promote; they decide which statements run. Weights are
packed after two runs. Random tensors are compared with NumPy's of the same generator, seed and place in the sequence.

``python -m tests.experimental.eager_programs --first SEED --count N`` runs programs; ``--show SEED`` prints one.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from max._interpreter.random import philox
from max.dtype import DType
from max.experimental import Tensor, random
from max.experimental import functional as F
from max.experimental.programs import packed_weights as _packing
from max.experimental.programs import programs, signatures
from max.experimental.record import recorder

REPETITIONS = 12
INPUTS = 3
NUMBERS = 4
CHANGES = (
    "rows", "rows", "columns", "dtype", "number", "number", "kind", "input", "same", "order", "side", "side",
    "stop", "stop", "array", "weight", "held", "held", "boom", "previous", "threads",
)  # fmt: skip
SIZES = (0, 1, 1, 2, 3, 4, 5, 6, 8, 13)
FLOATS = (0.5, 1.0, -0.5, 2.0, 0.0, -0.0, 0.25, 1.5, -1.0, 3.0)
INTEGERS = (1, 2, 0, 3, -1, 5, -2, 4)
REFUSED = (ValueError, TypeError, IndexError, OverflowError)
WEIGHT = 16
"""Rows and columns of weights."""
Array = np.ndarray[Any, Any]


class Boom(Exception):
    """What a program raises by itself."""


class Parameters:
    """What one repetition runs with."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rows, self.columns = int(rng.choice(SIZES[2:])), WEIGHT
        self.dtypes = [str(rng.choice(["float32", "float32", "float64"]))] * INPUTS
        self.numbers: list[Any] = [self.number(rng) for _ in range(NUMBERS)]
        self.stops = [int(rng.integers(-2, 6)) for _ in range(NUMBERS)]
        self.order = list(range(INPUTS))
        self.swap = self.side = self.same = self.threads = False
        self.held, self.boom, self.previous = 0, -1, -1
        self.array_seed = 0
        self.writes: list[int] = []

    def number(self, rng: np.random.Generator) -> Any:
        """A number of Python or NumPy."""
        kind = rng.integers(5)
        if kind == 0:
            return int(rng.choice(INTEGERS))
        if kind == 1:
            return np.float32(rng.choice(FLOATS))
        return float(rng.choice(FLOATS))

    def changed(self, kinds: list[str], rng: np.random.Generator) -> Parameters:
        """A copy with one or two changes of some kinds."""
        other = copy.deepcopy(self)
        for _ in range(int(rng.integers(1, 3))):
            other.change(str(rng.choice(kinds)), rng)
        return other

    def change(self, what: str, rng: np.random.Generator) -> None:
        """Changes one thing."""
        match what:
            case "rows":
                self.rows = int(rng.choice(SIZES))
            case "columns":
                self.columns = int(rng.choice([1, WEIGHT, WEIGHT, 8]))
            case "dtype":
                self.dtypes[int(rng.integers(INPUTS))] = str(rng.choice(["float32", "float64"]))
            case "number" | "kind":
                place = int(rng.integers(NUMBERS))
                old = self.numbers[place]
                self.numbers[place] = self.number(rng) if what == "kind" else type(old)(
                    rng.choice(INTEGERS if isinstance(old, int) else FLOATS)
                )  # fmt: skip
            case "input":
                self.order = [int(i) for i in rng.permutation(INPUTS)]
            case "same":
                self.same = not self.same
            case "order":
                self.swap = not self.swap
            case "side":
                self.side = not self.side
            case "stop":
                self.stops[int(rng.integers(NUMBERS))] = int(rng.integers(-9, 14))
            case "array":
                self.array_seed = int(rng.integers(3))
            case "weight":
                self.writes.append(int(rng.integers(8)))
            case "held":
                self.held = int(rng.integers(4))
            case "boom":
                self.boom = int(rng.integers(30))
            case "previous":
                self.previous = int(rng.integers(INPUTS))
            case _:
                self.threads = True


class World:
    """What a program keeps between repetitions: weights, arrays of the caller, exports, kept values."""

    def __init__(self, rng: np.random.Generator) -> None:
        shape = (WEIGHT, WEIGHT)
        self.arrays = [rng.uniform(-1, 1, shape).astype(np.float32) for _ in range(2)]
        self.weights = [Tensor.constant(array) for array in self.arrays]
        # memory of the caller, which is written in place
        self.shared = rng.uniform(-1, 1, shape).astype(np.float32)
        self.arrays.append(self.shared)
        self.weights.append(Tensor.from_dlpack(self.shared))
        self.constant = np.zeros(1, np.float32)
        self.row = np.zeros(WEIGHT, np.float32)
        self.integers: Array = np.zeros((1, 1), np.int32)
        self.exports: list[tuple[Any, Array]] = []
        self.kept: list[tuple[Tensor, Array]] = []
        self.previous: tuple[Tensor, Array] | None = None
        # the seed of random tensors, and how many were made
        self.seed = self.draws = 0

    def write(self, how: int, value: float) -> None:
        """Writes a weight, by one path."""
        index = how % 2
        weight, array = self.weights[index], self.arrays[index]
        match how:
            case 0 | 1:
                weight[index] = value
                array[index] = value
            case 2 | 3:
                exported = weight.to_numpy()
                exported[index, 1] = array[index, 1] = value
            case 4:
                view = torch.from_dlpack(weight)  # pyright: ignore[reportPrivateImportUsage]
                view[0, 2] = value
                array[0, 2] = value
            case 5:
                exported = weight.driver_tensor.to_numpy()
                self.exports.append((exported[2:], array[2:]))
            case 6:
                self.shared[0] = value
            case _:
                self.arrays[1] = array = np.full_like(array, value)
                self.weights[1] = Tensor.constant(array)


class Writer:
    """Draws the source of a program."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.lines: list[str] = []
        self.live: list[int] = []
        # integers and bools: exact, so that control flow may depend on them
        self.integers: list[int] = []
        self.bools: list[int] = []
        self.count = 0
        self.indent = "    "
        # the arrays of a first repetition
        self.sample: dict[str, Any] = {"p": Parameters(rng), "w": World(rng)}
        shape = (int(rng.integers(2, 6)), WEIGHT)
        self.sample.update({f"a{n}": np.ones(shape, np.float32) for n in range(INPUTS)})
        self.sample["w"].integers = np.ones(shape, np.int32)
        self.sample["w"].draws = 1
        # most programs can be followed: without arrays among arguments, half of them without writes
        self.without: set[int] = {18, 19} if self.below(3) else set()
        if self.below(2):
            self.without |= {20, 21, 22, 25, 26, 29, 42, 44}

    def line(self, text: str) -> None:
        """Appends a line."""
        self.lines.append(self.indent + text)

    def below(self, end: int) -> int:
        """A number from 0 to before `end`."""
        return int(self.rng.integers(end))

    def one_of(self, items: Any) -> Any:
        """One of the items."""
        return items[self.below(len(items))]

    def pick(self) -> int:
        """A value, late ones more often."""
        return self.live[-1 - min(self.below(len(self.live)), self.below(len(self.live)))]

    def value(
        self, tensor: str, array: str, strict: bool = True, pool: list[int] | None = None
    ) -> int:
        """Appends a statement that computes a value; that of an operand where it does not fit.

        Args:
            tensor: The expression of tensors.
            array: That of arrays.
            strict: Whether NumPy refuses what is refused.
            pool: The values of its kind; floats by default.
        """
        pool = self.live if pool is None else pool
        number, operand = self.count, self.one_of(pool) if pool is not self.live else self.pick()
        try:
            with np.errstate(all="ignore"):
                self.sample[f"a{number}"] = eval(array, dict(SCOPE), self.sample)
        except REFUSED:
            # calls that raise are not part of traces, so there are few
            if self.below(16):
                raise
            self.sample[f"a{number}"] = self.sample[f"a{operand}"]
        self.count += 1
        self.line(f"try: t{number} = {tensor}")
        refused = f"refused(lambda: {array}); " if strict else ""
        self.line(f"except REFUSED: {refused}t{number}, a{number} = t{operand}, a{operand}")
        self.line(f"else: a{number} = own({array})")
        pool.append(number)
        return number

    def both(self, text: str, *values: int, strict: bool = True) -> int:
        """A value by an expression that is the same for tensors and arrays; ``$0`` is its first operand."""
        tensor = array = text
        for place, number in enumerate(values):
            tensor = tensor.replace(f"${place}", f"t{number}")
            array = array.replace(f"${place}", f"a{number}")
        return self.value(tensor, array, strict)

    def statement(self) -> None:
        """Appends a random statement."""
        x, k = self.pick(), self.below(NUMBERS)
        kind = self.below(45)
        if kind in self.without:
            kind = self.below(18)
        match kind:
            case 0 | 1:
                self.both(f"$0 {self.one_of('+-*')} $1", x, self.pick())
            case 2 | 3:
                self.both(f"$0 {self.one_of('+-*')} p.numbers[{k}]", x)
            case 4:
                self.both(f"p.numbers[{k}] {self.one_of('+-*')} $0", x)
            case 5:
                self.both(f"$0 * {self.one_of(FLOATS)} + {self.one_of(INTEGERS)}", x)
            case 6:
                self.value(f"F.tanh(t{x})", f"np.tanh(a{x})")
            case 7:
                self.both(f"{self.one_of(('-$0', 'abs($0)'))}", x)
            case 8:
                dtype = self.one_of(("float32", "float64"))
                self.value(f"t{x}.cast(DType.{dtype})", f"a{x}.astype(np.{dtype})")
            case 9:
                self.both(f"$0[{self.one_of(('%s:', ':%s', '%s', '..., %s:', ':%s, :3', '1:%s'))}]"
                          % f"p.stops[{k}]", x, strict=False)  # fmt: skip
            case 10:
                self.both(
                    f"$0[{self.one_of(('::2', '1:', '..., :8', '..., 0', ':, -3:'))}]",
                    x,
                    strict=False,
                )
            case 11:
                shape = self.one_of(("(-1,)", "(-1, 1)", "(2, -1)", f"(-1, {WEIGHT})"))
                self.both(f"$0.reshape({shape})", x)
            case 12:
                self.value(f"t{x}.T", f"np.swapaxes(a{x}, -1, -2)")
            case 13:
                y, axis = self.pick(), self.below(2)
                self.value(f"F.concat([t{x}, t{y}], axis={axis})", f"np.concatenate([a{x}, a{y}], {axis})")  # fmt: skip
            case 14:
                name, axis = self.one_of(("sum", "max", "min", "mean")), self.one_of((0, 1, -1))
                self.value(f"t{x}.{name}({axis})", f"a{x}.{name}({axis}, keepdims=True)")
            case 15 | 16 | 17:
                w = self.below(3)
                self.value(f"(t{x} @ w.weights[{w}]) * 0.25", f"(a{x} @ w.arrays[{w}]) * 0.25")
            case 18:
                self.value(f"t{x} + w.row", f"a{x} + w.row")
            case 19:
                self.value(f"t{x} * w.constant", f"a{x} * w.constant")
                self.line("w.constant[0] += 0.25")
            case 20:
                value = self.one_of((f"p.numbers[{k}]", "2.5"))
                index = self.one_of(("0", "..., 0", "1:", f"p.stops[{k}]"))
                self.line(f"store(t{x}, a{x}, {value}, np.s_[{index}])")
            case 21:
                self.line(f"w.exports.append((export(t{x}, {self.below(3)}), a{x}))")
            case 22:
                # a write from outside is seen by what runs later, so that all runs before
                self.line(f"realize([{', '.join(f't{n}' for n in self.live)}])")
                self.line("write_exports(w)")
            case 23:
                self.line(f"{self.one_of(('', 'if p.side: '))}w.kept.append((t{x}, a{x}))")
            case 24 if len(self.live) > INPUTS:
                self.live.remove(x)
                self.line(f"del t{x}, a{x}")
            case 25:
                self.line(self.one_of(("gc.collect(0)", f"check(t{x}, a{x})", f"t{x}.realize")))
            case 26:
                self.line(f"if p.boom == {self.below(30)}: raise Boom")
            case 27:
                y = self.both("$0 + 0.5", x)
                self.line(f"if p.side: t{y}, a{y} = F.tanh(t{y}), np.tanh(a{y})")
            case 28:
                y, z = self.pick(), self.count
                names = ", ".join(f"t{n}, a{n}" for n in (z, z + 1))
                first = f"t{z}, a{z} = t{x} * 2.0, own(a{x} * 2.0)"
                second = f"t{z + 1}, a{z + 1} = F.abs(t{y}), own(abs(a{y}))"
                self.line(f"if p.swap: {first}; {second}")
                self.line(f"else: {second}; {first}")
                self.line(f"{names} = {names}")
                self.sample |= {f"a{z}": self.sample[f"a{x}"], f"a{z + 1}": self.sample[f"a{y}"]}
                self.live += [z, z + 1]
                self.count += 2
            case 29:
                self.value(
                    f"{self.one_of(('Tensor', 'copy.copy', 'copy.deepcopy'))}(t{x} + 1.0)",
                    f"a{x} + 1.0",
                )
            case 30:
                self.value(
                    f"F.where(t{x} > 0.0, t{x}, 0.5)",
                    f"np.where(a{x} > 0.0, a{x}, 0.5).astype(a{x}.dtype)",
                )
            case 31:
                # indices are checked by the run, which comes later
                indices = "Tensor.from_dlpack(np.int64([0, -1]))"
                self.value(
                    f"F.gather(t{x}, {indices}, axis=0) if len(a{x}) else t{x}",
                    f"a{x}[[0, -1]] if len(a{x}) else a{x}",
                )

            case 32 | 33 | 34 | 35:
                self.integer_statement()
            case 36:
                self.bool_statement()
            case 37:
                q = self.one_of(self.integers)
                self.mixed(q, x)
            case 38:
                b = self.one_of(self.bools)
                self.value(f"F.where(t{b}, t{x}, 0.25)", f"np.where(a{b}, a{x}, 0.25).astype(a{x}.dtype)")  # fmt: skip
            case 39 | 40:
                kind = self.one_of(("uniform", "gaussian"))
                first, second = self.one_of((("-0.5", "1.5"), (f"p.numbers[{k}]", "4.0")))
                self.value(
                    f"drawn(w, '{kind}', t{x}, {first}, {second})",
                    f"samples(w, '{kind}', a{x}, {first}, {second})",
                )
            case 42:
                index = self.one_of(("{}", "..., {}", "1:, {}", "0, {}", "{}, :3"))
                b = self.one_of(self.bools)
                self.value(f"t{x}[{index.format(f't{b}')}]", f"a{x}[{index.format(f'a{b}')}]", False)  # fmt: skip
            case 43:
                # indices in range, which only the run checks
                q, index = (
                    self.one_of(self.integers),
                    self.one_of(("{}", "{}, 1:", "{}, 0", "None, {}")),
                )
                chosen = (
                    f"{{0}}{x}["
                    + index.format(f"{{0}}{q}.reshape((-1,))[:5] % len(a{x})")
                    + f"] if len(a{x}) else {{0}}{x}"
                )
                self.value(chosen.format("t"), chosen.format("a"), False)
            case 44:
                b = self.one_of(self.bools)
                self.line(f"store(t{x}, a{x}, {self.one_of(FLOATS)}, a{b}, t{b})")
            case _:
                q = self.one_of(self.integers)
                y = self.both("$0 + 0.25", x)
                kind = self.one_of(("odd", "loop"))
                if kind == "odd":
                    self.line(f"if odd(t{q}, a{q}): t{y}, a{y} = F.tanh(t{y}), np.tanh(a{y})")
                else:
                    self.line(
                        f"for _ in range(few(t{q}, a{q})): t{y}, a{y} = t{y} * 0.5, own(a{y} * 0.5)"
                    )

    def mixed(self, integer: int, operand: int) -> None:
        """A float and an integer, which promote."""
        op = self.one_of("+-*")
        self.value(
            f"t{operand} {op} t{integer}",
            f"a{operand} {op} a{integer}.astype(joined(a{integer}, a{operand}))",
        )

    def first_integers(self) -> None:
        """Appends the first integers and bools, of which there is always one."""
        n = self.count
        self.line(f"a{n} = own(w.integers); t{n} = Tensor.constant(a{n})")
        self.line(f"t{n + 1}, a{n + 1} = t{n} > 1, a{n} > 1")
        self.sample[f"a{n}"] = self.sample["w"].integers
        self.sample[f"a{n + 1}"] = self.sample[f"a{n}"] > 1
        self.integers, self.bools, self.count = [n], [n + 1], n + 2

    def integer_statement(self) -> None:
        """Appends a statement that computes integers."""
        q, r, k = self.one_of(self.integers), self.one_of(self.integers), self.below(NUMBERS)
        pool = self.integers
        match self.below(12):
            case 0 | 1:
                op = self.one_of("+-*")
                self.value(f"t{q} {op} t{r}", f"a{q} {op} a{r}", pool=pool)
            case 2:
                number = self.one_of(("3", "-2", "7", f"p.stops[{k}]"))
                op = self.one_of("+-*")
                self.value(f"t{q} {op} {number}", f"a{q} {op} {number}", pool=pool)
            case 3:
                number, op = self.one_of((2, 3, -3, 5)), self.one_of(("//", "%"))
                self.value(f"t{q} {op} {number}", f"a{q} {op} {number}", pool=pool)
            case 4:
                form = self.one_of(("-{}", "abs({})"))
                self.value(form.format(f"t{q}"), form.format(f"a{q}"), pool=pool)
            case 5:
                dtype = self.one_of(("int32", "int64", "int16", "uint8"))
                self.value(f"t{q}.cast(DType.{dtype})", f"a{q}.astype(np.{dtype})", pool=pool)
            case 6:
                name, axis = self.one_of(("max", "min")), self.one_of((0, -1))
                self.value(f"t{q}.{name}({axis})", f"a{q}.{name}({axis}, keepdims=True)", pool=pool)
            case 7:
                index = self.one_of(("1:", "::2", "..., :3", f"p.stops[{k}]:"))
                self.value(f"t{q}[{index}]", f"a{q}[{index}]", False, pool)
            case 8:
                b = self.one_of(self.bools)
                self.value(
                    f"F.where(t{b}, t{q}, 5)",
                    f"np.where(a{b}, a{q}, a{q}.dtype.type(5))",
                    pool=pool,
                )
            case 9:
                b = self.one_of(self.bools)
                self.value(f"t{b}.cast(DType.int32)", f"a{b}.astype(np.int32)", pool=pool)
            case 10:
                index = self.one_of(("0", "1:", "..., 0"))
                self.line(f"store(t{q}, a{q}, {self.one_of((3, 0, 7))}, np.s_[{index}])")
            case _:
                self.value(f"t{q}.reshape((-1,))", f"a{q}.reshape(-1)", pool=pool)

    def bool_statement(self) -> None:
        """Appends a statement that computes bools."""
        q, r, b, c = (
            *[self.one_of(self.integers) for _ in "qr"],
            *[self.one_of(self.bools) for _ in "bc"],
        )
        op = self.one_of(("<", ">=", "==", "!="))
        match self.below(5):
            case 0 | 1:
                self.value(f"t{q} {op} t{r}", f"a{q} {op} a{r}", pool=self.bools)
            case 2:
                number = self.one_of((0, 2, -1))
                # a number outside of the dtype is an error as in MAX, where NumPy compares it as it is
                self.value(
                    f"t{q} {op} {number}", f"a{q} {op} a{q}.dtype.type({number})", pool=self.bools
                )
            case 3:
                op = self.one_of("&|^")
                self.value(f"t{b} {op} t{c}", f"a{b} {op} a{c}", pool=self.bools)
            case _:
                self.value(f"~t{b}", f"~a{b}", pool=self.bools)

    def program(self) -> str:
        """The source of a function of parameters, world and inputs."""
        names = ", ".join(f"t{n}, a{n}" for n in range(INPUTS))
        self.lines = [f"def program(p, w, {names}, values):"]
        self.count, self.live = INPUTS, list(range(INPUTS))
        self.first_integers()
        for _ in range(int(self.rng.integers(3, 40))):
            try:
                self.statement()
            except REFUSED:
                continue
        if self.below(4):
            # a last value that needs all others, so that a stretch is the whole program
            total = "Tensor.constant(0.0, dtype=DType.float64)", "np.zeros(())"
            for n in self.live:
                total = (
                    f"{total[0]} + t{n}.cast(DType.float64).reshape((-1,)).sum(0) * 0.125",
                    f"{total[1]} + a{n}.astype(np.float64).reshape(-1).sum(0, keepdims=True) * 0.125",
                )
            self.value(*total)
            # asked for first
            self.live.insert(0, self.live.pop())
        for number in [*self.live, *self.integers, *self.bools]:
            self.line(f"values.append((t{number}, a{number}))")
        return "\n".join(self.lines) + "\n"


def own(value: Any) -> Array:
    """An array on memory of its own."""
    return np.array(value)


def refused(run: Callable[[], Array]) -> None:
    """Raises AssertionError where NumPy has a value."""
    error = sys.exception()
    try:
        array = run()
    except REFUSED:
        return
    raise AssertionError(f"{error!r}, where NumPy has {array}")


def store(tensor: Tensor, array: Array, value: Any, index: Any, mask: Any = None) -> None:
    """Writes elements of both; `mask` is the index of the tensor where it is another than the array's."""
    array[index]  # raises IndexError where NumPy does
    tensor[index if mask is None else mask] = value
    array[index] = value


def joined(integers: Array, floats: Array) -> Any:
    """The dtype of a result of both: that of the floats, and float64 with int64."""
    return np.float64 if integers.dtype == np.int64 else floats.dtype


def odd(tensor: Tensor, array: Array) -> bool:
    """Whether the greatest integer is odd, for both; False without elements."""
    if not array.size:
        return False
    got, expected = tensor.reshape((-1,)).max(0) % 2 == 1, bool(array.max() % 2 == 1)
    assert bool(got) == expected, f"control flow: {got}, NumPy has {expected}"
    return expected


def few(tensor: Tensor, array: Array) -> int:
    """0 to 2, by the least integer of both."""
    if not array.size:
        return 1
    got, expected = int(tensor.reshape((-1,)).min(0)) % 3, int(array.min()) % 3
    assert got == expected, f"control flow: {got}, NumPy has {expected}"
    return expected


def drawn(world: World, kind: str, like: Tensor, first: Any, second: Any) -> Tensor:
    """A random tensor of the shape and dtype of another one."""
    world.draws += 1
    if kind == "uniform":
        return random.uniform_like(like, (first, second))
    return random.gaussian_like(like, first, second)


def samples(world: World, kind: str, like: Array, first: Any, second: Any) -> Array:
    """What the last `drawn` of a world has to have."""
    blocks = np.arange(-(-like.size // 4))
    counters = np.zeros((blocks.size, 4), np.uint32)
    counters[:, 0] = blocks
    words = philox(counters, np.array([world.draws - 1, world.seed], np.uint32))
    unit = (words >> 8) * 2.0**-24
    if kind == "uniform":
        result = unit * (float(second) - float(first)) + float(first)
    else:
        # Box-Muller on pairs of neighbors
        radius = np.sqrt(-2 * np.log(unit[:, ::2] + 2.0**-25))
        angle = 2 * np.pi * unit[:, 1::2]
        normal = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=2)
        result = normal * float(second) + float(first)
    return result.reshape(-1)[: like.size].reshape(like.shape).astype(like.dtype)


def export(tensor: Tensor, how: int) -> Any:
    """An array on the memory of a tensor."""
    match how:
        case 0:
            return tensor.to_numpy()
        case 1:
            return np.asarray(tensor)
        case _:
            return torch.from_dlpack(tensor).numpy()  # pyright: ignore[reportPrivateImportUsage]


def realize(tensors: list[Tensor]) -> None:
    """Computes values."""
    for tensor in tensors:
        tensor.realize  # noqa: B018


def write_exports(world: World) -> None:
    """Writes to exported memory."""
    for number, (exported, array) in enumerate(world.exports):
        if exported.size and exported.flags.writeable:
            exported.flat[0] = array.flat[0] = 0.125 * number


def check(tensor: Tensor, array: Array, what: str = "") -> None:
    """Compares a value."""
    got = tensor.to_numpy()
    assert got.shape == array.shape, f"{what}: shape {got.shape}, NumPy has {array.shape}"
    assert got.dtype == array.dtype, f"{what}: dtype {got.dtype}, NumPy has {array.dtype}"
    if array.dtype.kind != "f":
        np.testing.assert_array_equal(got, array, err_msg=what)
        return
    scale = max(1.0, float(np.nanmax(abs(array), initial=0)))
    np.testing.assert_allclose(got, array, rtol=1e-4, atol=1e-4 * scale, err_msg=what)


SCOPE = {
    "Boom": Boom, "DType": DType, "F": F, "Tensor": Tensor, "check": check, "copy": copy, "drawn": drawn,
    "export": export, "few": few, "joined": joined, "odd": odd,
    "gc": gc, "REFUSED": REFUSED, "refused": refused, "samples": samples, "np": np, "own": own, "realize": realize,
    "store": store, "write_exports": write_exports,
}  # fmt: skip


def source_of(seed: int) -> str:
    """The source of the program of a seed."""
    return Writer(np.random.default_rng(seed)).program()


def pack_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs small weights after two runs, and forgets programs, calls and traces of before."""
    for name, value in {"COST": 0, "RUNS": 2, "BACKOFF": 1, "LEAST_BYTES": 256}.items():
        monkeypatch.setattr(_packing, name, value)
    monkeypatch.setattr(_packing, "under_pressure", lambda _: False)
    for module, name in (
        (recorder, "_sites"), (signatures, "_signatures"), (signatures, "_families"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(programs, "PROGRAMS", programs.ProgramTable())


def run(seed: int) -> Counter[str]:
    """Runs the program of a seed.

    Returns:
        How many repetitions ended in which way, and how many values were compared.

    Raises:
        AssertionError: A value differs from NumPy's.
    """
    rng = np.random.default_rng([seed, 1])
    source = source_of(seed)
    scope: dict[str, Any] = dict(SCOPE)
    exec(compile(source, f"<program {seed}>", "exec"), scope)
    world, base, counts = World(rng), Parameters(rng), Counter[str]()
    kinds = [str(kind) for kind in rng.choice(CHANGES, int(rng.integers(1, 4)))]
    # with a change each time, sizes and numbers become symbols
    drift = rng.integers(3) == 0
    if drift and rng.integers(2):
        kinds = ["rows", "number", "stop"]
    for turn in range(REPETITIONS):
        varies = drift or (turn > 3 and rng.integers(2))
        parameters = base.changed(kinds, rng) if varies else copy.deepcopy(base)
        if rng.integers(4) == 0:
            base = parameters
        if turn > 3 and rng.integers(3) == 0:
            parameters.writes.append(int(rng.integers(8)))
        for how in parameters.writes:
            world.write(how, 0.25 * turn)
        base.writes = []
        try:
            _repeat(scope["program"], parameters, world, rng, counts)
        except Exception as failure:
            raise AssertionError(
                f"seed {seed}, repetition {turn}, {vars(parameters)}: {failure!r}\n{source}"
            ) from failure
    return counts


def _repeat(
    program: Callable[..., None],
    parameters: Parameters,
    world: World,
    rng: np.random.Generator,
    counts: Counter[str],
) -> None:
    world.row[...] = np.random.default_rng(parameters.array_seed).uniform(-1, 1, WEIGHT)
    world.constant[0] = 0.5
    integers = rng.integers(-9, 10, (parameters.rows, parameters.columns))
    world.integers = integers.astype(np.int64 if parameters.side else np.int32)

    def inputs(rng: np.random.Generator) -> list[Any]:
        shape = (parameters.rows, parameters.columns)
        pairs: list[tuple[Tensor, Array]] = []
        for dtype in parameters.dtypes:
            array = rng.uniform(-1, 1, shape).astype(dtype)
            given = array.copy()
            tensor = Tensor.from_dlpack(given) if rng.integers(2) else Tensor.constant(given)
            pairs.append((tensor, array))
        if parameters.same:
            pairs[1] = pairs[0]
        if parameters.previous >= 0 and world.previous is not None:
            pairs[parameters.previous] = world.previous
        return [item for index in parameters.order for item in pairs[index]]

    values: list[tuple[Tensor, Array]] = []
    others: list[tuple[Tensor, Array]] = []
    errors: list[BaseException] = []
    given = inputs(rng)

    def other(given: list[Any], array: Array) -> None:
        # a world of its own, but for the weights, which both read
        own_world = copy.copy(world)
        own_world.exports, own_world.kept, own_world.constant = [], [], array
        try:
            with np.errstate(all="ignore"):
                program(parameters, own_world, *given, others)
                for tensor, expected in others:
                    check(tensor, expected, "thread")
        except (*REFUSED, Boom):
            pass
        except BaseException as error:
            errors.append(error)

    threads: list[threading.Thread] = []
    # threads share the sequence of random tensors, in no certain order
    draws = "drawn" in program.__code__.co_names
    world.seed, world.draws = int(rng.integers(2)), 0
    random.set_seed(world.seed)
    if parameters.threads and not draws:
        world.previous, parameters.previous = None, -1
        mine = [inputs(np.random.default_rng(turn)) for turn in range(2)]
        threads = [threading.Thread(target=other, args=(g, world.constant.copy())) for g in mine]
    for thread in threads:
        thread.start()
    try:
        with np.errstate(all="ignore"):
            program(parameters, world, *given, values)
        counts["whole"] += 1
    except Boom:
        counts["raised by the program"] += 1
    except REFUSED as refusal:
        counts["refused"] += 1
        counts[f"refused: {type(refusal).__name__} {str(refusal)[:60]}"] += 1
        # frames of the traceback hold values
        refusal.__traceback__ = None
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    match parameters.held:
        case 1:
            values.reverse()
        case 2:
            del values[: len(values) // 2]
        case 3:
            del values[len(values) // 2 :]
        case _:
            pass
    for number, (tensor, array) in enumerate(values):
        check(tensor, array, f"value {number} of {len(values)}")
    counts["compared"] += len(values)
    floats = [pair for pair in values if pair[1].dtype.kind == "f"]
    world.previous = floats[-1] if floats and floats[-1][1].ndim == 2 else None
    for tensor, array in world.kept:
        check(tensor, array, "kept")
    counts["compared"] += len(world.kept)
    for tensor, array in zip(world.weights, world.arrays, strict=True):
        check(tensor + 0.0, array, "weight")
    del world.kept[:-3]
    del world.exports[:-2]


def main() -> None:
    """Runs programs; see the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--show", type=int)
    given = parser.parse_args()
    if given.show is not None:
        print(source_of(given.show))
        return
    counts, failures = Counter[str](), 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        pack_soon(monkeypatch)
        for seed in range(given.first, given.first + given.count):
            print(seed, file=sys.stderr, flush=True)
            try:
                counts += run(seed)
            except AssertionError as failure:
                failures += 1
                traceback.print_exception(failure.__cause__, limit=-3)
                print(failure, flush=True)
    print(f"{given.count} programs, {failures} failures, {_packing.packed_programs()} packed")
    for name, count in counts.most_common():
        print(f"{count:7} {name}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
