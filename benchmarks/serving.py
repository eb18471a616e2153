"""Servers under the same clients in one run: ours, llama.cpp's, MAX's, transformers'; throughput, times to tokens, starts, idling.

All servers are up at once, and each case goes round them in turn. Prompts are texts of a number of tokens, which all tokenize alike; answers
have a fixed length, streamed. What a server cannot run is left empty, and its log says why. The results are written as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.encoder_files import make_ranker, minilm, write_encoder
from benchmarks.generation import AVX2
from benchmarks.models import FILE_TYPES, SHAPES, fits
from benchmarks.peers import llama_server
from benchmarks.runner import ROOT, Worker, commit, exit_on_sigterm, machine
from benchmarks.servers import (
    CONTEXT,
    ENGINES,
    GGUF_NAMES,
    OURS,
    READY_S,
    Server,
    Setup,
    free_port,
    prepared,
    started,
)
from max.entrypoints.load_test.http_client import Target
from max.entrypoints.load_test.measure import Sample, measure_one, summary

CASE_S = 110.0
"""The longest time of a case at one server unless `--case-s` says another: two servers take four minutes at most."""


@dataclass(frozen=True)
class Sizes:
    """How large the cases are.

    Args:
        clients: The numbers of clients of the throughput cases.
        rounds: The requests of each client.
        prompt: Tokens of a prompt.
        prefix: Tokens of the shared prefix.
        output: Tokens of an answer.
        long_prompt: Tokens of the prompts that disturb others.
        arrivals: Requests of the case at a rate.
        disturbed_s: Seconds of the case with long prompts.
        added_output: Tokens of an answer of the case that times steps.
        idle_s: Seconds over which an idle server is watched.
        texts: Texts of the cases of vectors.
        case_s: The longest time of a case at one server, in seconds.
    """

    clients: tuple[int, ...] = (16, 64)
    rounds: int = 2
    prompt: int = 256
    prefix: int = 1024
    output: int = 128
    long_prompt: int = 4096
    arrivals: int = 40
    idle_s: float = 15.0
    texts: int = 256
    disturbed_s: float = 60.0
    added_output: int = 96
    case_s: float = CASE_S


QUICK = Sizes((2, 4), 1, 24, 64, 12, 200, 6, 2.0, 8, 8.0, 24)
"""For a check of the harness, not for figures."""


class Prompts:
    """Texts of a number of tokens, no two alike.

    Args:
        folder: The model, with its ``tokenizer.json``.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # some files of encoders pad each text to a length
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._numbers = random.Random(0)

    def text(self, tokens: int) -> str:
        """A random text of a given length in tokens.

        Args:
            tokens: The number of tokens; the text has one fewer where it ends inside a word of two.
        """
        words: list[str] = []
        while True:
            words += [self._word() for _ in range(max(tokens // 4, 1))]
            encoding = self._tokenizer.encode(" ".join(words), add_special_tokens=False)
            if len(encoding.ids) >= tokens:
                end = encoding.offsets[tokens - 1][1]
                return " ".join(words)[:end]

    def _word(self) -> str:
        letters = "abcdefghijklmnopqrstuvwxyz"
        return "".join(self._numbers.choices(letters, k=self._numbers.randint(2, 7)))


async def closed_loop(
    server: Server, prompts: Sequence[str], output: int, clients: int
) -> list[Sample]:
    """Sends the prompts from a fixed number of clients; a client sends its next request when the last one has ended."""
    waiting = list(reversed(prompts))
    samples: list[Sample] = []

    async def client() -> None:
        while waiting:
            samples.append(await measure_one(server.target, server.body(waiting.pop(), output)))

    await asyncio.gather(*(client() for _ in range(clients)))
    return samples


async def at_rate(server: Server, prompts: Sequence[str], output: int, rate: float) -> list[Sample]:
    """Sends the prompts at random times; `rate` is the mean number of requests per second."""
    numbers, tasks = random.Random(1), list[asyncio.Task[Sample]]()
    for prompt in prompts:
        tasks.append(asyncio.ensure_future(measure_one(server.target, server.body(prompt, output))))
        await asyncio.sleep(numbers.expovariate(rate))
    return list(await asyncio.gather(*tasks))


async def disturbed(
    server: Server, prompts: Prompts, sizes: Sizes, streams: int = 4
) -> list[Sample]:
    """Streams that decode while long prompts come in, one after the other; the samples of the streams."""
    samples = [Sample(0.0) for _ in range(streams)]
    # more than come in the time, which ends them
    output = min(4096, server.context - sizes.prompt)
    running = [
        asyncio.ensure_future(
            measure_one(server.target, server.body(prompts.text(sizes.prompt // 8), output), sample)
        )
        for sample in samples
    ]
    disturbances: list[Sample] = []

    async def disturb() -> None:
        while not all(each.done() for each in running):
            await asyncio.sleep(0.5)
            body = server.body(prompts.text(sizes.long_prompt), 1)
            disturbances.append(await measure_one(server.target, body))

    others = asyncio.ensure_future(disturb())
    await asyncio.wait({others}, timeout=sizes.disturbed_s)
    for task in (others, *running):
        task.cancel()
    await asyncio.gather(others, *running, return_exceptions=True)
    now = time.perf_counter()
    for sample in samples:
        sample.end = sample.end or now
        if not sample.pauses and not sample.error:
            sample.error = f"no two pieces of text in {sizes.disturbed_s:.0f} s"
    if not disturbances:
        samples.append(Sample(0.0, error=f"no long prompt was read in {sizes.disturbed_s:.0f} s"))
    return [*samples, *(each for each in disturbances if each.error)]


def run(work: Coroutine[Any, Any, list[Sample]], seconds: float = CASE_S) -> list[Sample]:
    """Runs a case within its time; a server that needs more has no figures."""
    try:
        return asyncio.run(asyncio.wait_for(work, seconds))
    except TimeoutError:
        return [Sample(0.0, error=f"the case took more than {seconds:.0f} s")]


Row = dict[str, Any]


class Report:
    """The rows as they are measured: printed, and written to the file at once, as a run may be cut short.

    Args:
        path: The JSON file, or None.
        quick: Whether the cases are small.
    """

    def __init__(self, path: Path | None, quick: bool) -> None:
        self.rows: list[Row] = []
        self.path = path
        self.header = {"machine": machine(), "commit": commit(), "quick": quick}

    def add(self, model: str, case: str, engine: str, **figures: Any) -> None:
        """Adds a row.

        Args:
            model: The model and its encoding.
            case: The case.
            engine: The server.
            figures: What was measured.
        """
        self.rows.append({"model": model, "case": case, "engine": engine, **figures})
        values = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in figures.items()
        )
        print(f"{model} | {case} | {engine} | {values}", flush=True)
        if self.path is not None:
            text = json.dumps({**self.header, "rows": self.rows}, indent=1, ensure_ascii=False)
            self.path.write_text(text + "\n")


def measure_throughput(
    report: Report, name: str, servers: Sequence[Server], prompts: Prompts, sizes: Sizes
) -> float:
    """Throughput, with and without a shared prefix.

    Returns:
        Requests a second of the best peer with the most clients; ours where there is no peer.
    """
    rates: dict[str, float] = {}
    for clients in sizes.clients:
        for shared in (0, sizes.prefix) if sizes.prefix else (0,):
            prefix = prompts.text(shared) + " " if shared else ""
            case = f"{clients} clients" + (f", {shared} shared" if shared else "")
            for server in servers:
                texts = [prefix + prompts.text(sizes.prompt) for _ in range(clients * sizes.rounds)]
                work = closed_loop(server, texts, sizes.output, clients)
                figures = summary(run(work, sizes.case_s), 0.0)
                report.add(
                    name, case, server.engine,
                    output_tok_s=figures["output_throughput"], failed=figures["failed"],
                    errors=figures["errors"],
                )  # fmt: skip
                if not shared and clients == sizes.clients[-1]:
                    rates[server.engine] = figures["request_throughput"]
    return max([rate for engine, rate in rates.items() if engine != OURS] or [rates.get(OURS, 1.0)])


def measure_rate(
    servers: Sequence[Server], prompts: Prompts, sizes: Sizes, report: Report, name: str
) -> float:
    """Requests a second of the best peer, ours where there is none, in a short run with the fewest clients."""
    clients, rates = sizes.clients[0], dict[str, float]()
    for server in servers:
        texts = [prompts.text(sizes.prompt) for _ in range(clients)]
        work = closed_loop(server, texts, sizes.output, clients)
        figures = summary(run(work, sizes.case_s), 0.0)
        rates[server.engine] = figures["request_throughput"]
        report.add(
            name, f"rate, {clients} clients", server.engine, requests_s=rates[server.engine],
            failed=figures["failed"], errors=figures["errors"],
        )  # fmt: skip
    peers = [rate for engine, rate in rates.items() if engine != OURS and rate]
    return max(peers or [rates.get(OURS) or 1.0])


def measure_first_tokens(
    report: Report,
    name: str,
    servers: Sequence[Server],
    prompts: Prompts,
    sizes: Sizes,
    rate: float,
) -> None:
    """Times to the first token at a rate of requests a second, the same for all."""
    for server in servers:
        texts = [prompts.text(sizes.prompt) for _ in range(sizes.arrivals)]
        requests = at_rate(server, texts, sizes.output, rate)
        figures = summary(run(requests, sizes.arrivals / rate + CASE_S / 2), rate)
        spread = figures["ttft_ms"]
        report.add(
            name, f"{rate:.2f} requests/s", server.engine,
            ttft_p50_ms=spread.get("median"), ttft_p99_ms=spread.get("p99"), failed=figures["failed"],
            errors=figures["errors"],
        )  # fmt: skip


def measure_disturbed(
    report: Report, name: str, servers: Sequence[Server], prompts: Prompts, sizes: Sizes
) -> None:
    """The time between tokens while long prompts come in."""
    for server in servers:
        figures = summary(run(disturbed(server, prompts, sizes)), 0.0)
        spread = figures["itl_ms"]
        ratio = spread["p99"] / spread["median"] if spread else None
        report.add(
            name, f"prompts of {sizes.long_prompt}", server.engine,
            itl_p50_ms=spread.get("median"), itl_p99_ms=spread.get("p99"), p99_of_median=ratio,
            failed=figures["failed"], errors=figures["errors"],
        )  # fmt: skip


def measure_added(
    report: Report, name: str, setup: Setup, server: Server, prompts: Prompts, sizes: Sizes
) -> None:
    """What the server adds to a step of the engine alone at 16 streams: both in turn, three times."""
    streams = min(16, setup.batch)
    weights: dict[str, Any] = {"weights": str(setup.gguf)} if setup.encoding in FILE_TYPES else {}
    engine = Worker(
        "benchmarks.workers.supremum_llm", AVX2 if setup.avx2 else {}, model=str(setup.checkpoint),
        dtype=setup.encoding, batch=streams, **weights,
    )  # fmt: skip
    alone: list[float] = []
    served: list[float] = []
    # the prompts are not timed
    size = sizes.prompt // 4
    tokens = list(range(5, 5 + size))
    for turn in range(4):
        output = sizes.added_output if turn else 8
        rate = engine.call("generate", prompt=tokens, new_tokens=output, batch=streams)
        texts = [prompts.text(size) for _ in range(streams)]
        samples: list[Sample] = run(closed_loop(server, texts, output, streams))
        if failed := [sample.error for sample in samples if sample.error]:
            engine.close()
            report.add(name, f"step at {streams} streams", OURS, errors={failed[0]: len(failed)})
            return
        if turn:  # the first is a warm-up
            alone.append(streams / rate["decode_tok_s"] * 1e3)
            # from the first token of the last stream on, all of them decode
            first, end = max(s.first for s in samples), min(s.end for s in samples)
            got = sum(
                s.output_tokens * max(end - first, 0.0) / max(s.end - s.first, 1e-9)
                for s in samples
            )
            served.append((end - first) / max(got / streams, 1e-9) * 1e3)
    engine.close()
    step, with_http = sorted(alone)[1], sorted(served)[1]
    report.add(
        name, f"step at {streams} streams", OURS, engine_ms=step, served_ms=with_http,
        added_percent=100 * (with_http - step) / step,
    )  # fmt: skip


def measure_starts(report: Report, name: str, setup: Setup, engines: Sequence[str]) -> None:
    """Seconds from the command to the first answer: with an empty cache, and with a full one."""
    for engine in engines:
        with tempfile.TemporaryDirectory() as cache:
            env = {"MAX_CACHE_DIR": cache} if engine == OURS else {}
            for kind in ("cold", "packed", "warm") if engine == OURS else ("warm",):
                begin = time.perf_counter()
                server = setup.start(engine, env)
                if server is None:
                    break
                report.add(
                    name, f"start, {kind}", engine, first_answer_s=time.perf_counter() - begin
                )
                server.stop()


def measure_idle(report: Report, name: str, servers: Sequence[Server], sizes: Sizes) -> None:
    """The share of a core that a server takes while nobody asks."""
    time.sleep(sizes.idle_s * 4 / 3)  # ours measures its kernels in the first idle seconds
    for server in servers:
        begin, seconds = time.perf_counter(), server.cpu_seconds()
        time.sleep(sizes.idle_s)
        used = server.cpu_seconds() - seconds
        share = 100 * used / (time.perf_counter() - begin)
        report.add(name, "idle", server.engine, percent_of_a_core=share)


async def _post_all(
    server: Server, path: str, bodies: Sequence[dict[str, Any]], clients: int
) -> float:
    waiting = list(bodies)

    async def client() -> None:
        while waiting:
            await server.target.json(path, waiting.pop())

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return len(bodies) / (time.perf_counter() - begin)


def measure_vectors(
    report: Report,
    task: str,
    folder: Path,
    gguf: Path | None,
    args: argparse.Namespace,
    sizes: Sizes,
) -> None:
    """Requests a second of 64 clients: ours, and llama.cpp's of a GGUF file.

    Args:
        report: Receives the rows.
        task: ``embed`` or ``rerank``.
        folder: The model.
        gguf: The same for llama.cpp; None: it is left out.
        args: The programs and the folder of logs.
        sizes: The number of texts.
    """
    prompts = Prompts(folder)
    texts = [prompts.text(64) for _ in range(sizes.texts)]
    name, clients = str(folder), 64
    path = "/v1/embeddings" if task == "embed" else "/rerank"
    bodies: list[dict[str, Any]] = [{"model": name, "input": text} for text in texts]
    if task == "rerank":
        bodies = [
            {"model": name, "query": text, "documents": texts[:8]}
            for text in texts[: max(len(texts) // 4, 1)]
        ]
    ours = Setup(folder, folder, "float32", clients, 256, args.logs)
    commands = {OURS: [arg for arg in ours.command(OURS, 0) or [] if arg]}
    if gguf is not None and (binary := args.binaries.get("llama.cpp") or llama_server(args.avx2)):
        commands["llama.cpp"] = [
            str(binary), "-m", str(gguf), "--embedding" if task == "embed" else "--reranking",
            "-np", str(clients), "-c", str(clients * 256), "-b", "2048", "-ub", "2048",
            "-t", str(os.cpu_count() or 1), "--no-webui", "--port", "0",
        ]  # fmt: skip
    for engine, command in commands.items():
        port = free_port()
        command[command.index("--port") + 1] = str(port)
        log = args.logs / f"{engine}-{task}.log"
        variables = {**os.environ, **(AVX2 if args.avx2 else {})}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=ROOT, env=variables
            )
        server = Server(engine, process, Target(f"http://127.0.0.1:{port}"), name)
        try:
            asyncio.run(_first_answer(server, path, bodies[0], log))
            rate = asyncio.run(asyncio.wait_for(_post_all(server, path, bodies, clients), CASE_S))
            report.add(folder.name, f"{task}, {clients} clients", engine, requests_s=rate)
        except (OSError, RuntimeError, TimeoutError) as error:
            text = str(error) or f"the case took more than {CASE_S:.0f} s"
            report.add(folder.name, f"{task}, {clients} clients", engine, errors={text: 1})
        finally:
            server.stop()


def vector_models(args: argparse.Namespace) -> Iterator[tuple[str, Path, Path | None]]:
    """The task, the folder and the GGUF file of each model of the case `vectors`.

    Without ``--encoder`` all-MiniLM-L6-v2 embeds, and it ranks with a random head.
    """
    if args.encoder is None and args.ranker is None and (encoder := minilm()) is not None:
        yield "embed", encoder, write_encoder(encoder, args.folder / "minilm.gguf")
        ranker = make_ranker(encoder, args.folder / "ranker")
        yield "rerank", ranker, write_encoder(ranker, args.folder / "ranker.gguf")
    if args.encoder is not None:
        yield "embed", args.encoder, args.encoder_gguf
    if args.ranker is not None:
        yield "rerank", args.ranker, args.ranker_gguf


async def _first_answer(server: Server, path: str, body: dict[str, Any], log: Path) -> None:
    """Waits until a server answers.

    Raises:
        RuntimeError: It has ended, or needs too long.
    """
    end = time.monotonic() + READY_S[server.engine]
    while True:
        try:
            await server.target.json(path, body)
            return
        except (OSError, ValueError) as error:  # not there yet, or loading
            if time.monotonic() > end or server.process.poll() is not None:
                raise RuntimeError(f"no answer: {error}; the log is {log}") from error
            await asyncio.sleep(0.1)


CASES: dict[str, str] = {
    "throughput": "tokens a second, with and without a shared prefix",
    "first": "times to the first token at 70 % of the best peer's throughput (without --rate and `throughput`, of a short run)",
    "added": "what HTTP adds to a step at 16 streams",
    "disturbed": "the time between tokens while long prompts come in",
    "starts": "from the command to the first answer",
    "idle": "the load of an idle server",
    "vectors": "requests a second of --encoder and --ranker, 64 clients",
}


def measure_model(
    report: Report,
    shape: str,
    encoding: str,
    cases: Sequence[str],
    args: argparse.Namespace,
    sizes: Sizes,
) -> None:
    """All cases of one model."""
    name = f"{shape} {encoding}"
    checkpoint, gguf = prepared(shape, encoding, args.folder)
    length = -(-(sizes.prefix + sizes.prompt + sizes.output + 64) // 256) * 256
    setup = Setup(
        checkpoint, gguf, encoding, sizes.clients[-1], length, args.logs, args.binaries, args.avx2
    )
    prompts = Prompts(checkpoint)
    if "starts" in cases:
        measure_starts(report, name, setup, [e for e in args.engines if e in (OURS, "llama.cpp")])
    if {"throughput", "first", "idle"} & set(cases):
        with started(setup, args.engines) as servers:
            rate: float | None = args.rate
            if "throughput" in cases:
                measured = measure_throughput(report, name, servers, prompts, sizes)
                rate = 0.7 * measured if rate is None else rate
            elif "first" in cases and rate is None:
                rate = 0.7 * measure_rate(servers, prompts, sizes, report, name)
            if "first" in cases and rate is not None:
                measure_first_tokens(report, name, servers, prompts, sizes, rate)
            if "idle" in cases:
                measure_idle(report, name, servers, sizes)
    if "added" in cases and OURS in args.engines:
        # alone, as the others are gone
        with started(setup, [OURS]) as servers:
            if servers:
                measure_added(report, name, setup, servers[0], prompts, sizes)
    if "disturbed" in cases:
        long = Setup(
            checkpoint, gguf, encoding, 8, CONTEXT if sizes.long_prompt > 1500 else 1024, args.logs,
            args.binaries, args.avx2,
        )  # fmt: skip
        with started(long, args.engines) as servers:
            measure_disturbed(report, name, servers, prompts, sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shapes", nargs="+", default=["llama-135m", "llama-1.2b"], choices=[*SHAPES, "tiny"]
    )
    parser.add_argument(
        "--encodings", nargs="+", default=["q4_k", "q8_0", "bfloat16"], choices=list(GGUF_NAMES)
    )
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument(
        "--cases",
        nargs="+",
        default=list(CASES),
        choices=list(CASES),
        help="; ".join(f"{k}: {v}" for k, v in CASES.items()).replace("%", "%%"),
    )
    parser.add_argument("--clients", nargs="+", type=int, help="numbers of clients (16 64)")
    parser.add_argument("--rounds", type=int, help="requests of each client in throughput (2)")
    parser.add_argument(
        "--case-s",
        type=float,
        help=f"the longest time of a throughput case at a server ({CASE_S:.0f})",
    )
    parser.add_argument(
        "--prefix", type=int, help="tokens of the shared prefix; 0: no such case (1024)"
    )
    parser.add_argument(
        "--rate",
        type=float,
        help="requests/s of the case `first`; by default 70 %% of the best peer's throughput",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small cases: a check of the harness, no figures"
    )
    parser.add_argument(
        "--avx2", action="store_true", help="hold ours to AVX2, as a build of llama.cpp for it is"
    )
    parser.add_argument(
        "--llama-server", help="llama.cpp's server; by default that of `benchmarks.peers`"
    )
    parser.add_argument("--max", help="MAX's command; by default that of `benchmarks.peers`")
    parser.add_argument(
        "--transformers", help="transformers' command; by default that of `benchmarks.peers`"
    )
    parser.add_argument(
        "--encoder",
        type=Path,
        help="the folder of an encoder (all-MiniLM-L6-v2, and a ranker made of it)",
    )
    parser.add_argument("--encoder-gguf", type=Path, help="the same encoder for llama.cpp")
    parser.add_argument("--ranker", type=Path, help="the folder of a model with a head for ranks")
    parser.add_argument("--ranker-gguf", type=Path, help="the same model for llama.cpp")
    default = Path(tempfile.gettempdir()) / f"supremum-bench-{os.getuid()}"
    parser.add_argument("--folder", type=Path, default=default, help="where the models are made")
    parser.add_argument("--json", type=Path, help="where the results are written")
    args = parser.parse_args()
    exit_on_sigterm()
    if args.llama_server and shutil.which(args.llama_server) is None:
        parser.error(f"--llama-server: there is no program {args.llama_server}")
    named = {
        "llama.cpp": args.llama_server,
        "MAX": args.max,
        "transformers": args.transformers,
    }
    args.binaries = {engine: path for engine, path in named.items() if path}
    args.folder.mkdir(exist_ok=True)
    args.logs = Path(tempfile.mkdtemp(prefix="supremum-serving-"))
    sizes = QUICK if args.quick else Sizes()
    given = {
        "clients": tuple(args.clients) if args.clients else None,
        "rounds": args.rounds,
        "case_s": args.case_s,
        "prefix": args.prefix,
    }
    sizes = replace(sizes, **{name: value for name, value in given.items() if value is not None})
    report = Report(args.json, args.quick)
    print(machine(), "logs:", args.logs, flush=True)
    begin = time.monotonic()
    for shape in args.shapes if set(args.cases) - {"vectors"} else ():
        for encoding in args.encodings:
            if shape in SHAPES and not fits(shape, encoding):
                print(
                    f"{shape} {encoding}: rows that {encoding} has no blocks for are in q4_0 or q8_0"
                )
            measure_model(report, shape, encoding, args.cases, args, sizes)
    if "vectors" in args.cases:
        for task, folder, gguf in vector_models(args):
            measure_vectors(report, task, folder, gguf, args, sizes)
    print(f"{(time.monotonic() - begin) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
