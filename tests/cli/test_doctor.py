"""What `max doctor` says of the kernels that this machine takes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from max._backends.cpu.kernels.products.quantized.packed import FORMATS
from max._backends.cpu.kernels.products.quantized.packed_matmul import default_threshold
from max._backends.cpu.kernels.products.quantized.unpacking import quantized_tiling
from max._backends.cpu.runtime.amx import native_target
from max.entrypoints.cli import doctor
from max.entrypoints.load_test import bandwidth


def test_the_chosen_paths_and_the_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_AUTOTUNE", "0")
    monkeypatch.setattr(bandwidth, "RUNS", 1)
    monkeypatch.setattr(bandwidth, "WEIGHT_BYTES", 1 << 19)
    monkeypatch.setattr(bandwidth, "LEAST_READ", 1 << 20)
    monkeypatch.setattr(bandwidth, "last_level_cache", lambda: 0)
    said = CliRunner().invoke(doctor.doctor, ["--bandwidth", "--json"])
    findings = {one["check"]: one for one in json.loads(said.output)}
    target = native_target()
    processor = findings["processor"]["text"]
    assert processor.startswith(f"kernels are compiled for {target.cpu}: ")
    for encoding, form in FORMATS.items():
        rows = default_threshold(target, quantized_tiling(target, form))
        text = findings[f"products {encoding}"]["text"]
        assert text.startswith(f"up to {rows} rows") and "default of the processor" in text
    for encoding in ("float32", "bfloat16", *FORMATS):
        text = findings[f"weights {encoding}"]["text"]
        assert float(text.split()[0]) > 0 and text.endswith("% of reads")
    assert 0 < float(findings["bandwidth"]["text"].split()[0]) < 10_000
