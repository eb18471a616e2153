"""The table at the head of docs/benchmarks.md and the shorter one in README.md: what a visitor wants to know first."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HEAD = ["| | Supremum | best peer | times as fast |", "|---|---|---|---|"]


@dataclass(frozen=True)
class Highlight:
    """A row of the summary.

    Args:
        label: What was measured, and its unit.
        section: The section that has it.
        case: The first cells of its row; empty for the geometric mean of the section's ratios.
        less_is_better: Whether the figures are times.
        readme: Whether README.md shows it too.
    """

    label: str
    section: str
    case: tuple[str, ...] = ()
    less_is_better: bool = False
    readme: bool = False


HIGHLIGHTS = (
    Highlight("Decode, 135M, f32, tokens/s", "generation", ("llama-135m", "float32", "decode, tok/s")),
    Highlight("Decode, 135M, bf16, tokens/s", "generation", ("llama-135m", "bfloat16", "decode, tok/s"), readme=True),
    Highlight("Decode, 135M, Q4_0, tokens/s", "generation", ("llama-135m", "q4_0", "decode, tok/s"), readme=True),
    Highlight("Decode, 1.2B, Q4_K, tokens/s", "generation", ("llama-1.2b", "q4_k", "decode, tok/s"), readme=True),
    Highlight("Decode, 1.2B, Q8_0, tokens/s", "generation", ("llama-1.2b", "q8_0", "decode, tok/s")),
    Highlight("Decode, 4 sequences, 1.2B, Q4_K, tokens/s", "generation", ("llama-1.2b", "q4_k", "decode, 4 sequences, tok/s")),
    Highlight("Decode, 16 sequences, 135M, bf16, tokens/s", "generation", ("llama-135m", "bfloat16", "decode, 16 sequences, tok/s"), readme=True),
    Highlight("Prompt of 1,024 tokens, 135M, f32, tokens/s", "generation", ("llama-135m", "float32", "prefill of 1024, tok/s")),
    Highlight("Prompt of 1,024 tokens, 135M, bf16, tokens/s", "generation", ("llama-135m", "bfloat16", "prefill of 1024, tok/s"), readme=True),
    Highlight("Prompt of 1,024 tokens, 1.2B, Q4_K, tokens/s", "generation", ("llama-1.2b", "q4_k", "prefill of 1024, tok/s")),
    Highlight("Decode with AVX2 only, 135M, Q4_0, tokens/s", "avx2", ("llama-135m", "q4_0", "decode, tok/s")),
    Highlight("BERT-base, f32, batch 32, ms", "models", ("bert-base", "float32", "32"), True, True),
    Highlight("ResNet-50, f32, batch 1, ms", "models", ("resnet-50", "float32", "1"), True, True),
    Highlight("Matrix products, geometric mean", "matmul"),
    Highlight("Fused blocks, geometric mean", "blocks", readme=True),
)  # fmt: skip


def ratios_of(rows: Sequence[str], group: int | None = None) -> dict[str, list[float]]:
    """The ratios in the last cells of the rows of a table without its head, by the cell `group`; all together where that is None."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        if cells[-1]:
            ratios.setdefault("" if group is None else cells[group], []).append(float(cells[-1]))
    return ratios


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def figure(cell: str) -> float | None:
    """The median at the head of a cell such as ``"1.2 (1.1–1.3), 40 GB/s"``; None where it holds no figure."""
    match = re.match(r"[\d.e+]+", cell.strip())
    return float(match.group()) if match else None


def _plain(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def row_of(highlight: Highlight, table: Sequence[str]) -> str | None:
    """The summary's row of a highlight, from its section's table; None where the case was not measured."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    header, measured = cells[0], cells[2:]
    if not highlight.case:
        ratios = ratios_of(table[2:]).get("", [])
        if not ratios:
            return None
        return f"| {highlight.label} of {len(ratios)} | | | {geometric_mean(ratios):.2f} |"
    for row in measured:
        if tuple(row[: len(highlight.case)]) == highlight.case and row[-1]:
            first = header.index("Supremum")
            ours = figure(row[first])
            peers = [
                (value, name)
                for name, cell in zip(header[first + 1 : -1], row[first + 1 : -1], strict=True)
                if (value := figure(cell)) is not None
            ]
            if ours is None or not peers:
                return None
            best, name = min(peers) if highlight.less_is_better else max(peers)
            return f"| {highlight.label} | {_plain(ours)} | {_plain(best)}, {name} | {row[-1]} |"
    return None


def summary(tables: Mapping[str, Sequence[str]], readme: bool = False) -> list[str]:
    """The summary's table.

    Args:
        tables: The merged table of each section that was measured.
        readme: Only the rows for README.md.
    """
    rows = [
        row
        for highlight in HIGHLIGHTS
        if highlight.section in tables and (highlight.readme or not readme)
        if (row := row_of(highlight, tables[highlight.section]))
    ]
    return [*HEAD, *rows]


def replaced(page: str, table: Sequence[str]) -> str:
    """A page with the table between its ``<!-- benchmarks -->`` and ``<!-- end -->`` marks replaced."""
    text = "\n".join(table)
    changed, count = re.subn(
        r"(<!-- benchmarks -->\n).*?(<!-- end -->)",
        lambda marks: f"{marks[1]}{text}\n{marks[2]}",
        page,
        flags=re.S,
    )
    if count != 1:
        raise ValueError(
            f"expected one <!-- benchmarks --> … <!-- end --> in the page, found {count}"
        )
    return changed
