"""The writer of a function's LLVM text, the first argument of all lowering functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from max.kernel.ir.nodes import Atom, Leave, Let, Raise, Ref, Stmt
from max.kernel.lowering.contraction import Contraction
from max.kernel.lowering.types import const_text
from max.kernel.targets.target import LLVMTarget

StatementLowering = Callable[["Writer", Any], None]


class Writer:
    """Writes one function.

    Args:
        target: The processor.
        statements: The functions that lower statements, by the type of the statement.
    """

    def __init__(
        self, target: LLVMTarget, statements: Mapping[type[Any], StatementLowering]
    ) -> None:
        self.target = target
        self._statements = statements
        self.lines: list[str] = []
        self.globals: list[str] = []
        self.declarations: set[str] = set()
        self.aliases: dict[int, str] = {}  # names of values other than %v<id>
        self.slots: dict[int, str] = {}  # the addresses of slots
        self.block = "entry"  # the label of the basic block that is being written
        self.loop_depth = 0
        self.polls = False  # whether the function looks up the worker's alert word
        self.contraction = Contraction({}, {})
        self.words: dict[int, str] = {}
        """On arm64, the 32-bit words that are in all lanes of a vector, by the id of the vector's name."""
        self.uses_tiles = False
        self.raises: list[tuple[str, list[str]]] = []
        """The blocks that go to the block of all errors, with the number of the message and its values as words."""
        self.tile_functions: dict[str, str] = {}  # which emulate operations on matrix tiles
        self.tile_globals: list[str] = []
        self.functions: dict[str, str] | None = None
        """The modules of called functions by name; None: their bodies are part of this function."""
        self.outlined: dict[int, tuple[Ref | int, ...]] = {}
        """The outlined bodies by label, with the values and slots of this function that they use."""
        self._temps = 0
        self._labels = 0

    def nested_writer(self) -> Writer:
        """Creates a writer for a function that this one calls."""
        w = Writer(self.target, self._statements)
        w.loop_depth, w.contraction = self.loop_depth, self.contraction
        return w

    # ***** instructions *****
    def out(self, line: str) -> None:
        """Emits an instruction."""
        self.lines.append("  " + line)

    def temp(self, instruction: str) -> str:
        """Emits an instruction and names its value."""
        self._temps += 1
        name = f"%t{self._temps}"
        self.lines.append(f"  {name} = {instruction}")
        return name

    def atom(self, a: Atom) -> str:
        """A value without its type."""
        if isinstance(a, Ref):
            return self.aliases.get(a.id) or f"%v{a.id}"
        return const_text(a)

    def alias(self, s: Let, name: str) -> None:
        """Makes the name of a value an alias of another name."""
        self.aliases[s.ref.id] = name

    def call(self, type: str, intrinsic: str, args: list[tuple[str, str]], flags: str = "") -> str:
        """Calls an intrinsic or a C function and names the result."""
        self.declarations.add(f"{type} @{intrinsic}({', '.join(t for t, _ in args)})")
        arguments = ", ".join(f"{t} {a}" for t, a in args)
        return self.temp(f"call {flags}{type} @{intrinsic}({arguments})")

    # ***** basic blocks *****
    def label(self, prefix: str) -> str:
        """A new label."""
        self._labels += 1
        return f"{prefix}{self._labels}"

    def start(self, label: str) -> None:
        """Begins a basic block."""
        self.lines.append(f"{label}:")
        self.block = label

    def jump(self, label: str) -> None:
        """Ends a basic block."""
        self.out(f"br label %{label}")

    def body(self, statements: Iterable[Stmt]) -> bool:
        """Lowers statements; returns whether control reaches their end."""
        table = self._statements
        for s in statements:
            kind = s.__class__
            table[kind](self, s)
            if kind is Leave or kind is Raise:
                # the block has ended: further instructions would not be valid LLVM IR
                return False
        return True
