"""Writes the table of docs/importers.md: the ONNX ops, their versions, and the largest error of random draws.

python -m tests.importers.onnx_table [--draws 8]
"""

from __future__ import annotations

import argparse
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import max.onnx
from max.engine import InferenceSession
from max.importers.onnx.importer import OnnxFramework
from tests.importers.onnx_cases import basic, others, tensors
from tests.importers.onnx_cases.case import CASES, Draw
from tests.importers.test_onnx_ops import expected_of, model_of

PAGE = Path(__file__).parents[2] / "docs" / "importers.md"
BEGIN, END = "<!-- table of ops: begin -->\n", "<!-- table of ops: end -->\n"
FAMILIES = (basic, others, tensors)


def error_of(name: str, draws: int) -> float | None:
    """The largest error in units in the last place of the greatest element; None: there are no float results."""
    worst: float | None = None
    for seed in range(draws):
        case = CASES[name](Draw(zlib.crc32(name.encode()) + seed))
        model, feeds = model_of(name, case)
        expected = expected_of(case, model, feeds)
        try:
            loaded = InferenceSession().load(max.onnx.from_onnx(model))
            results = [
                t.to_numpy()
                for t in loaded.execute(*[np.asarray(x, order="C") for x in feeds.values()])
            ]
        except max.onnx.UnsupportedOpsError:
            results = max.onnx.InferenceSession(model).run(None, feeds)
        for got, want in zip(results, expected, strict=False):
            if got.dtype.kind == "f" and got.size and np.isfinite(want).all():
                unit = np.spacing(np.abs(want).max().astype(got.dtype)).astype(np.float64)
                error = float(np.abs(got.astype(np.float64) - want.astype(np.float64)).max() / unit)
                worst = error if worst is None or error > worst else worst
    return worst


def versions_of(name: str) -> str:
    domain, _, op = name.rpartition(":")
    found = sorted(
        schema.since_version
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.name == op and schema.domain == domain
    )
    return ", ".join(map(str, found)) or "1"


def rows(draws: int) -> list[str]:
    lines = ["| op | versions | error |", "|---|---|---|"]
    for name in sorted(OnnxFramework.table.ops):
        error = error_of(name, draws) if name in CASES else None
        text = "" if error is None else "0" if error == 0 else f"{error:.1f}"
        lines.append(f"| `{name}` | {versions_of(name)} | {text} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=4)
    draws = parser.parse_args().draws
    warnings.simplefilter("ignore")
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    with np.errstate(all="ignore"):
        table: Any = "\n".join(rows(draws))
    PAGE.write_text(f"{before}{BEGIN}{table}\n{END}{after}", encoding="utf-8")
    assert len(FAMILIES) == 3


if __name__ == "__main__":
    main()
