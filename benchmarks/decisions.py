"""`/v1/decisions` of many questions beside prompts of as many tokens, at a server of our own in turns.

`python -m benchmarks.decisions` prints the times of both and their ratio: above 1 the questions take less time than
the prompts: one, and as many as a context of 2,048 tokens takes. The prefix cache is emptied before each request, and
no two inputs are alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.grammars import make_model
from benchmarks.random_models import STARTUP_SHAPES, STORED
from benchmarks.runner import ROOT, exit_on_sigterm, machine
from benchmarks.servers import OURS, Server, Setup, started

TINY = ROOT / "models" / "tiny-chat"
LENGTH = 4096
"""The longest sequence: the prompt that is compared has the tokens of all questions."""
_WORDS = (
    "the parcel came late and its screen was broken so customer asks for money back from a shop that sold it last "
    "week he wrote two letters to them but nobody has answered yet"
).split()
HEAD = (
    "| model | tokens | prompts | questions, ms | CPU of the server | of the engine | prompt, ms | CPU of the server | "
    "of the engine | speed | by CPU |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Times:
    """What one request took.

    Args:
        wall: Seconds until its answer.
        server: CPU seconds of the process that answers HTTP.
        engine: CPU seconds of the processes below it.
    """

    wall: float
    server: float
    engine: float


def _longer(model: Path, folder: Path) -> Path:
    """The folder of a model that says it takes sequences of `LENGTH`, with tiny-chat's template if it has none."""
    target = folder / f"{model.name}-longer"
    if not target.exists():
        target.mkdir(parents=True)
        for file in model.iterdir():
            (target / file.name).symlink_to(file.resolve())
        config = json.loads((model / "config.json").read_text())
        (target / "config.json").unlink()
        config["max_position_embeddings"] = LENGTH
        (target / "config.json").write_text(json.dumps(config))
        template = target / "chat_template.jinja"
        if not template.exists():
            template.write_text((TINY / template.name).read_text())
    return target


def _cpu(process: psutil.Process) -> tuple[float, float]:
    """The CPU seconds of a process, and of those below it, in nanoseconds of the scheduler."""
    own, *others = (
        sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{p.pid}/task").glob("*/schedstat"))
        for p in (process, *process.children(recursive=True))
    )  # fmt: skip
    return own * 1e-9, sum(others) * 1e-9


def _timed(server: Server, path: str, body: dict[str, Any]) -> tuple[Times, Any]:
    process = psutil.Process(server.process.pid)
    asyncio.run(server.target.json("/reset_prefix_cache", {}))
    time.sleep(0.05)
    before, begin = _cpu(process), time.perf_counter()
    answer = asyncio.run(server.target.json(path, body))
    wall, after = time.perf_counter() - begin, _cpu(process)
    return Times(wall, after[0] - before[0], after[1] - before[1]), answer


def _questions(draw: random.Random, count: int, words: int) -> dict[str, Any]:
    """A request of decisions whose input has a number of words."""
    kinds = [
        {"type": "predicate"},
        {"type": "choice", "choices": [{"value": "refund"}, {"value": "repair"}]},
        {"type": "score", "levels": [{"label": "calm"}, {"label": "angry"}]},
    ]
    return {
        "input": " ".join(draw.choices(_WORDS, k=words)),
        "questions": [
            {**kinds[number % 3], "instructions": " ".join(draw.choices(_WORDS, k=5))}
            for number in range(count)
        ],
    }


def measure(
    server: Server, count: int, words: int, rounds: int, longest: int, vocabulary: int = 4000
) -> str:
    """The row of a server.

    Args:
        server: The server.
        count: The questions of a request.
        words: The words of its input.
        rounds: The number of pairs; one more compiles what is not compiled yet.
        longest: The most tokens of a prompt; more are read as several prompts of one request.
        vocabulary: The tokens of the compared prompt are below this.
    """
    draw = random.Random(0)
    asked: list[Times] = []
    read: list[Times] = []
    tokens = 0
    for number in range(rounds + 1):
        own, answer = _timed(server, "/v1/decisions", _questions(draw, count, words))
        tokens = answer["usage"]["input_tokens"]
        sizes = [
            len(range(begin, tokens, -(-tokens // longest)))
            for begin in range(-(-tokens // longest))
        ]
        prompts = [[draw.randrange(300, vocabulary) for _ in range(size)] for size in sizes]
        body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        other, _ = _timed(server, "/v1/completions", body)
        if number:
            asked.append(own)
            read.append(other)
    cells = [f"{_median([getattr(t, name) for t in times]):.1f}"
        for times in (asked, read) for name in ("wall", "server", "engine")]  # fmt: skip
    speed = statistics.median(b.wall / a.wall for a, b in zip(asked, read, strict=True))
    by_cpu = statistics.median(
        (b.server + b.engine) / (a.server + a.engine) for a, b in zip(asked, read, strict=True)
    )
    name = Path(server.model).name
    return f"| {name} | {tokens} | {-(-tokens // longest)} | {' | '.join(cells)} | {speed:.3f} | {by_cpu:.3f} |"


def _median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=STARTUP_SHAPES, help="random weights; else tiny-chat")
    parser.add_argument("--dtype", default="float32", choices=STORED)
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--words", type=int, default=300, help="of the input")
    parser.add_argument(
        "--longest", type=int, nargs="+", default=[LENGTH - 1, 2047], help="tokens of a prompt"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", type=Path, help="a folder, in place of --shape")
    parser.add_argument("--folder", type=Path, help="where the model is kept for further runs")
    args = parser.parse_args()
    exit_on_sigterm()
    print(machine(), *HEAD, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as own:
        folder = args.folder or Path(own)
        model = make_model(args.shape, args.dtype, folder) if args.shape else args.model or TINY
        model = _longer(model, folder)
        setup = Setup(model, model, args.dtype, args.questions, LENGTH, Path(own))
        with started(setup, [OURS]) as servers:
            if not servers:
                raise SystemExit("the server gives no answer")
            for longest in args.longest:
                row = measure(servers[0], args.questions, args.words, args.rounds, longest)
                print(row, flush=True)


if __name__ == "__main__":
    main()
