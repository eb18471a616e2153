"""Run benchmarks, keep their tables in benchmarks/history.jsonl, and write the pages from the newest of each section."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import (
    blocks,
    compiled,
    eager,
    embeddings,
    encoders,
    generation,
    grammars,
    imported,
    long_context,
    matmul,
    overhead,
    perplexity,
    recurrent,
    startup,
)
from benchmarks.runner import ROOT, commit, exit_on_sigterm, machine
from benchmarks.summary import geometric_mean, ratios_of, replaced, summary

HISTORY = ROOT / "benchmarks" / "history.jsonl"
PAGE = ROOT / "docs" / "benchmarks.md"
KERNELS_PAGE = ROOT / "docs" / "benchmarks-kernels.md"
README = ROOT / "README.md"
HEAD = """# Benchmarks

The newest figures; a ratio above 1 means that Supremum is faster. "Decode" is the generation of tokens, "prompt" the
reading of a prompt; 135M and 1.2B are Llama models of that many parameters. The tables of all cases follow; those of
[kernels](benchmarks-kernels.md) have a page of their own. [What limits us](log/2026-11-21-limits.md) compares the
figures with the limits of the machine, [benchmarks-limits.md](benchmarks-limits.md) with our targets for model families
and servers.

<!-- benchmarks -->
<!-- end -->

## How it is measured
Supremum and each peer run in processes of their own, in turn (A B A B …), after a warm-up. A figure is the median with
its range. A ratio is the median of the ratios of neighboring runs, so it may differ from the ratio of the medians: the
machine is shared, and its memory bandwidth varies by half within minutes. Trust the ratios more than the figures.

`make bench` measures everything (about four hours, and 25 GB on disk for the models) and writes these pages from the
newest run of each case. `python -m benchmarks --sections generation --shapes llama-135m --encodings q4_0` measures a
part. `benchmarks/history.jsonl` keeps each run as a line of JSON with its date, commit and machine.
"""
KERNELS_HEAD = """# Benchmarks of kernels

Matrix products and fused blocks beside the best peer for each; a ratio above 1 means that Supremum is faster.
[Benchmarks](benchmarks.md) states how they are measured.
"""


CASES = tuple(dict.fromkeys((*generation.CASES, *recurrent.CASES)))
FAMILIES = ("qwen3-0.6b", "gemma3-1b", "olmoe-1.1b")


def _chosen(names: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """Those of a section's names that the options name."""
    return [name for name in names if name in wanted]


def _case(text: str) -> tuple[int, int]:
    """Tokens of a prompt and sequences of ``256x1``."""
    prompt, batch = map(int, text.split("x"))
    return prompt, batch


def _models(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The models of generation and loading."""
    return generation.models_of(_chosen(generation.SHAPES, args.shapes), args.encodings)


def _generation(args: argparse.Namespace, models: Path) -> Iterator[str]:
    yield from generation.HEAD
    for shape, encoding in _models(args):
        yield from generation.measure(
            shape,
            encoding,
            models,
            args.runs,
            [case for case in generation.CASES if case in args.cases],
        )


def _families(args: argparse.Namespace, models: Path) -> Iterator[str]:
    yield from generation.HEAD
    for shape in _chosen(FAMILIES, args.shapes):
        for encoding in _chosen(("q4_k", "q8_0", "bfloat16"), args.encodings):
            cases = [case for case in ((32, 1), (256, 1)) if case in args.cases]
            yield from generation.measure(shape, encoding, models, min(args.runs, 3), cases)


def _avx2(args: argparse.Namespace, models: Path) -> Iterator[str]:
    yield from generation.HEAD
    for encoding in _chosen(("float32", "bfloat16", "q4_0", "q4_k", "q8_0"), args.encodings):
        cases = [case for case in ((32, 1), (256, 1), (32, 4)) if case in args.cases]
        shape = "llama-1.2b" if encoding == "q4_k" else "llama-135m"
        yield from generation.measure(shape, encoding, models, min(args.runs, 3), cases, True)


def _loading(args: argparse.Namespace, models: Path) -> Iterator[str]:
    yield from generation.LOADING_HEAD
    for shape, encoding in _models(args):
        yield generation.measure_loading(shape, encoding, models, min(args.runs, 3)).row()


def _max(args: argparse.Namespace, models: Path) -> Iterator[str]:
    yield from generation.MAX_HEAD
    for encoding in ("float32", "bfloat16"):
        yield from generation.measure_max("llama-135m", encoding, models)


def _long_context(args: argparse.Namespace, models: Path) -> Iterator[str]:
    yield from long_context.HEAD
    yield from long_context.measure(models, min(args.runs, 3), args.contexts, caches=args.caches)


def _startup(args: argparse.Namespace, models: Path) -> Iterator[str]:
    yield from ("| figure | median (range) |", "|---|---|")
    for name, samples in startup.measure(args.runs).items():
        yield f"| {name} | {samples} |"


def _starts(args: argparse.Namespace, models: Path) -> Iterator[str]:
    yield from startup.HEAD
    yield from startup.measure_starts(models, min(args.runs, 3))


def _unseen_matmul(args: argparse.Namespace, _: Path) -> Iterator[str]:
    rows = matmul.measure(matmul.drawn(args.seed, args.unseen), runs=min(args.runs, 3))
    yield from with_seed(rows, args.seed)


def _unseen_blocks(args: argparse.Namespace, _: Path) -> Iterator[str]:
    # two dtypes of each
    rows = blocks.measure(blocks.drawn(args.seed, -(-args.unseen // 4)), runs=min(args.runs, 3))
    yield from with_seed(rows, args.seed)


def with_seed(rows: Iterable[str], seed: int) -> Iterator[str]:
    """Puts the seed before the rows of a table."""
    for number, row in enumerate(rows):
        yield f"|{' seed ' if number == 0 else '---' if number == 1 else f' {seed} '}{row}"


@dataclass(frozen=True)
class Section:
    """A table of the page.

    Args:
        title: Its title.
        about: What stands above it.
        rows: Measures, and gives head and rows as they come; it takes the arguments and the folder of models.
        cells: How many cells of a row name its case.
        minutes: About how long it takes with the defaults.
        like: The section of the same columns but the first, with whose ratios those of this one are compared.
        group: Which cell says what a ratio is averaged with.
        kernels: Whether the table stands on the page of kernels.
    """

    title: str
    about: str | None
    rows: Callable[[argparse.Namespace, Path], Iterator[str]]
    cells: int
    minutes: int
    like: str = ""
    group: int = 0
    kernels: bool = False


SECTIONS: dict[str, Section] = {
    "generation": Section("Generation", generation.__doc__, _generation, 3, 75),
    "avx2": Section(
        "Generation with AVX2 only",
        "As above, with AVX2 only in each engine: ours by `MAX_CPU_FEATURES=avx2,fma` (`avx2,fma,f16c` in the rows of bfloat16), llama.cpp in a build of its own, torch by its environment variables.",
        _avx2,
        3,
        10,
    ),
    "families": Section(
        "Other families",
        "As above, shapes of Qwen 3, Gemma 3 and OLMoE. Both engines read the same GGUF file, which llama.cpp quantized.",
        _families,
        3,
        25,
    ),
    "loading": Section(
        "Loading",
        "Seconds to load a model, with compilation (cold) and from the disk cache (warm), and the memory of the process as a multiple of the "
        "bytes of the weights: its peak, and the process's own memory without mapped files.",
        _loading,
        2,
        15,
    ),
    "max": Section("MAX", "MAX 26.7 through its own command line, in turn with ours.", _max, 2, 5),
    "long-context": Section(
        "Long contexts",
        long_context.__doc__,
        _long_context,
        2,
        25,
    ),
    "matmul": Section(
        "Matmul",
        matmul.__doc__,
        lambda a, _: matmul.measure(matmul.listed(a.dtypes, a.rows), runs=min(a.runs, 3)),
        4,
        75,
        kernels=True,
    ),
    "unseen-matmul": Section(
        "Matmul of random sizes",
        "As above, for sizes drawn at random, for which nothing was tuned. The first column is the seed.",
        _unseen_matmul,
        5,
        10,
        like="matmul",
        group=0,
        kernels=True,
    ),
    "blocks": Section(
        "Fused blocks",
        blocks.__doc__,
        lambda a, _: blocks.measure(blocks.listed(), runs=min(a.runs, 3)),
        3,
        25,
        kernels=True,
    ),
    "unseen-blocks": Section(
        "Fused blocks of random shapes",
        "As above, for shapes drawn at random: each size is between half and twice that of a listed shape.",
        _unseen_blocks,
        4,
        10,
        like="blocks",
        group=1,
        kernels=True,
    ),
    "models": Section(
        "BERT and ResNet",
        encoders.__doc__,
        lambda a, models: encoders.measure(models, runs=min(a.runs, 3)),
        3,
        15,
    ),
    "imported": Section(
        "Imported ONNX models",
        imported.__doc__,
        lambda a, models: imported.measure(models / "imported", runs=min(a.runs, 5)),
        2,
        12,
    ),
    "compiled": Section(
        "torch.compile",
        compiled.__doc__,
        lambda a, _: compiled.measure(runs=min(a.runs, 3)),
        1,
        45,
    ),
    "eager": Section("Eager tensors", eager.__doc__, lambda a, _: eager.measure(), 1, 2),
    "embeddings": Section(
        "Vectors of texts",
        embeddings.__doc__,
        lambda a, models: embeddings.measure(
            models,
            _chosen(embeddings.SHAPES, a.shapes),
            min(a.runs, 3),
            engines=a.engines,
            parts=a.parts,
        ),
        3,
        15,
    ),
    "recurrent": Section(
        "State-space models",
        recurrent.__doc__,
        lambda a, models: recurrent.measure(
            models,
            _chosen(recurrent.SHAPES, a.shapes),
            _chosen(recurrent.DTYPES, a.dtypes),
            a.runs,
            [case for case in recurrent.CASES if case in a.cases],
        ),
        3,
        10,
    ),
    "grammars": Section(
        "Grammars",
        grammars.__doc__,
        lambda a, models: grammars.measure(models / "grammars", min(a.runs, 5)),
        3,
        5,
    ),
    "overhead": Section("Overhead", overhead.__doc__, lambda a, _: overhead.measure(), 1, 1),
    "compiling": Section("Compile time", None, lambda a, _: overhead.measure_compiling(), 1, 2),
    "perplexity": Section("Perplexity", perplexity.__doc__, lambda a, _: perplexity.table(), 1, 3),
    "startup": Section("Start-up", "Each run a fresh process.", _startup, 1, 1),
    "starts": Section("From LLM(...) to ready", startup.__doc__, _starts, 1, 4),
}


WITH_MEAN = ("matmul", "unseen-matmul", "blocks", "unseen-blocks", "models")
"""Sections whose last cells are ratios, of which the geometric mean is of interest."""


def merge(entries: Sequence[Mapping[str, Any]], cells: int) -> tuple[list[str], str]:
    """The newest row of each case of a section on a machine, and when they were measured.

    Args:
        entries: The section's runs, the oldest first; those with other columns than the newest are left out.
        cells: How many cells of a row, from the first on, name its case.
    """
    head = entries[-1]["rows"][:2]
    rows: dict[str, str] = {}
    days: dict[str, str] = {}
    for entry in entries:
        if entry["rows"][:2] == head:
            for row in entry["rows"][2:]:
                key = "|".join(row.split("|")[1 : cells + 1])
                rows[key], days[key] = row, f"{entry['date']}, {entry['machine']}."
    rows = {key: row for key, row in rows.items() if not row.startswith("| all |")}
    return [*head, *rows.values()], " ".join(sorted({days[key] for key in rows}))


def by_machine(entries: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The runs of each machine, in the order in which machines were first measured."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        found.setdefault(entry["machine"], []).append(entry)
    return list(found.values())


def _mean(rows: Sequence[str]) -> str:
    """A sentence on the ratios in the last cells."""
    ratios = ratios_of(rows[2:]).get("", [])
    if not ratios:
        return ""
    mean = geometric_mean(ratios)
    return f"Geometric mean of {len(ratios)} ratios: {mean:.2f}; the least: {min(ratios):.2f}.\n"


def beside(rows: Sequence[str], listed: Sequence[str], group: int) -> str:
    """A sentence on the mean ratios of random shapes and of the listed ones.

    Args:
        rows: The table, with one cell more at the front.
        listed: The table of the listed shapes.
        group: The cell of a listed row by which ratios are averaged.
    """
    others = ratios_of(listed[2:], group)
    means = [
        f"{name} {geometric_mean(found):.2f} ({geometric_mean(others[name]):.2f})"
        for name, found in ratios_of(rows[2:], group + 1).items()
        if name in others
    ]
    return f"In the mean, here (and of the listed shapes): {', '.join(means)}.\n" if means else ""


def wrapped(text: str) -> str:
    """Paragraphs with lines of up to 120 characters, as all pages have."""
    paragraphs = text.strip().split("\n\n")
    return "\n\n".join(
        textwrap.fill(" ".join(p.split()), 120, break_long_words=False, break_on_hyphens=False)
        for p in paragraphs
    )


def pages() -> dict[Path, str]:
    """The text of the pages of benchmarks and of README.md with the newest tables."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in HISTORY.read_text().splitlines():
        entry = json.loads(line)
        if len(entry["rows"]) > 2:
            found.setdefault(entry["section"], []).append(entry)
    whole, kernels = [HEAD], [KERNELS_HEAD]
    tables: dict[str, list[str]] = {}
    for name, section in SECTIONS.items():
        if name in found:
            parts = kernels if section.kernels else whole
            parts.append(f"## {section.title}")
            if section.about:
                parts.append(f"{wrapped(section.about)}\n")
            for number, entries in enumerate(by_machine(found[name])):
                rows, stamp = merge(entries, section.cells)
                parts.append(f"{wrapped(stamp)}\n\n" + "\n".join(rows) + "\n")
                if name in WITH_MEAN:
                    parts.append(_mean(rows))
                # the summary, and sections beside others, are of the machine that was measured first
                if number == 0:
                    tables[name] = rows
                    if section.like in tables:
                        sentence = beside(rows, tables[section.like], section.group)
                        parts.append(wrapped(sentence) + "\n")
    return {
        PAGE: replaced("\n".join(whole), summary(tables)),
        KERNELS_PAGE: "\n".join(kernels),
        README: replaced(README.read_text(), summary(tables, readme=True)),
    }


def write_pages() -> None:
    """Writes all of them."""
    for path, text in pages().items():
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--sections", nargs="*", default=list(SECTIONS),
        help=f"none: only write the pages; all by default: {', '.join(SECTIONS)}",
    )  # fmt: skip
    shapes = [*generation.SHAPES, *FAMILIES, *embeddings.SHAPES, *recurrent.SHAPES]
    parser.add_argument(
        "--shapes", nargs="+", default=shapes, choices=shapes,
        help="models of generation, loading, families, embeddings and recurrent",
    )  # fmt: skip
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=list(long_context.LENGTHS),
        help="of long-context",
    )
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), type=_case,
        help="of generation, avx2, families and recurrent: tokens of the prompt and sequences, like 256x1",
    )  # fmt: skip
    parser.add_argument(
        "--engines", nargs="+", default=list(embeddings.LABELS),
        choices=list(embeddings.LABELS), help="of embeddings",
    )  # fmt: skip
    parser.add_argument("--parts", type=int, default=1, help="calls of a run of embeddings")
    parser.add_argument(
        "--caches", nargs="+", default=list(long_context.FORMATS),
        choices=list(long_context.FORMATS), help="of long-context",
    )  # fmt: skip
    parser.add_argument(
        "--encodings", nargs="+", default=list(generation.ENCODINGS),
        choices=list(generation.ENCODINGS), help="theirs, where blocks fit",
    )  # fmt: skip
    parser.add_argument(
        "--dtypes", nargs="+", default=list(matmul.BYTES), choices=list(matmul.BYTES),
        help="of matmul and recurrent",
    )  # fmt: skip
    parser.add_argument("--rows", type=int, nargs="+", default=list(matmul.ROWS), help="of matmul")
    parser.add_argument("--unseen", type=int, default=8, help="random sizes of each dtype")
    parser.add_argument("--seed", type=int, default=2026, help="that they are drawn with")
    args = parser.parse_args()
    exit_on_sigterm()
    # before this run's own tables change the working tree
    measured_commit = commit()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"--sections: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    models = Path(tempfile.gettempdir()) / f"supremum-bench-{os.getuid()}"
    total = sum(SECTIONS[name].minutes for name in args.sections)
    print(f"About {total} minutes; --sections, --shapes and --encodings choose a part.", flush=True)
    failed: list[str] = []
    for name in args.sections:
        rows: list[str] = []
        begin = time.monotonic()
        print(f"\n{name}: about {SECTIONS[name].minutes} minutes", flush=True)
        try:
            for row in SECTIONS[name].rows(args, models):
                print(row, flush=True)
                rows.append(row)
        except RuntimeError:
            # an engine died: the other sections need not
            traceback.print_exc()
            failed.append(name)
        finally:
            # what was measured before an interruption is kept
            entry = {
                "section": name,
                "date": datetime.date.today().isoformat(),
                "commit": measured_commit,
                "machine": machine(),
                "seconds": round(time.monotonic() - begin),
                "rows": rows,
            }
            with HISTORY.open("a") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            write_pages()
        print(f"{name}: {entry['seconds'] / 60:.1f} minutes", flush=True)
    if not args.sections:
        write_pages()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
