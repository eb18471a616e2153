"""What `max doctor` says of the kernels that this machine takes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from max._backends.cpu.kernels.products.quantized.packed import FORMATS
from max._backends.cpu.kernels.products.quantized.packed_matmul import default_threshold
from max._backends.cpu.kernels.products.quantized.unpacking import quantized_tiling
from max.entrypoints.cli import doctor
from max.kernel import host_target


def test_the_chosen_paths_and_the_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_AUTOTUNE", "0")
    monkeypatch.setattr(doctor, "BANDWIDTH_RUNS", 1)
    monkeypatch.setattr(doctor, "WEIGHT_BYTES", 1 << 19)
    said = CliRunner().invoke(doctor.doctor, ["--bandwidth", "--json"])
    findings = {one["check"]: one for one in json.loads(said.output)}
    target = host_target()
    for encoding, form in FORMATS.items():
        rows = default_threshold(target, quantized_tiling(target, form))
        text = findings[f"products {encoding}"]["text"]
        assert text.startswith(f"up to {rows} rows") and "default of the processor" in text
    for encoding in ("float32", "bfloat16", *FORMATS):
        text = findings[f"weights {encoding}"]["text"]
        assert float(text.split()[0]) > 0 and text.endswith("% of reads")
    assert 0.01 < float(findings["bandwidth"]["text"].split()[0]) < 10_000
