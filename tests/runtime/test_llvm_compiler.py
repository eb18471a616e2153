"""LLVM IR to object code: machines, the lock of llvmlite, what is compiled in one call, and dumps."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace

import llvmlite
import llvmlite.binding as llvm
import pytest
from llvmlite.binding import ffi

from max import kernel
from max._backends.cpu.runtime import llvm_compiler, platform
from max._backends.cpu.runtime.llvm_compiler import CompileError, Compiler, Machine
from max._config import flags
from max.kernel.targets.host import host_features

TEXT = """
define i64 @twice(i64 %x) {
  %y = add i64 %x, %x
  ret i64 %y
}
"""
# e_machine of the header of an ELF file
X86_64, AARCH64 = 62, 183


def elf_machine(data: bytes) -> int:
    assert data[:4] == b"\x7fELF"
    return int.from_bytes(data[18:20], "little")


def test_code_for_other_machines() -> None:
    for triple, cpu, machine in (
        ("aarch64-unknown-linux-gnu", "generic", AARCH64),
        ("x86_64-unknown-linux-gnu", "x86-64", X86_64),
    ):
        compiler = Compiler(Machine(triple, cpu, ""))
        for optimize in (True, False):
            assert elf_machine(compiler.compile("twice", TEXT, optimize)) == machine
        with pytest.raises(CompileError, match="the module of bad"):
            compiler.compile("bad", TEXT.replace("i64 %y", "i32 %y"))
        # LLVM reads it, but a value is used before it is there
        early = TEXT.replace("%y = add i64 %x, %x", "%y = add i64 %z, %x\n  %z = add i64 %x, %x")
        with pytest.raises(CompileError, match="dominate"):
            compiler.compile("early", early)


def test_functions_that_must_be_inlined_are() -> None:
    compiler = Compiler(Machine("x86_64-unknown-linux-gnu", "x86-64", ""))
    text = """
define internal i64 @inner(i64 %x) alwaysinline {
  %y = mul i64 %x, %x
  ret i64 %y
}
define i64 @outer(i64 %x) {
  %y = call i64 @inner(i64 %x)
  ret i64 %y
}
"""
    assembly = compiler.assembly(text)
    assert "imul" in assembly and "call" not in assembly and "outer:" in assembly


def test_only_the_code_generators_that_are_needed_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[str] = []
    with monkeypatch.context() as patches:
        names = ("initialize_native_target", "initialize_native_asmprinter")
        for name in names:
            patches.setattr(llvm, name, lambda name=name: loaded.append(name))
        llvm_compiler._initialize_host.__wrapped__()
        assert sorted(loaded) == sorted(names)
    loaded.clear()
    for name in ("host", "all"):
        monkeypatch.setattr(
            llvm_compiler, f"_initialize_{name}", lambda name=name: loaded.append(name)
        )
    triple = llvm.get_process_triple()
    other = ("aarch64" if triple.startswith("x86_64") else "x86_64") + "-unknown-linux-gnu"
    llvm.initialize_all_targets()
    for machine, expected in ((Machine(triple, "", ""), "host"), (Machine(other, "", ""), "all")):
        llvm_compiler.create_target_machine(machine)
        assert loaded.pop() == expected and not loaded


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where LLVM does not tell all features, as on ARM, the system's list counts."""
    of_host = llvm_compiler._host_machine.__wrapped__
    assert Machine.host() == of_host()
    triple, cpu = llvm.get_process_triple(), llvm.get_host_cpu_name()
    monkeypatch.setattr(platform, "MACHINE", "x86_64")
    assert of_host() == (triple, cpu, llvm.get_host_cpu_features().flatten())
    monkeypatch.setattr(platform, "MACHINE", "aarch64")
    target = kernel.CPUTarget(host_features(), triple, cpu)
    assert of_host() == (target.triple, target.cpu, target.feature_string)


def test_the_lock_is_removed_where_that_is_known_to_be_safe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock_free, names = llvm_compiler.lock_free.__wrapped__, llvm_compiler._LOCK_FREE_FUNCTIONS

    def library(*missing: str) -> SimpleNamespace:
        functions = {name: SimpleNamespace(_lock="lock") for name in names if name not in missing}
        found = SimpleNamespace(other=SimpleNamespace(_lock="lock"), **functions)
        monkeypatch.setattr(ffi, "lib", found)
        return found

    found = library()
    monkeypatch.setattr(llvmlite, "__version__", "0.50.0")
    assert lock_free() is True and found.other._lock == "lock"
    for name in names:
        assert isinstance(getattr(found, name)._lock, contextlib.nullcontext)
    library(names[-1])
    assert lock_free() is False
    found = library()
    monkeypatch.setattr(llvmlite, "__version__", "0.49.0")
    assert lock_free() is False
    assert all(getattr(found, name)._lock == "lock" for name in names)


def test_what_is_compiled_in_one_call(caplog: pytest.LogCaptureFixture) -> None:
    """Optimized modules, if nothing is dumped; a module that the call refuses is compiled step by step."""
    machine = Machine("x86_64-unknown-linux-gnu", "x86-64", "")
    compiler, calls = Compiler(machine), list[tuple[object, ...]]()
    plain = compiler.compile("twice", TEXT)

    def native(*arguments: object) -> bytes | None:
        calls.append(arguments)
        return b"object" if b"twice" in arguments[0] else None  # type: ignore[operator]

    compiler.native = native
    assert compiler.compile("twice", TEXT) == b"object"
    text, triple, layout, *addresses, loops = calls.pop()
    assert (text, triple) == (TEXT.encode(), machine.triple.encode())
    assert layout == compiler._layout.encode() and all(addresses) and loops is True
    compiler.compile("twice", TEXT, loops=False)
    assert calls.pop()[-1] is False
    assert compiler.compile("twice", TEXT, optimize=False)[:4] == b"\x7fELF" and not calls
    other = compiler.compile("thrice", TEXT.replace("twice", "thrice"))
    assert len(other) > 100 and len(calls) == 1
    calls.clear()
    for kind, shown in (("llvm", "LLVM IR of twice"), ("asm", "assembly of twice")):
        caplog.clear()
        with flags.override(MAX_DUMP=kind), caplog.at_level(logging.INFO, "max.dump"):
            assert compiler.compile("twice", TEXT) == plain and not calls
        (record,) = caplog.records
        assert record.getMessage().startswith(shown)
        if kind == "llvm":
            assert f'target triple = "{machine.triple}"' in record.getMessage()
            assert f'target datalayout = "{compiler._layout}"' in record.getMessage()
            assert "%x, %x" not in record.getMessage(), "it is optimized"
