"""Every target: equal results with fewer features, code for other processors, the instructions where they exist."""

from __future__ import annotations

import re

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest

from max import kernel as k
from max._config import flags
from tests.kernel_language import test_language as language
from tests.kernel_language.harness import compiled

BF16 = ml_dtypes.bfloat16
X86 = {
    "sse2": [],
    "sse4.1": ["sse4.1"],
    "avx2": ["avx2"],
    "avx2,fma": ["avx2", "fma"],
    "avx2,fma,f16c": ["avx2", "fma", "f16c"],
    "avx512": ["avx512f", "avx512bw", "avx512vl", "avx512dq"],
    "avx512bf16": ["avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16"],
}
ARM = k.CPUTarget(frozenset({"neon"}), "aarch64-unknown-linux-gnu", "generic")


def x86(name: str) -> k.Target:
    host = k.host_target()
    if not host.is_x86 or not all(host.has(f) for f in X86[name]):
        pytest.skip(f"this machine has no {name}")
    return k.CPUTarget(frozenset(X86[name]), host.triple, "x86-64")


@k.kernel
def everything(out: k.Output, x: k.Input, y: k.Input, ctx: k.Context, *, W: int):
    """Conversions, masks, math, reductions and tails."""
    for i in ctx.parallel(x.shape[0]):
        total = k.f32(0)
        top = k.f32(float("-inf"))
        for j, m in k.vectors(x.shape[1], W):
            a = k.cast(x.load(i, j, width=W, mask=m), k.f32)
            b = k.cast(y.load(i, j, width=W, mask=m), k.f32)
            v = k.select(a < b, k.exp(a * 0.5), k.fma(a, b, k.tanh(b)))
            total += k.reduce_add(v)
            top = k.max(top, k.reduce_max(k.max(v, -3.0)))
            out.store(i, j, value=v, mask=m)
        out[i, 0] = total + top


def run_everything(target: k.Target, dtype: object) -> np.ndarray:
    rng = np.random.default_rng(11)
    x, y = (rng.normal(size=(3, 37)).astype(dtype) for _ in range(2))
    out = np.zeros((3, 37), dtype)
    compiled(everything, [out, x, y], {"W": target.width(k.f32)}, target=target)
    a, b = x.astype(np.float64), y.astype(np.float64)
    want = np.where(a < b, np.exp(a * 0.5), a * b + np.tanh(b))
    total = want.sum(1) + want.max(1)
    want[:, 0] = total
    tolerance = {np.float32: 1e-4, np.float16: 2e-3, BF16: 1e-2}[dtype]
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=tolerance, atol=tolerance)
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("name", X86)
def test_results_do_not_depend_on_the_target(name, dtype):
    run_everything(x86(name), dtype)


@k.kernel
def rounded(out: k.Output, x: k.Input, *, W: int):
    for i, m in k.vectors(x.shape[0], W):
        out.store(i, value=k.cast(x.load(i, width=W, mask=m), out.dtype), mask=m)


@pytest.mark.parametrize("name", ["sse2", "avx2", "avx512", "avx512bf16"])
@pytest.mark.parametrize("width", [8, 16, 32])
def test_vectors_round_to_bf16_as_numpy(name, width):
    """Subnormals included, which an instruction of x86 replaces by zeros."""
    bits = np.random.default_rng(width).integers(0, 2**32, 4096, dtype=np.uint32)
    bits[:1024] &= 0x807FFFFF
    x = bits.view(np.float32)
    out = np.zeros(x.shape, BF16)
    compiled(rounded, [out, x], {"W": width}, target=x86(name))
    with np.errstate(invalid="ignore"):  # signalling NaN
        expected = x.astype(BF16).astype(np.float32)
    np.testing.assert_array_equal(out.astype(np.float32), expected)


@pytest.mark.parametrize("name", ["sse2", "avx2", "avx512"])
def test_narrow_floats_round_to_even_everywhere(name):
    """All f16 and bf16 values survive a round trip; halfway cases, overflow and NaN are as NumPy's."""
    target = x86(name)
    edges = [
        1.0,
        1.00390625,
        1.01171875,
        65504.0,
        65519.9,
        65520.0,
        1e38,
        3.4e38,
        1e-7,
        5.9e-8,
        2.9e-8,
        3e-8,
        6e-5,
        0.0,
        -0.0,
    ]
    for dtype in (np.float16, BF16):
        every = np.arange(65536, dtype=np.uint16).view(dtype)
        wide = np.zeros(every.shape, np.float32)
        compiled(language.conversions, [wide, every], target=target)
        np.testing.assert_array_equal(wide, every.astype(np.float32))
        x = np.concatenate(
            [np.array(edges, np.float32), -np.array(edges, np.float32), [np.nan, np.inf, -np.inf]]
        )
        x = np.concatenate(
            [
                x,
                np.random.default_rng(0).normal(size=5000)
                * 10.0 ** np.random.default_rng(1).uniform(-9, 9, 5000),
            ]
        )
        x = x.astype(np.float32)
        back = np.zeros(x.shape, dtype)
        compiled(language.conversions, [back, x], target=target)
        with np.errstate(over="ignore"):
            want = x.astype(dtype)
        same = (back.view(np.uint16) == want.view(np.uint16)) | (np.isnan(back) & np.isnan(want))
        assert same.all(), (x[~same][:5], back[~same][:5], want[~same][:5])


@k.kernel
def dots(out: k.Output[k.f32, 1], a: k.Input[k.bf16, 1], b: k.Input[k.bf16, 1], *, W: int):
    acc = k.splat(k.f32(1.0), W)
    for j in range(0, a.shape[0], 2 * W):
        acc = k.dot_bf16(acc, a.load(j, width=2 * W), b.load(j, width=2 * W))
    out.store(0, value=acc)


@pytest.mark.parametrize("width", [4, 8, 16, 32])
@pytest.mark.parametrize("name", ["avx2,fma", "avx512", "avx512bf16"])
def test_dot_bf16(name, width):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=6 * width).astype(BF16) for _ in range(2))
    out = np.zeros(width, np.float32)
    compiled(dots, [out, a, b], {"W": width}, target=x86(name))
    products = (a.astype(np.float64) * b.astype(np.float64)).reshape(-1, width, 2).sum((0, 2))
    np.testing.assert_allclose(out, 1 + products, rtol=1e-5, atol=1e-5)


@k.kernel
def permutations(out: k.Output[k.f32, 1], x: k.Input[k.f32, 1], at: k.Input[k.i32, 1], *, W: int):
    for j, mask in k.vectors(out.shape[0], W):
        index = at.load(j, width=W, mask=mask)
        value = k.permute(x.load(0, width=W), x.load(W, width=W), index)
        out.store(j, value=value, mask=mask)


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("features", [[], ["avx2"], ["avx512f"], ["avx512f", "avx512vl"]])
def test_permute(features: list[str], width: int) -> None:
    """Indices beyond the lanes wrap around, negative ones too; the interpreter agrees."""
    host = k.host_target()
    if host.is_x86 and not all(map(host.has, features)):
        pytest.skip(f"this machine has no {features}")
    target = k.CPUTarget(frozenset(features), host.triple, "x86-64" if host.is_x86 else "generic")
    rng = np.random.default_rng(width)
    x = rng.standard_normal(2 * width, np.float32)
    index = rng.integers(-300, 300, 101, np.int32)
    out = np.zeros((2, 101), np.float32)
    compiled(permutations, [out[0], x, index], {"W": width}, target=target)
    k.interpret(permutations, [out[1], x, index], {"W": width})
    np.testing.assert_array_equal(out[0], x[index & (2 * width - 1)])
    np.testing.assert_array_equal(out[1], out[0])


@pytest.mark.parametrize(("dtype", "width"), [(k.f64, 8), (k.f32, 3)])
def test_permute_of_other_vectors(dtype: k.ScalarType, width: int) -> None:
    @k.kernel
    def wrong(out: k.Output, *, W: int):  # type: ignore[no-untyped-def]
        lanes = k.splat(k.cast(0, out.dtype), W)
        out.store(0, value=k.permute(lanes, lanes, k.iota(k.i32, W)))

    with pytest.raises(k.KernelError, match=r"k\.permute takes SIMD\[f32, n\] twice"):
        k.specialize(wrong, [k.TensorSpec(dtype, (None,))], {"W": width}, k.host_target())


@k.kernel
def lookups(out: k.Output[k.u8, 1], table: k.Input[k.u8, 1], index: k.Input[k.u8, 1], *, W: int):
    for j, mask in k.vectors(out.shape[0], W):
        value = k.lookup(table.load(0, width=16), index.load(j, width=W, mask=mask))
        out.store(j, value=value, mask=mask)


@pytest.mark.parametrize("width", [4, 16, 32, 48, 64, 128])
@pytest.mark.parametrize(
    "features", [[], ["ssse3"], ["avx2"], ["avx512bw"], ["avx512bw", "avx512vbmi"]]
)
def test_lookup(features, width):
    host = k.host_target()
    if host.is_x86 and not all(map(host.has, features)):
        pytest.skip(f"this machine has no {features}")
    target = k.CPUTarget(frozenset(features), host.triple, "x86-64" if host.is_x86 else "generic")
    table, index = (np.random.default_rng(width).integers(0, 256, n, np.uint8) for n in (16, 300))
    out, plain = np.zeros((2, 300), np.uint8)
    compiled(lookups, [out, table, index], {"W": width}, target=target)
    k.interpret(lookups, [plain, table, index], {"W": width})
    np.testing.assert_array_equal(out, table[index & 15])
    np.testing.assert_array_equal(plain, table[index & 15])


def test_lookup_instructions():
    for features, triple, name in (
        (["avx512bw", "avx512vbmi"], "x86_64-unknown-linux-gnu", "vpermb"),
        (["avx512bw"], "x86_64-unknown-linux-gnu", "vpshufb"),
        (["avx2"], "x86_64-unknown-linux-gnu", "vpshufb"),
        (["neon"], ARM.triple, "tbl"),
    ):
        target = k.CPUTarget(frozenset(features), triple, "generic")
        specs = [k.TensorSpec(k.u8, (None,))] * 3
        ir = k.specialize(lookups, specs, {"W": 64}, target)
        assert name in assembly(ir, target), name


@k.kernel
def dots_i8(
    out: k.Output[k.i32, 1],
    a: k.Input[k.u8, 1],
    b: k.Input[k.i8, 1],
    *,
    W: int,
    narrow: bool = False,
):
    acc = k.splat(k.i32(3), W)
    for j in range(0, a.shape[0], 4 * W):
        acc = k.dot_i8(acc, a.load(j, width=4 * W), b.load(j, width=4 * W), narrow=narrow)
    out.store(0, value=acc)


@pytest.mark.parametrize("width", [4, 8, 16, 32, 48])
@pytest.mark.parametrize(
    "features",
    [["avx2"], ["avx512f", "avx512bw", "avx512vl", "avx512vnni"], ["avx2", "avxvnni"]],
    ids=str,
)
def test_dot_i8(features, width):
    host = k.host_target()
    if not all(host.has(f) for f in features):
        pytest.skip(f"this machine lacks {features}")
    rng = np.random.default_rng(0)
    a = rng.integers(0, 256, 12 * width).astype(np.uint8)
    b = rng.integers(-128, 128, 12 * width).astype(np.int8)
    out = np.zeros(width, np.int32)
    target = k.CPUTarget(frozenset(features), host.triple, "x86-64")
    compiled(dots_i8, [out, a, b], {"W": width}, target=target)
    plain = np.zeros(width, np.int32)
    k.interpret(dots_i8, [plain, a, b], {"W": width})
    want = 3 + (a.astype(np.int64) * b).reshape(-1, width, 4).sum((0, 2))
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(plain, want)


@pytest.mark.parametrize("width", [4, 8, 16, 32, 48])
@pytest.mark.parametrize(
    "features",
    [["ssse3"], ["avx2"], ["avx512f", "avx512bw"], ["avx512f", "avx512bw", "avx512vnni"]],
    ids=str,
)
def test_narrow_dot_i8(features, width):
    host = k.host_target()
    if not all(host.has(f) for f in features):
        pytest.skip(f"this machine lacks {features}")
    rng = np.random.default_rng(0)
    a = rng.integers(0, 129, 12 * width).astype(np.uint8)
    b = rng.integers(-127, 128, 12 * width).astype(np.int8)
    # the largest sums of two products
    a[: 4 * width], b[: 4 * width] = 128, rng.choice([-127, 127])
    out = np.zeros(width, np.int32)
    target = k.CPUTarget(frozenset(features), host.triple, "x86-64")
    compiled(dots_i8, [out, a, b], {"W": width, "narrow": True}, target=target)
    want = 3 + (a.astype(np.int64) * b).reshape(-1, width, 4).sum((0, 2))
    np.testing.assert_array_equal(out, want)


@k.kernel
def signed_dots_i8(
    out: k.Output[k.i32, 1],
    a: k.Input[k.i8, 1],
    b: k.Input[k.i8, 1],
    *,
    W: int,
    narrow: bool = False,
):
    acc = k.splat(k.i32(3), W)
    for j in range(0, a.shape[0], 4 * W):
        acc = k.dot_i8(acc, a.load(j, width=4 * W), b.load(j, width=4 * W), narrow=narrow)
    out.store(0, value=acc)


ARM_BYTES = [[], ["dotprod"], ["dotprod", "i8mm"]]


@pytest.mark.parametrize("width", [2, 4, 8, 16, 48])
@pytest.mark.parametrize("narrow", [False, True], ids=["all", "narrow"])
@pytest.mark.parametrize(
    "features",
    [
        ["sse2"],
        ["ssse3"],
        ["avx2"],
        ["avx512f", "avx512bw"],
        ["avx512f", "avx512bw", "avx512vnni"],
        *ARM_BYTES,
    ],
    ids=str,
)
def test_dots_of_either_sign(features, narrow, width):
    """Every processor multiplies unsigned and signed bytes, whichever of them it has instructions for."""
    host = k.host_target()
    if (features in ARM_BYTES) != host.is_arm64 or not all(host.has(f) for f in features):
        pytest.skip(f"this machine lacks {features}")
    target = k.CPUTarget(frozenset(features), host.triple, "generic" if host.is_arm64 else "x86-64")
    rng = np.random.default_rng(0)
    lowest = -127 if narrow else -128
    b = rng.integers(lowest, 128, 12 * width).astype(np.int8)
    b[: 4 * width] = rng.choice([lowest, 127])
    for kernel, dtype, low, high in (
        (dots_i8, np.uint8, 0, 128 if narrow else 255),
        (signed_dots_i8, np.int8, -128, 127),
    ):
        a = rng.integers(low, high + 1, 12 * width).astype(dtype)
        a[: 4 * width] = low or high
        out = np.zeros(width, np.int32)
        compiled(kernel, [out, a, b], {"W": width, "narrow": narrow}, target=target)
        want = 3 + (a.astype(np.int64) * b).reshape(-1, width, 4).sum((0, 2))
        np.testing.assert_array_equal(out, want)
        plain = np.zeros(width, np.int32)
        k.interpret(kernel, [plain, a, b], {"W": width, "narrow": narrow})
        np.testing.assert_array_equal(plain, want)


@k.kernel
def pair_dots(
    out: k.Output[k.i32, 1],
    a: k.Input,
    b: k.Input[k.i8, 1],
    weights: k.Input[k.i16, 1],
    *,
    W: int,
):
    pairs = k.splat(k.i16(-5), 2 * W)
    for j in range(0, a.shape[0], 4 * W):
        pairs = k.dot_i8(pairs, a.load(j, width=4 * W), b.load(j, width=4 * W), narrow=True)
    out.store(0, value=k.dot_i16(k.splat(k.i32(3), W), pairs, weights.load(0, width=2 * W)))


@pytest.mark.parametrize("width", [2, 4, 8, 16, 48])
@pytest.mark.parametrize("features", [[], ["ssse3"], ["avx2"], ["avx512f", "avx512bw"]], ids=str)
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_pair_dots(features, width, dtype):
    """Sums of two products in 16 bits, then of two of these times 16 bits: at their bounds in some lanes."""
    host = k.host_target()
    if (features and not host.is_x86) or not all(host.has(f) for f in features):
        pytest.skip(f"this machine lacks {features}")
    rng = np.random.default_rng(0)
    a = rng.integers(0, 21, 12 * width).astype(dtype)
    b = rng.integers(-127, 128, 12 * width).astype(np.int8)
    a[: 2 * width], b[: 2 * width] = 127, rng.choice([-127, 127])
    a[4 * width :], b[4 * width :] = a[4 * width :] % 2, b[4 * width :] % 5
    weights = rng.integers(-(2**15), 2**15, 2 * width).astype(np.int16)
    weights[:width] = -(2**15)
    out, plain = np.zeros(width, np.int32), np.zeros(width, np.int32)
    target = k.CPUTarget(frozenset(features), host.triple, "x86-64" if host.is_x86 else "generic")
    compiled(pair_dots, [out, a, b, weights], {"W": width}, target=target)
    k.interpret(pair_dots, [plain, a, b, weights], {"W": width})
    pairs = -5 + (a.astype(np.int64) * b).reshape(3, 2 * width, 2).sum((0, 2))
    assert np.abs(pairs).max() < 2**15
    want = 3 + (pairs * weights).reshape(-1, 2).sum(1)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(plain, want)


@pytest.mark.parametrize("width", [2, 4, 8, 48])
def test_dot_bf16_on_arm(width):
    host = k.host_target()
    if not host.is_arm64 or not host.has("bf16"):
        pytest.skip("this machine has no bfdot")
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=6 * width).astype(BF16) for _ in range(2))
    out = np.zeros(width, np.float32)
    compiled(dots, [out, a, b], {"W": width}, target=host)
    products = (a.astype(np.float64) * b.astype(np.float64)).reshape(-1, width, 2).sum((0, 2))
    np.testing.assert_allclose(out, 1 + products, rtol=1e-5, atol=1e-5)


def test_a_virtual_machine_hides_features():
    """The processor's name promises AVX-512; a hypervisor has switched it off."""
    host = k.host_target()
    if not host.is_x86 or not host.has("avx2"):
        pytest.skip("not an x86 machine with avx2")
    hidden = k.CPUTarget(frozenset({"avx2", "fma", "f16c", "bmi2"}), host.triple, "znver4")
    ir = k.specialize(everything, specs(k.bf16), {"W": 16}, hidden)
    assert "vfmadd" in assembly(ir, hidden)
    assert not re.search(r"zmm|%[xy]mm(1[6-9]|2\d|3[01])|vcvtneps2bf16", assembly(ir, hidden))


def test_dot_i8_on_arm():
    target = k.CPUTarget(frozenset({"neon", "i8mm"}), ARM.triple, "generic")
    specs_ = [k.TensorSpec(k.i32, (8,)), k.TensorSpec(k.u8, (None,)), k.TensorSpec(k.i8, (None,))]
    assert "usdot" in assembly(k.specialize(dots_i8, specs_, {"W": 8}, target), target)


def assembly(ir: k.KernelIR, target: k.Target) -> str:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(k.emit_llvm(ir, target))
    module.verify()
    machine = llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.feature_string, opt=2, reloc="pic", codemodel="small"
    )
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    assert len(machine.emit_object(module)) > 0
    return machine.emit_assembly(module)


def specs(dtype: k.ScalarType) -> list[k.TensorSpec]:
    return [k.TensorSpec(dtype, ("n", "m"))] * 3


# functions of the C library that every process has
_LIBRARY = {
    "sin",
    "cos",
    "pow",
    "roundevenf",
    "roundeven",
    "floorf",
    "ceilf",
    "truncf",
    "floor",
    "ceil",
    "trunc",
    "memset",
    "memcpy",
}


@pytest.mark.parametrize("dtype", [k.f32, k.f16, k.bf16], ids=lambda d: d.name)
def test_code_for_arm(dtype):
    ir = k.specialize(everything, specs(dtype), {"W": ARM.width(k.f32)}, ARM)
    text = assembly(ir, ARM)
    called = set(re.findall(r"\bbl\s+(\w+)", text))
    assert called <= _LIBRARY, called
    assert "fmla" in text


@pytest.mark.parametrize("name", list(X86))
def test_no_helper_calls_that_do_not_resolve(name):
    host = "x86_64-unknown-linux-gnu"
    target = k.CPUTarget(frozenset(X86[name]), host, "x86-64")
    for dtype in (k.f16, k.bf16):
        ir = k.specialize(everything, specs(dtype), {"W": target.width(k.f32)}, target)
        called = set(re.findall(r"call[ql]?\s+\*?(\w+)", assembly(ir, target)))
        assert not {c for c in called if c.startswith("__")}, called


def without_polls(text: str) -> str:
    """Assembly without the blocks that call the poll function (the context's field 11): only an interrupt runs them."""
    blocks = re.split(r"^(?=\.L\w+:)", text, flags=re.M)
    return "".join(block for block in blocks if not re.search(r"\bcallq?\s+\*88\(%\w+\)", block))


@pytest.mark.plain_code
def test_instructions_are_used_where_the_target_has_them():
    target = k.CPUTarget(frozenset(X86["avx512bf16"]), "x86_64-unknown-linux-gnu", "x86-64")
    ir = k.specialize(
        dots, [k.TensorSpec(k.f32, (16,)), *[k.TensorSpec(k.bf16, (None,))] * 2], {"W": 16}, target
    )
    assert "vdpbf16ps" in assembly(ir, target)
    ir = k.specialize(everything, specs(k.bf16), {"W": 16}, target)
    text = assembly(ir, target)
    # vcvtneps2bf16 would replace subnormals by zeros
    assert "vscalefps" in text and "zmm" in text and "vcvtneps2bf16" not in text
    assert not re.search(r"\bcall", without_polls(text))


@pytest.mark.plain_code
def test_tile_elements_live_in_registers():
    """A 14 x 2 tile of vectors stays out of memory in the inner loop."""
    text = """
    def gemm(out: k.Output[k.f32, 2], a: k.Input[k.f32, 2], b: k.Input[k.f32, 2]):
        acc = k.tile(k.f32, (14, 2), width=16, fill=0.0)
        for p in range(a.shape[1]):
            row = [b.load(p, 16 * n, width=16) for n in k.static_range(2)]
            for m in k.static_range(14):
                for n in k.static_range(2):
                    acc[m, n] = k.fma(k.splat(a[m, p], 16), row[n], acc[m, n])
        for m in k.static_range(14):
            for n in k.static_range(2):
                out.store(m, 16 * n, value=acc[m, n])
    """
    target = k.CPUTarget(frozenset(X86["avx512"]), "x86_64-unknown-linux-gnu", "x86-64")
    spec = k.TensorSpec(k.f32, (None, None))
    ir = k.specialize(k.from_source(text, "gemm", {"k": k}), [spec] * 3, {}, target)
    lines = without_polls(assembly(ir, target)).split("\n")
    spills = [line for line in lines if re.search(r"zmm\d+, -?\d*\(%rsp\)|\(%rsp\), %zmm", line)]
    assert not spills, spills


def test_restricted_features():
    with flags.override(MAX_CPU_FEATURES="avx2,fma"):
        target = k.host_target()
        if not target.is_x86:
            pytest.skip("features of x86")
        assert (
            target.has("avx2")
            and target.has("fma")
            and target.has("avx")
            and not target.has("avx512f")
        )
        assert target.width(k.f32) == 8 and target.registers == 16 and target.width("bf16") == 16
        run_everything(target, np.float32)
    assert ARM.width(k.f32) == 4 and ARM.registers == 32 and ARM.has_fma
