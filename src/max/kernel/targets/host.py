"""The features of this machine's processor: LLVM's list, and on arm64 the operating system's.

On arm64 Linux, LLVM reads the features from a text file that emulators and some containers do not have; on macOS it
does not detect them.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import TYPE_CHECKING

from max._host.process_caches import cached_results
from max._lazy import lazy_module

if TYPE_CHECKING:
    import llvmlite.binding as llvm
else:
    llvm = lazy_module("llvmlite.binding")  # loads LLVM


# LLVM's name of a feature: the vector of the auxiliary values (AT_HWCAP, AT_HWCAP2) and the bit, from Linux'
# arch/arm64/include/uapi/asm/hwcap.h; the name that macOS has for it below hw.optional.arm
_AT_HWCAP, _AT_HWCAP2 = 16, 26
_ARM64 = {
    "fp-armv8": (_AT_HWCAP, 0, ""),
    "neon": (_AT_HWCAP, 1, ""),
    "lse": (_AT_HWCAP, 8, "FEAT_LSE"),
    "fullfp16": (_AT_HWCAP, 10, "FEAT_FP16"),
    "rdm": (_AT_HWCAP, 12, "FEAT_RDM"),
    "rcpc": (_AT_HWCAP, 15, "FEAT_LRCPC"),
    "dotprod": (_AT_HWCAP, 20, "FEAT_DotProd"),
    "sve": (_AT_HWCAP, 22, None),
    "fp16fml": (_AT_HWCAP, 23, "FEAT_FHM"),
    "sve2": (_AT_HWCAP2, 1, None),
    "i8mm": (_AT_HWCAP2, 13, "FEAT_I8MM"),
    "bf16": (_AT_HWCAP2, 14, "FEAT_BF16"),
}
#: The features of every arm64 processor that runs an operating system.
ARM64_BASE = frozenset({"fp-armv8", "neon"})
#: The optional features of arm64 that are detected, by LLVM's names.
ARM64_FEATURES = frozenset(_ARM64)


def _from_linux() -> frozenset[str]:
    libc = ctypes.CDLL(None)
    libc.getauxval.restype, libc.getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    words = {vector: libc.getauxval(vector) for vector in (_AT_HWCAP, _AT_HWCAP2)}
    return frozenset(name for name, (at, bit, _) in _ARM64.items() if words[at] >> bit & 1)


def _from_macos() -> frozenset[str]:
    """The features of an Apple processor, by sysctl."""
    sysctl = ctypes.CDLL(None).sysctlbyname
    features = set(ARM64_BASE)
    for name, (_, _, key) in _ARM64.items():
        value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        if not key:
            continue
        failed = sysctl(
            f"hw.optional.arm.{key}".encode(), ctypes.byref(value), ctypes.byref(size), None, 0
        )
        if not failed and value.value:
            features.add(name)
    return frozenset(features)


@cached_results()
def known_features() -> frozenset[str]:
    """LLVM's names of the CPU features of this machine's family, present or not."""
    return frozenset(llvm.get_host_cpu_features())


@cached_results()
def host_features() -> frozenset[str]:
    """LLVM's names of the CPU features that code may use here."""
    features = frozenset(name for name, on in llvm.get_host_cpu_features().items() if on)
    if platform.machine().lower() not in ("aarch64", "arm64"):
        return features
    features |= ARM64_BASE
    if sys.platform == "linux":
        # the operating system decides: a hypervisor may hide features that the processor's name implies
        return (features - ARM64_FEATURES) | _from_linux()
    return features | _from_macos() if sys.platform == "darwin" else features
