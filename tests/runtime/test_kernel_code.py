"""What the compiler asks the JIT for: units of kernels, by their keys, started, cancelled or interpreted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from max import kernel
from max._backends.cpu.runtime import kernel_code
from max._backends.cpu.runtime.jit import AbsentError, Unit
from max._config import flags
from max._host.disk_cache import source_fingerprint


@kernel.kernel
def ones(out: kernel.Output[kernel.f32, 1], ctx: kernel.Context) -> None:
    for i in ctx.parallel(out.shape[0]):
        out[i] = kernel.f32(1.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a JIT is asked for; it has the kernels whose text it can compute."""
    calls: list[Any] = []

    def addresses(units: dict[str, Unit]) -> dict[str, int]:
        calls.append(units)
        for unit in units.values():
            unit.text()
        return dict.fromkeys(units, 64)

    jit = SimpleNamespace(
        addresses=addresses,
        start=lambda unit: calls.append(unit),
        cancel_started=lambda: calls.append("cancelled"),
    )
    machines = []

    def jit_for(machine: Any) -> SimpleNamespace:
        machines.append(machine)
        assert machine == kernel_code.Machine.of(kernel.host_target())
        return jit

    monkeypatch.setattr(kernel_code, "jit_for", jit_for)
    return calls


def specialized() -> tuple[kernel.KernelIR, kernel.LLVMTarget]:
    target = kernel.host_target()
    return kernel.specialize(ones, [kernel.TensorSpec(kernel.f32, (None,))], {}, target), target


@pytest.mark.parametrize("check", [0, 1, 2])
def test_units(check: int, asked: list[Any]) -> None:
    """LLVM does not optimize kernels that check every access; their code is another unit."""
    ir, target = specialized()
    with flags.override(MAX_KERNEL_CHECK=check):
        assert kernel_code.compile_kernels([ir], target) == {ir.key: 64}
        kernel_code.start_kernel(ir, target)
        kernel_code.cancel_started(target)
    units, started, cancelled = asked
    unit = units[ir.key]
    key = f"{ir.key}.{source_fingerprint('kernel')}" + (".plain" if check == 2 else "")
    for one in (unit, started):
        assert (one.key, one.exports, one.optimize) == (key, (f"k_{ir.key}",), check < 2)
        assert f"k_{ir.key}" in str(one.text())
    assert cancelled == "cancelled"


def test_interpreted_kernels_are_not_compiled(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ir, target = specialized()
    entries: list[Any] = []
    monkeypatch.setattr(kernel, "interpreted_entry", lambda *given: entries.append(given) or 128)
    with flags.override(MAX_KERNEL_INTERPRET=True):
        kernel_code.start_kernel(ir, target)
        found = kernel_code.compile_kernels([ir], target)
    assert not asked and found == {ir.key: 128} and entries == [(ir, target)]


def test_kernels_without_ir(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """None where one of them is missing."""
    target = kernel.host_target()
    assert kernel_code.load_kernels(["absent"], target) is None
    (units,) = asked
    with pytest.raises(AbsentError):
        units["absent"].text()
    monkeypatch.setattr(kernel_code, "absent_text", lambda: "")
    assert kernel_code.load_kernels(["a", "b"], target) == {"a": 64, "b": 64}
