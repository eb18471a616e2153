"""What `max doctor` says of the kernels that this machine takes."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

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


@pytest.mark.parametrize("exists", [True, False])
def test_a_models_folder_that_cannot_be_written(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers mount models read-only: those are served, and the other checks follow."""
    models = tmp_path / "models"
    if exists:
        models.mkdir()
    monkeypatch.setenv("MAX_MODELS_DIR", str(models))

    def read_only(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", read_only)
    findings = {one.check: one for one in doctor._folders()}
    found = findings["models folder"]
    assert found.level == ("warning" if exists else "error")
    assert found.text.startswith(f"{models}: it cannot be written (Read-only file system)")
    assert "cache" in findings
