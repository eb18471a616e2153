"""Llama with SmolLM2-135M's shape, random weights: a prompt of 256 tokens, then 64; ours and transformers on torch."""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import make_checkpoint
from benchmarks.runner import Samples, Worker, interleave, machine, ratio

OURS, PEER = "supremum_llm", "transformers_llm"


@dataclass(frozen=True)
class Generation:
    """The figures of one dtype: tokens per second by engine, and seconds to load."""

    dtype: str
    figures: dict[str, dict[str, Samples]]
    cold: Samples
    warm: Samples
    peer_load: Samples

    def rows(self) -> list[str]:
        """The rows of the table."""
        out = []
        for figure, label in (
            ("prefill_tok_s", "prefill, tok/s"),
            ("decode_tok_s", "decode, tok/s"),
        ):
            ours, peer = self.figures[OURS][figure], self.figures[PEER][figure]
            out.append(f"| {self.dtype} | {label} | {ours} | {peer} | {ratio(ours, peer):.2f} |")
        out.append(
            f"| {self.dtype} | compile and load, cold, s | {self.cold} | {self.peer_load} | |"
        )
        out.append(f"| {self.dtype} | load, from the disk cache, s | {self.warm} | | |")
        return out


def measure(
    shape: str, dtype: str, folder: Path, runs: int = 5, prompt: int = 256, new_tokens: int = 64
) -> Generation:
    """Load ``runs`` times cold and warm, then prompts interleaved with the peer's."""
    model = str(make_checkpoint(shape, dtype, folder))
    cold, warm, peer_load = Samples(), Samples(), Samples()
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(max(runs - 2, 1)):
            with tempfile.TemporaryDirectory() as empty:
                once = Worker(
                    f"benchmarks.workers.{OURS}", {"MAX_CACHE_DIR": empty}, model=model, dtype=dtype
                )
                cold.values.append(once.setup["load_s"])
                once.close()
        Worker(
            f"benchmarks.workers.{OURS}", {"MAX_CACHE_DIR": cache}, model=model, dtype=dtype
        ).close()
        for _ in range(max(runs - 2, 1)):
            ours = Worker(
                f"benchmarks.workers.{OURS}", {"MAX_CACHE_DIR": cache}, model=model, dtype=dtype
            )
            warm.values.append(ours.setup["load_s"])
            ours.close()
        ours = Worker(
            f"benchmarks.workers.{OURS}", {"MAX_CACHE_DIR": cache}, model=model, dtype=dtype
        )
        peer = Worker(f"benchmarks.workers.{PEER}", model=model, dtype=dtype)
        peer_load.values.append(peer.setup["load_s"])
        ids = random.Random(0).choices(range(5, 4000), k=prompt)
        figures = interleave(
            [ours, peer], "generate", runs, warmups=2, prompt=ids, new_tokens=new_tokens
        )
        ours.close()
        peer.close()
    return Generation(dtype, figures, cold, warm, peer_load)


def table(found: list[Generation]) -> list[str]:
    """The table in Markdown."""
    head = [
        "| dtype | figure | Supremum | transformers on torch | ratio |",
        "|---|---|---|---|---|",
    ]
    return head + [row for one in found for row in one.rows()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-135m")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    default = Path(tempfile.gettempdir()) / f"supremum-bench-{os.getuid()}"
    parser.add_argument(
        "--models", type=Path, default=default, help="where the checkpoints are made"
    )
    args = parser.parse_args()
    found = [
        measure(args.shape, dtype, args.models, args.runs, args.prompt, args.new_tokens)
        for dtype in args.dtypes
    ]
    print(machine(), *table(found), sep="\n")


if __name__ == "__main__":
    main()
