"""Passes of the GEMV path, and the parameters of processor families."""

from __future__ import annotations

import pytest

from max import kernel as k
from max._backends.cpu.kernels.library import CPU_KERNELS
from max._backends.cpu.kernels.products.quantized.packed import FORMATS
from max._backends.cpu.kernels.products.quantized.packed_matmul import default_threshold
from max._backends.cpu.kernels.products.quantized.tuning import KEPT, ONCE, tuning_of
from max._backends.cpu.kernels.products.quantized.unpacking import (
    packed_weight,
    quantized_tiling,
)
from max._backends.cpu.runtime.llvm_compiler import Compiler, Machine
from max._backends.kernel_call import Arg, Operand
from max.dtype import DType
from max.kernel.types import scalar_type
from tests.cpu_kernels.test_amx import inner_loops

DOT = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512vnni"})


WIDE = DOT | {"f16c", "gfni", "avx512dq", "avx512vbmi"}
NARROW = frozenset({"avx2", "fma", "f16c", "bmi", "bmi2"})


def cpu(name: str, features: frozenset[str] = DOT) -> k.CPUTarget:
    return k.CPUTarget(features, "x86_64-unknown-linux-gnu", name)


def passes(rows: int, counts: tuple[int, ...]) -> list[int]:
    """The rows of each pass over a weight, as `gemv_strip` chooses them."""
    chosen: list[int] = []
    for count in counts:
        while sum(chosen) + count <= rows:
            chosen.append(count)
    return chosen


@pytest.mark.parametrize(("name", "most"), [("znver4", 6), ("generic", 4)])
def test_more_rows_never_take_fewer_passes(name: str, most: int) -> None:
    """A pass reads the weight and unpacks it: a batch of one more row must not save one."""
    counts = quantized_tiling(cpu(name), FORMATS["Q4_K"]).passes
    assert counts == tuple(range(most, 0, -1))
    numbers = [len(passes(rows, counts)) for rows in range(1, 65)]
    assert numbers == sorted(numbers)
    assert numbers == [-(-rows // most) for rows in range(1, 65)]
    assert all(sum(passes(rows, counts)) == rows for rows in range(65))


@pytest.mark.parametrize("encoding", FORMATS)
def test_a_family_has_its_prefetch_distance_and_threshold(encoding: str) -> None:
    form = FORMATS[encoding]
    default, zen4, zen5 = cpu("generic"), cpu("znver4"), cpu("znver5")
    assert tuning_of(default) == tuning_of(cpu("of another family"))
    for target in (default, zen4, zen5):
        tiling, tuning = quantized_tiling(target, form), tuning_of(target)
        assert tiling.prefetch_distances == tuning.prefetch_distances
        assert len(tuning.prefetch_distances) == max(tiling.passes)
        assert default_threshold(target, tiling) == tuning.row_thresholds[form.bits]
    assert tuning_of(zen4).prefetch_distances < tuning_of(default).prefetch_distances
    least = tuning_of(default).row_thresholds[form.bits]
    assert tuning_of(zen4).row_thresholds[form.bits] > least
    # five rows, which verify four drafted tokens, took twice as long as four
    assert tuning_of(zen5).row_thresholds[form.bits] > 8 * least
    assert min(tuning_of(zen5).prefetch_distances) > max(tuning_of(default).prefetch_distances)


@pytest.mark.parametrize(
    ("name", "locality"),
    [
        ("sapphirerapids", KEPT), ("icelake-server", KEPT), ("cascadelake", KEPT),
        ("znver4", ONCE), ("generic", ONCE),
    ],
)  # fmt: skip
def test_weights_larger_than_the_caches_have_the_locality_of_the_family(
    name: str, locality: int
) -> None:
    target = cpu(name)
    assert packed_weight("Q4_K", True, 512, target).locality == locality
    assert packed_weight("Q4_K", False, 512, target).locality == KEPT


@pytest.mark.parametrize("encoding", FORMATS)
def test_code_of_several_instructions_and_tiles_have_thresholds_of_their_own(encoding: str) -> None:
    form = FORMATS[encoding]
    features = frozenset({"avx2", "fma"})
    for name in ("znver4", "generic"):
        narrow, tiles = cpu(name, features), cpu(name, DOT | {"amx-emulated"})
        tuning = tuning_of(narrow)
        assert tuning != tuning_of(cpu(name))
        rows = default_threshold(narrow, quantized_tiling(narrow, form))
        assert rows == tuning.row_thresholds[form.bits] >= 4
        assert default_threshold(tiles, quantized_tiling(tiles, form)) == 64
    intel = cpu("sapphirerapids", DOT | {"amx-emulated"})
    rows = tuning_of(intel).tile_row_thresholds[form.bits]
    assert default_threshold(intel, quantized_tiling(intel, form)) == rows
    assert tuning_of(intel).row_thresholds[form.bits] <= rows <= 64


def code_of(encoding: str, target: k.CPUTarget) -> str:
    """The assembly of a product with a weight that is larger than the caches."""
    weight = Operand(DType.uint8, (3, FORMATS[encoding].group_bytes(512)))
    operands = [Operand(DType.float32, (5, 512)), weight]
    attributes = {"encoding": encoding, "columns": 70, "streamed": True}
    result = [Operand(DType.float32, (5, 70))]
    call = CPU_KERNELS.lower("mok.packed_matmul", operands, result, attributes, target)
    specs = [
        k.TensorSpec(scalar_type(arg.dtype), arg.spec_shape()) if isinstance(arg, Arg) else k.i64
        for arg in call.args
    ]
    ir = k.specialize(call.kernel, specs, call.params, target)
    return Compiler(Machine.of(target)).assembly(k.emit_llvm(ir, target))


@pytest.mark.plain_code
@pytest.mark.parametrize("features", [WIDE, NARROW], ids=["AVX-512", "AVX2"])
@pytest.mark.parametrize("name", ["icelake-server", "znver4"])
def test_prefetches_of_intel_servers_keep_the_l2_cache(name: str, features: frozenset[str]) -> None:
    """Each line is prefetched into the L2 cache and into the L1 cache, never past them."""
    code = code_of("Q4_K", cpu(name, features))
    counts = {kind: code.count(f"prefetch{kind}\t") for kind in ("nta", "t0", "t1")}
    if name == "icelake-server":
        assert counts["nta"] == 0 and min(counts["t0"], counts["t1"]) > 8
    else:
        # the others are of the GEMM path
        assert counts["nta"] > counts["t0"] + counts["t1"] + 8


@pytest.mark.plain_code
@pytest.mark.parametrize(
    ("encoding", "name", "features"),
    [
        *(
            ("Q4_K", name, WIDE)
            for name in ("znver4", "znver5", "icelake-server", "sapphirerapids")
        ),
        ("Q5_K", "znver4", WIDE),
        ("Q6_K", "sapphirerapids", WIDE),
        ("IQ4_XS", "znver4", WIDE),
        ("Q6_K", "icelake-server", WIDE),
        ("Q5_K", "haswell", NARROW),
        ("Q6_K", "znver4", NARROW),
    ],
)
def test_more_rows_never_take_fewer_instructions(
    encoding: str, name: str, features: frozenset[str]
) -> None:
    """Instructions of the GEMV path's loops over blocks, and the lines of the weight that they read and prefetch."""
    form, target = FORMATS[encoding], cpu(name, features)
    # the scales of IQ4_XS end within a line
    lines, wide = -(-form.block_bytes // 64), features is WIDE
    counts = quantized_tiling(target, form).passes
    instructions: dict[int, int] = {}
    for loop in inner_loops(code_of(encoding, target)):
        code = [line for line in loop if line and line[0] not in ".#"]
        products = sum("vpdpbusd" in line or "vpmaddubsw" in line for line in code)
        far = sum("prefetcht1" in line for line in code)
        prefetches = sum("prefetch" in line for line in code) - far
        # register tiles of the GEMM path prefetch nothing, or other lines
        if not products or prefetches < lines // 2:
            continue
        # byte shifts of GFNI wait for the units of products
        assert not any("gf2p8" in line for line in code)
        bypasses = any("prefetchnta" in line for line in code)
        assert bypasses == (tuning_of(target).streamed_locality == ONCE)
        # several rows with vectors of 256 bits are multiplied by half of the columns, then by the others
        halves = 2 if prefetches < lines else 1
        # two strips are read block by block in turn
        strips = 2 if prefetches > lines else 1
        assert strips == 1 or 1 in tuning_of(target).turns.get(encoding, ())
        assert prefetches == (strips * lines if halves == 1 else form.lines + 1)
        rows, rest = divmod(products, (16 if wide else 32) * strips // halves)
        assert not rest
        assert far == (prefetches if tuning_of(target).far_distances[rows - 1] else 0)
        paired = bool(tuning_of(target).turns.get(encoding, (0,) * 6)[rows - 1])
        assert (rows not in instructions) or paired
        instructions[rows] = max(instructions.get(rows, 0), halves * len(code) // strips)
    assert sorted(instructions) == sorted(counts)
    steps = [sum(instructions[n] for n in passes(rows, counts)) for rows in range(1, 65)]
    assert steps == sorted(steps)
    # 1024 weights: unpacking, products and scales of one row; each further row shares the unpacking
    assert instructions[1] < (0.16 if wide else 0.38) * 1024
    if wide:
        # two strips have twice the sums: those of four rows are spilled
        most = 0.08 if 1 in tuning_of(target).turns.get(encoding, ()) else 0.06
        assert all(instructions[n + 1] - instructions[n] < most * 1024 for n in counts[1:])
