"""CPUs as targets: the features that code may use, those of the machine or those of ``MAX_CPU_FEATURES``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from max._config import FlagError, flags
from max._dataclass import dataclass
from max._host.process_caches import cached_results
from max._host.reentry import cached_property
from max._lazy import lazy_module
from max._spelling import did_you_mean
from max.kernel.targets.host import ARM64_BASE, ARM64_FEATURES, host_features, known_features
from max.kernel.targets.target import LLVMTarget

if TYPE_CHECKING:
    import llvmlite.binding as llvm
else:
    llvm = lazy_module("llvmlite.binding")  # loads LLVM

_X86_BASE = frozenset({"sse", "sse2", "cx8", "fxsr", "mmx", "64bit", "cmov"})
# the features that LLVM requires in a restricted feature list
_IMPLIED = {
    "avx512bf16": ("avx512bw", "avx512f"),
    "avx512vnni": ("avx512f",),
    "avx512bw": ("avx512f",),
    "avx512vl": ("avx512f",),
    "avx512dq": ("avx512f",),
    "avx512f": ("avx2", "fma", "f16c"),
    "avx2": ("avx",),
    "fma": ("avx",),
    "f16c": ("avx",),
    "avx": ("sse4.2",),
    "sse4.2": ("sse4.1", "popcnt"),
    "sse4.1": ("ssse3",),
    "ssse3": ("sse3",),
    "sve2": ("sve",),
    "sve": ("fullfp16",),
    "fp16fml": ("fullfp16",),
    **dict.fromkeys(("bf16", "dotprod", "fullfp16", "i8mm", "rdm"), ("neon",)),
    "neon": ("fp-armv8",),
    **dict.fromkeys(
        [f"amx-{x}" for x in ("bf16", "int8", "fp16", "complex", "avx512", "fp8", "movrs", "tf32")],
        ("amx-tile",),
    ),
}
_AMX = ("amx-tile", "amx-bf16", "amx-int8")
_AMX_CPU = "sapphirerapids"
_GENERIC_X86 = "x86-64"
#: Our own feature: kernels take their paths for matrix tiles, which are emulated in memory.
EMULATED_TILES = "amx-emulated"
#: Our own feature: each row of a result is summed in an order that does not depend on the other rows.
BATCH_INVARIANT = "batch-invariant"
_OURS = frozenset({EMULATED_TILES, BATCH_INVARIANT})
#: In ``MAX_CPU_FEATURES``: all features of the machine.
NATIVE = "native"


@dataclass(frozen=True)
class CPUTarget(LLVMTarget):
    """A CPU to compile for.

    Args:
        features: LLVM's names of the CPU features that code may use, without signs.
        triple: LLVM's target triple.
        cpu: LLVM's name of the processor, for its scheduling model.
    """

    features: frozenset[str]
    triple: str
    cpu: str = "generic"

    def has(self, feature: str) -> bool:
        """Whether code may use a CPU feature, by LLVM's name (``"avx512bf16"``)."""
        return feature in self.closure

    @cached_property
    def closure(self) -> frozenset[str]:
        """The features, with those that they imply."""
        features, todo = set(self.features), list(self.features)
        while todo:
            for implied in _IMPLIED.get(todo.pop(), ()):
                if implied not in features:
                    features.add(implied)
                    todo.append(implied)
        return frozenset(features)

    @cached_property
    def vector_bits(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Bits of a vector register."""
        if not self.is_x86:
            return 128
        return 512 if self.has("avx512f") else 256 if self.has("avx") else 128

    @property
    def registers(self) -> int:
        """Vector registers."""
        return 32 if not self.is_x86 or self.has("avx512f") else 16

    @property
    def has_fma(self) -> bool:
        """Whether a fused multiply-add is one instruction."""
        return not self.is_x86 or self.has("fma")

    @property
    def has_f16_conversion(self) -> bool:
        """Whether f16 converts to and from f32 by an instruction."""
        return not self.is_x86 or self.has("f16c")

    def dot_bf16_lanes(self, width: int) -> int:
        """Lanes that one instruction of ``k.dot_bf16`` takes of ``width``; 0 where there is none."""
        if self.is_arm64:
            return 4 if self.has("bf16") and width % 4 == 0 else 0
        if not self.has("avx512bf16"):
            return 0
        narrow = self.has("avx512vl") and width in (4, 8)
        return 16 if width % 16 == 0 else width if narrow else 0

    def dot_i8_lanes(self, width: int) -> int:
        """Lanes of ``width`` that one instruction of ``k.dot_i8`` takes where ``a`` is unsigned; 0: none."""
        if self.is_x86:
            if width % 16 == 0 and self.has("avx512vnni"):
                return 16
            narrow = self.has("avxvnni") or (self.has("avx512vnni") and self.has("avx512vl"))
            return width if narrow and width in (4, 8) else 0
        return 4 if self.has("i8mm") and width % 4 == 0 else 0

    def narrow_dot_i8_lanes(self, width: int) -> int:
        """Lanes that a pair of 16-bit multiply-adds takes of ``width`` in a narrow ``k.dot_i8``; 0 where there are
        none.
        """
        if not self.is_x86:
            return 0
        if width % 16 == 0 and self.has("avx512bw"):
            return 16
        if width % 8 == 0 and self.has("avx2"):
            return 8
        return 4 if width % 4 == 0 and self.has("ssse3") else 0

    def narrow_signed_dot_i8_lanes(self, width: int) -> int:
        """Lanes of ``width`` that one ``vpsignb`` takes in a narrow ``k.dot_i8`` of a signed ``a``; 0: none."""
        lanes = self.narrow_dot_i8_lanes(width)
        return lanes if lanes < 16 else 0

    def signed_dot_i8_lanes(self, width: int) -> int:
        """Lanes that the instructions of ``k.dot_i8`` take of ``width`` where ``a`` is signed; 0 where there are none.

        On arm64 these are ``sdot``, or four to six instructions of any processor.
        """
        return 4 if self.is_arm64 and width % 4 == 0 else 0

    def lookup_lanes(self, width: int) -> int:
        """Bytes that one instruction of ``k.lookup`` takes of ``width``; 0 where there is none."""
        if self.is_arm64:
            return 16 if width % 16 == 0 else 0
        if width % 64 == 0 and self.has("avx512bw"):
            return 64
        if width % 32 == 0 and self.has("avx2"):
            return 32
        return 16 if width % 16 == 0 and self.is_x86 and self.has("ssse3") else 0

    def permutes(self, width: int) -> bool:
        """Whether one instruction of ``k.permute`` takes vectors of ``width`` lanes."""
        if width == 16:
            return self.is_x86 and self.has("avx512f")
        return width == 8 and self.is_x86 and self.has("avx512vl")

    @property
    def shifts_bytes(self) -> bool:
        """Not on x86: GFNI's instruction, which LLVM takes for it, waits for the units of products on Zen 4."""
        return not self.is_x86

    @property
    def signed_bytes(self) -> bool:
        """Whether ``k.dot_i8`` has instructions for signed ``a`` only, as arm64 without ``i8mm``."""
        width = self.width("i32")
        return bool(self.signed_dot_i8_lanes(width)) and not self.dot_i8_lanes(width)

    @property
    def tile_instructions(self) -> bool:
        """Whether matrix tiles are registers, and their products instructions."""
        return self.is_x86 and all(map(self.has, _AMX)) and not self.has(EMULATED_TILES)

    @property
    def tile_products(self) -> bool:
        """Whether kernels should multiply matrix tiles."""
        return self.tile_instructions or self.has(EMULATED_TILES)

    @property
    def batch_invariant(self) -> bool:
        """Whether kernels must sum each row of a result in an order that does not depend on how many rows there are."""
        return self.has(BATCH_INVARIANT)

    def batch_invariantly(self) -> CPUTarget:
        """The same processor, with kernels that are `batch_invariant`."""
        return replace(self, features=self.features | {BATCH_INVARIANT})

    def without_tiles(self) -> CPUTarget:
        """The same processor without AMX."""
        features = frozenset(name for name in self.features if not _is_amx(name))
        return replace(self, features=features)

    @cached_property
    def feature_string(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """LLVM's ``target-features``."""
        base = _X86_BASE if self.is_x86 else ARM64_BASE if self.is_arm64 else frozenset[str]()
        names = self.closure | base
        on = [f"+{name}" for name in sorted(names - _OURS)]
        # the processor's name implies them, though a virtual machine may hide them
        off = [f"-{name}" for name in sorted(self._implied_features) if name not in names]
        return ",".join([*on, *off, *(["-prefer-256-bit"] if self.has("avx512f") else [])])

    @property
    def _implied_features(self) -> frozenset[str]:
        """The features that LLVM may take from the processor's name."""
        if self.is_arm64:
            return ARM64_FEATURES
        return known_features() if self.is_x86 and self.cpu != _GENERIC_X86 else frozenset()

    @cached_property
    def cache_key(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Triple, processor and features."""
        return " ".join([self.triple, self.cpu, *sorted(self.features)])

    @cached_property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The architecture, and the features that kernels query."""
        printed_features = (
            "avx2",
            "fma",
            "f16c",
            "avx512f",
            "avx512bw",
            "avx512vl",
            "avx512bf16",
            "avx512vnni",
            *_AMX,
            EMULATED_TILES,
            BATCH_INVARIANT,
            "dotprod",
            "i8mm",
            "bf16",
        )
        arch = self.triple.split("-")[0]
        return "+".join([arch, *(f for f in printed_features if self.has(f))])


def _is_amx(name: str) -> bool:
    return name.startswith("amx-") and name != EMULATED_TILES


def _chosen_features(words: frozenset[str], present: frozenset[str], triple: str) -> frozenset[str]:
    """The features that ``MAX_CPU_FEATURES`` leaves of those that the machine has."""
    removed = {word[1:] for word in words if word.startswith("-")}
    named = {word for word in words if not word.startswith("-")}
    if NATIVE in named or not named:
        features = set(present) | (named & {EMULATED_TILES})
    else:
        closure = CPUTarget(frozenset(named), triple).closure
        features = (set(present) | {EMULATED_TILES}) & closure
    # removing a feature removes those that depend on it
    return frozenset(
        name for name in features if not removed & CPUTarget(frozenset({name}), triple).closure
    )


def _check_names(words: frozenset[str], valid: frozenset[str]) -> None:
    """Checks that processors of the family have features of these names.

    Raises:
        FlagError: A name is not known; the message has the nearest one.
    """
    for word in sorted(words):
        name = word.removeprefix("-")
        if name in valid:
            continue
        hint = did_you_mean(name, sorted(valid))
        raise FlagError(f"MAX_CPU_FEATURES: {name!r} is no CPU feature{hint}")


@cached_results()
def _host(allowed_features: frozenset[str] | None) -> CPUTarget:
    """The target of this machine, restricted to the allowed features; None allows all."""
    present = host_features()
    triple = llvm.get_process_triple()
    cpu = llvm.get_host_cpu_name()
    if {*_AMX, "avx512fp16"} <= present:
        # virtual machines report the family and model of others
        cpu = _AMX_CPU
    if allowed_features is None:
        return CPUTarget(present, triple, cpu)
    groups = (name for group in _IMPLIED.values() for name in group)
    valid = present | {NATIVE, EMULATED_TILES, *_IMPLIED, *groups}
    if triple.startswith("x86_64"):
        _check_names(allowed_features, valid | set(llvm.get_host_cpu_features()))
    elif triple.startswith(("aarch64", "arm64")):
        _check_names(allowed_features, valid | ARM64_FEATURES)
    chosen = _chosen_features(allowed_features, present, triple)
    if chosen - {EMULATED_TILES} == present:
        return CPUTarget(chosen, triple, cpu)
    # the processor's name implies features: a restricted target must not have it
    generic = _GENERIC_X86 if triple.startswith("x86_64") else "generic"
    return CPUTarget(chosen, triple, generic)


def host_target(tiles: bool = False) -> CPUTarget:
    """The machine that runs this process, as far as ``MAX_CPU_FEATURES`` allows.

    Args:
        tiles: Whether AMX may be among the features. The system must have granted its registers to the process
            (`max._backends.cpu.runtime.amx`), or the first instruction ends it.

    Raises:
        FlagError: ``MAX_CPU_FEATURES`` names no CPU feature.
    """
    target = _host(flags.MAX_CPU_FEATURES)
    return target if tiles else target.without_tiles()
