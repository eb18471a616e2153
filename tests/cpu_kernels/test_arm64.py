"""Machine code for arm64: LLVM cross-compiles the main kernels, and the tests count instructions in the inner loops.

A loop is a basic block that jumps back to itself, so its instructions are the work of one step. The counts are upper
bounds: without an arm64 machine they stand for the speed of the kernels.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import pytest

from max import kernel as k
from max._backends.cpu.backend import cpu_backends
from max._backends.cpu.kernels import library
from max._backends.cpu.kernels.products.dense import panels
from max._backends.cpu.kernels.products.quantized.packed import FORMATS
from max._backends.cpu.runtime import jit
from max._backends.kernel_call import Arg, Operand
from max._compiler.pipeline import compile_module
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops
from max.kernel.targets import host

TRIPLE = "aarch64-unknown-linux-gnu"
F32, BF16, F16 = DType.float32, DType.bfloat16, DType.float16
# functions of libc, present in every process
LIBRARY = {"memset", "memcpy", "memmove"}
# processors by features: of 2016 (Cortex-A72), 2019 (Neoverse N1, Apple M1), 2021 (Neoverse V1, Apple M2)
PLAIN, DOT, MATRIX = (), ("dotprod",), ("dotprod", "i8mm", "bf16")

pytestmark = pytest.mark.plain_code


class Loop(NamedTuple):
    """The instructions of a loop, with their counts."""

    lines: list[str]
    ops: Counter[str]

    def spills(self) -> list[str]:
        """Vector spills to the stack."""
        return [x for x in self.lines if re.match(r"(ld|st)[a-z]*\s+[qd]\d.*\[sp", x)]


def target(features: tuple[str, ...]) -> k.Target:
    return k.CPUTarget(frozenset(features), TRIPLE)


def assembly(ir: k.KernelIR, features: tuple[str, ...]) -> str:
    machine = target(features)
    text = jit.Compiler(jit.Machine.of(machine)).assembly(k.emit_llvm(ir, machine))
    called = set(re.findall(r"\bbl\s+(\w+)", text))
    assert called <= LIBRARY, called
    return text


@functools.cache
def compiled(kind: str, features: tuple[str, ...]) -> str:
    """Machine code of a product with a packed weight of 64 columns."""
    dtype, encoding, inner = {
        "f32": (F32, "rows", 64),
        "bf16": (BF16, "rows", 64),
        "f16": (F16, "rows", 64),
        "int8": (DType.int8, "int8 rows", 64),
    }.get(kind, (F32, kind, 512))
    packed, result = (2, panels.panel_elements(inner)), dtype
    stored = dtype
    if kind in FORMATS:
        packed, stored = (2, FORMATS[kind].group_bytes(inner)), DType.uint8
    if kind == "int8":
        stored, result = DType.uint8, DType.int32
    return code(
        "mok.packed_matmul",
        [(dtype, (7, inner)), (stored, packed)],
        (result, (7, 64)),
        {"encoding": encoding, "streamed": False},
        features,
    )


def code(
    name: str, operands: Any, result: Any, attributes: dict[str, Any], features: tuple[str, ...]
) -> str:
    described = [[Operand(*x) for x in group] for group in (operands, [result])]
    call = library.CPU_KERNELS.lower(name, *described, attributes, target(features))
    specs = [
        k.TensorSpec(arg.dtype, arg.spec_shape()) if isinstance(arg, Arg) else k.i64
        for arg in call.args
    ]
    ir = k.specialize(call.kernel, args=specs, params=call.params, target=target(features))
    return assembly(ir, features)


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """The labeled blocks of a function: the label, and the instructions up to the next one."""
    for block in re.split(r"\n(?=\.?\w+:)", text):
        label, *body = block.split("\n")
        lines = [re.sub(r"\s*//.*", "", x).strip() for x in body if re.match(r"\t[a-z]", x)]
        yield label.split(":")[0], lines


def loops(text: str) -> list[Loop]:
    """The innermost loops of a function."""
    innermost: list[Loop] = []
    for name, lines in blocks(text):
        ends = [n for n, x in enumerate(lines) if x.startswith("b") and re.search(rf"{name}$", x)]
        if ends:
            body = lines[: ends[0] + 1]
            innermost.append(Loop(body, Counter(x.split()[0] for x in body)))
    return innermost


def with_most(text: str, instruction: str) -> list[Loop]:
    """The loops with the highest count of an instruction."""
    every = loops(text)
    most = max(loop.ops[instruction] for loop in every)
    assert most > 0, f"no loop has {instruction}"
    return [loop for loop in every if loop.ops[instruction] == most]


@pytest.mark.parametrize(
    ("kind", "features", "instruction"),
    [
        ("f32", PLAIN, "fmla"),
        ("f16", PLAIN, "fmla"),
        ("bf16", PLAIN, "fmla"),
        ("bf16", MATRIX, "bfdot"),
        ("int8", DOT, "sdot"),
        ("int8", MATRIX, "usdot"),
    ],
    ids=lambda x: "+".join(x) if isinstance(x, tuple) else x,
)
def test_tiles_of_many_rows(kind: str, features: tuple[str, ...], instruction: str) -> None:
    """24 products a step in k: two loads of columns, one load a row, whose element is multiplied as a lane."""
    text = compiled(kind, features)
    # a step that prefetches leaves the loop's first block, so that the block need not end with the branch back
    steps = [Loop(lines, Counter(x.split()[0] for x in lines)) for _, lines in blocks(text)]
    # a pass of six rows has as many products, of pairs of elements: it takes two lanes of a register
    tiles = [
        step for step in steps
        if step.ops[instruction] == 24 and "prfm" not in step.ops and not any("[1]" in line for line in step.lines)
    ]  # fmt: skip
    assert tiles
    for loop in tiles:
        assert len(loop.lines) <= 46, "\n".join(loop.lines)
        assert not loop.spills()
        assert not {"dup", "ld1r", "fmov", "fcvt"} & loop.ops.keys(), loop.ops
        assert all("[0]" in line for line in loop.lines if line.startswith(instruction))


@pytest.mark.parametrize(
    ("features", "instruction", "products", "most"),
    [(PLAIN, "fmla", 32, 68), (MATRIX, "bfdot", 16, 32)],
    ids=("widened", "pairs"),
)
def test_few_rows_of_bf16(
    features: tuple[str, ...], instruction: str, products: int, most: int
) -> None:
    """Eight rows by two vectors: 16-bit elements are widened to f32 in vector registers."""
    every = loops(compiled("bf16", features))
    few = [x for x in every if x.ops[instruction] == products and "prfm" not in x.ops]
    assert few
    for loop in few:
        assert len(loop.lines) <= most, "\n".join(loop.lines)
        assert not {"dup", "ldrh", "fmov", "uzp1"} & loop.ops.keys(), loop.ops


@pytest.mark.parametrize(
    ("encoding", "features", "instruction", "most"),
    [
        ("Q4_0", DOT, "sdot", 225),
        ("Q4_0", MATRIX, "usdot", 225),
        ("Q8_0", DOT, "sdot", 225),
        ("Q8_0", MATRIX, "usdot", 175),
        ("Q4_K", MATRIX, "usdot", 340),
        ("Q6_K", DOT, "sdot", 530),
        ("Q4_0", PLAIN, "smull", 480),
    ],
    ids=lambda x: "+".join(x) if isinstance(x, tuple) else str(x),
)
def test_products_of_bytes(
    encoding: str, features: tuple[str, ...], instruction: str, most: int
) -> None:
    """A block of 32 × 32 elements takes 64 products of 16 bytes; loops have one or four rows of x, and unpack and scale
    the block.
    """
    text = compiled(encoding, features)
    blocks = with_most(text, instruction)
    assert blocks[0].ops[instruction] == 64
    for loop in blocks:
        assert len(loop.lines) <= most, "\n".join(loop.lines)
        # operands stay bytes
        assert not {"mla", "mul", "sshr"} & loop.ops.keys(), loop.ops
        if features:
            assert all(".4b[" in line for line in loop.lines if line.startswith(instruction))
    if encoding in ("Q4_0", "Q8_0") and features:
        # four loops of four rows, one of one row; calls that poll in outer loops save all vector registers but 8
        assert sum(len(loop.spills()) for loop in blocks) <= 8


def test_attention() -> None:
    operands = [
        (BF16, ("tokens", 6, 64)),
        (DType.uint32, ("offsets",)),
        (BF16, ("pages", 2, 4, 128, 2, 64)),
        (DType.uint32, ("batch",)),
        (DType.uint32, ("batch", "most")),
        (DType.uint32, ("steps", 2)),
        (DType.uint32, ()),
        (F32, ()),
    ]
    attributes = {"mask": "causal", "local_window_size": -1}
    text = code("mo.attention.ragged.paged", operands, operands[0], attributes, MATRIX)
    for loop in with_most(text, "bfdot"):
        assert not loop.spills()
    # one token: keys are widened as vectors, never lane by lane
    assert not re.search(r"\bfcvt\s|\bumov\b", text)


@functools.cache
def regions(features: tuple[str, ...], dtype: DType) -> str:
    """The code of fused ops over rows and columns."""
    device = DeviceRef.CPU()
    with Graph("regions", input_types=[TensorType(dtype, ("n", 256), device)] * 2) as graph:
        x, y = (value.tensor for value in graph.inputs)
        graph.output(
            ops.softmax(y),
            ops.silu(x) * y,
            ops.gelu(x),
            ops.max(x, axis=1),
            ops.sum(y, axis=0),
            ops.cast(x, F16),
            ops.cast(x, DType.int8),
        )
    module = graph.to_mlir()
    backends = cpu_backends(target(features))
    irs = compile_module(module, [f"input{i}" for i in range(2)], backends)[1][0]
    return "\n".join(assembly(ir, features) for ir in irs.values())


@pytest.mark.parametrize("features", [PLAIN, MATRIX], ids="+".join)
def test_regions_convert_in_vectors(features: tuple[str, ...]) -> None:
    text = regions(features, BF16)
    assert not re.search(r"\b(umov|smov|fcvt)\s", text)
    assert ("bfcvtn" in text) == bool(features)
    assert re.search(r"fcvtn\s+v\d+\.4h, v\d+\.4s", text)
    # minimum and maximum that propagate NaN are one instruction
    assert "fmaxv" in text and "fcmgt" not in text


def test_features_are_told_to_llvm() -> None:
    machine = target(DOT)
    assert machine.feature_string == (
        "+dotprod,+fp-armv8,+neon,-bf16,-fp16fml,-fullfp16,-i8mm,-lse,-rcpc,-rdm,-sve,-sve2"
    )
    assert machine.width(k.f32) == 4 and machine.registers == 32
    assert machine.signed_bytes and not target(MATRIX).signed_bytes
    assert target(("sve2",)).has("neon")


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ({16: 0b11}, {"fp-armv8", "neon"}),
        ({16: 0b11 | 1 << 20, 26: 1 << 13 | 1 << 14}, {"fp-armv8", "neon", "dotprod", "i8mm", "bf16"}),
    ],
)  # fmt: skip
def test_features_come_from_the_auxiliary_vector_of_linux(
    monkeypatch: pytest.MonkeyPatch, words: dict[int, int], want: set[str]
) -> None:
    class Library:
        @staticmethod
        def getauxval(vector: int) -> int:
            return words.get(vector, 0)

    class Function:
        restype = argtypes = None

        def __call__(self, vector: int) -> int:
            return Library.getauxval(vector)

    fake = type("libc", (), {"getauxval": Function()})
    monkeypatch.setattr(host.ctypes, "CDLL", lambda _: fake)
    monkeypatch.setattr(host.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: {"neon": True, "dotprod": True})
    monkeypatch.setattr(host.sys, "platform", "linux")
    assert host.host_features.__wrapped__() == want
