"""The servers that `benchmarks.serving` measures: how each is started, and the models that all of them read."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import string
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.generation import AVX2
from benchmarks.gguf_files import write_gguf
from benchmarks.models import FILE_TYPES, SHAPES, make_checkpoint
from benchmarks.peers import llama_server, python
from benchmarks.runner import ROOT
from max.entrypoints.load_test.http_client import Target

GGUF_NAMES = {"q4_0": "Q4_0", "q4_k": "Q4_K", "q8_0": "Q8_0", "bfloat16": "BF16", "float32": "F32"}
OURS = "ours"
ENGINES = (OURS, "llama.cpp", "MAX", "transformers")
CONTEXT = 8192
READY_S = {OURS: 120.0, "llama.cpp": 120.0, "MAX": 1200.0, "transformers": 300.0}


@dataclass
class Server:
    """A server that runs.

    Args:
        engine: Which one.
        process: Its process.
        target: Its address.
        model: The model's name for requests.
        context: The longest sequence.
    """

    engine: str
    process: subprocess.Popen[bytes]
    target: Target
    model: str
    context: int = CONTEXT

    def body(self, prompt: str, output: int) -> dict[str, Any]:
        """The body of a streamed completion of a fixed length."""
        shared = {"model": self.model, "max_tokens": output, "temperature": 0, "stream": True}
        if self.engine == "transformers":  # it refuses unknown fields, and the models end nowhere
            return {**shared, "prompt": prompt}
        options = {"include_usage": True}
        return {**shared, "prompt": prompt, "ignore_eos": True, "stream_options": options}

    def cpu_seconds(self) -> float:
        """The CPU time of its processes."""
        process = psutil.Process(self.process.pid)
        times = [each.cpu_times() for each in [process, *process.children(recursive=True)]]
        return sum(each.user + each.system for each in times)

    def stop(self) -> None:
        """Ends its processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


@dataclass
class Setup:
    """What the servers of one model are started with.

    Args:
        checkpoint: The model's folder.
        gguf: Its file for llama.cpp, and for ours where the encoding is GGUF's.
        encoding: The encoding of its weights.
        batch: The most sequences at once.
        length: The longest sequence.
        logs: The folder of the servers' logs.
        binaries: The programs of peers that are not where `benchmarks.peers` puts them.
        avx2: Whether engines are held to vectors of 256 bits.
    """

    checkpoint: Path
    gguf: Path
    encoding: str
    batch: int
    length: int
    logs: Path
    binaries: dict[str, str] = field(default_factory=dict)
    avx2: bool = False

    def command(self, engine: str, port: int) -> list[str] | None:
        """The command of a server; None where it is not installed or does not read the encoding."""
        quantized = self.encoding in FILE_TYPES
        if engine == OURS:
            code = "from max.entrypoints.cli import main; main()"
            weights = ["--weight-path", str(self.gguf)] if quantized else []
            return [
                sys.executable, "-c", code, "serve", "--model", str(self.checkpoint), *weights,
                "--quantization-encoding", self.encoding, "--port", str(port), "--metrics-port", "0",
                "--max-batch-size", str(self.batch), "--max-length", str(self.length),
                # llama.cpp's cache
                "--kv-cache-format", "float16",
            ]  # fmt: skip
        if engine == "llama.cpp":
            binary = self.binaries.get("llama.cpp") or llama_server(self.avx2)
            if not binary:
                return None
            return [
                str(binary), "-m", str(self.gguf), "--port", str(port), "-np", str(self.batch),
                "-c", str(self.batch * self.length), "-t", str(os.cpu_count() or 1), "--no-webui",
            ]  # fmt: skip
        if engine == "MAX":
            binary = self.binaries.get("MAX") or (
                str(found.with_name("max")) if (found := python("max")) else None
            )
            if not binary or quantized:
                return None
            return [
                binary, "serve", "--model-path", str(self.checkpoint), "--devices", "cpu", "--port", str(port),
                "--quantization-encoding", self.encoding, "--max-batch-size", str(self.batch),
                "--max-length", str(self.length),
            ]  # fmt: skip
        program = self.binaries.get("transformers") or (
            str(found.with_name("transformers")) if (found := python("transformers")) else None
        )
        if not program or quantized:
            return None
        return [
            program, "serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu",
            "--continuous-batching", "--dtype", self.encoding, str(self.checkpoint),
        ]  # fmt: skip

    def start(self, engine: str, env: dict[str, str] | None = None) -> Server | None:
        """Starts a server, and waits for its first answer; None where it cannot be had."""
        port = free_port()
        command = self.command(engine, port)
        if command is None:
            return None
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "MODULAR_TELEMETRY_ENABLED": "0"}
        variables |= {"MAX_SERVE_PORT": str(port), "MAX_SERVE_HOST": "127.0.0.1"}
        if engine == "MAX":  # a package of the same name: ours must not come before it
            variables.pop("PYTHONPATH", None)
        variables |= AVX2 if self.avx2 else {}
        log = self.logs / f"{engine}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env={**variables, **(env or {})},
                cwd="/" if engine == "MAX" else ROOT,
            )  # fmt: skip
        target = Target(f"http://127.0.0.1:{port}")
        server = Server(engine, process, target, str(self.checkpoint), self.length)
        if wait_for_answer(server, READY_S[engine]):
            return server
        print(f"{engine} gives no answer; its log is {log}", file=sys.stderr)
        server.stop()
        return None


def free_port() -> int:
    """A port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_answer(server: Server, seconds: float) -> bool:
    """Asks for one token until it comes.

    Args:
        server: The server.
        seconds: The longest time.
    """
    body = json.dumps({**server.body("a b c", 1), "stream": False}).encode()
    body = body.replace(b', "stream_options": {"include_usage": true}', b"")
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.process.poll() is None:
        request = urllib.request.Request(
            f"{server.target.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                response.read()
                return True
        except urllib.error.HTTPError as error:
            text = error.read()[:500].decode(errors="replace")
            error.close()
            if error.code < 500:
                print(f"{server.engine}: {error.code} {text}", file=sys.stderr)
                return False
            time.sleep(0.02)
        except OSError:
            time.sleep(0.01)
    return False


@contextlib.contextmanager
def started(setup: Setup, engines: Sequence[str]) -> Iterator[list[Server]]:
    """The servers that can be had, until the end of the block."""
    servers: list[Server] = []
    try:
        for engine in engines:
            if (server := setup.start(engine)) is not None:
                servers.append(server)
        yield servers
    finally:
        for server in servers:
            server.stop()


def name_all_tokens(tokenizer: dict[str, Any], size: int) -> None:
    """Gives every token of a model a printable text: a random model chooses any, and clients count pieces of text.

    Args:
        tokenizer: The data of ``tokenizer.json``, a byte-level BPE; changed. No text is encoded to the new tokens.
        size: The tokens of the model.
    """
    vocabulary = tokenizer["model"]["vocab"]
    added = {token["id"] for token in tokenizer["added_tokens"]}
    letters = string.ascii_lowercase
    for number in sorted(set(range(size)) - set(vocabulary.values()) - added):
        word = "".join(letters[number // 26**place % 26] for place in range(4))
        vocabulary[f"Ġ{word}{number}"] = number


def prepared(shape: str, encoding: str, folder: Path) -> tuple[Path, Path]:
    """A model's folder, whose context is long enough for all cases, and its GGUF file with a vocabulary."""
    source = ROOT / "models" / "tiny-chat"
    if shape in SHAPES:
        dtype = "float32" if encoding in FILE_TYPES else encoding
        source = make_checkpoint(shape, dtype, folder)
    target = folder / f"serving-words-{source.name}"
    if not target.exists():
        part = Path(tempfile.mkdtemp(dir=folder))
        for file in source.iterdir():
            (part / file.name).symlink_to(file.resolve())
        config = json.loads((source / "config.json").read_text())
        (part / "config.json").unlink()
        config["max_position_embeddings"] = CONTEXT
        (part / "config.json").write_text(json.dumps(config, indent=1))
        tokenizer = json.loads((source / "tokenizer.json").read_text())
        name_all_tokens(tokenizer, config["vocab_size"])
        (part / "tokenizer.json").unlink()
        (part / "tokenizer.json").write_text(json.dumps(tokenizer))
        part.rename(target)
    gguf = folder / f"{target.name}-{encoding}.gguf"
    if not gguf.exists():
        write_gguf(target, gguf.with_suffix(".part"), GGUF_NAMES[encoding]).rename(gguf)
    return target, gguf
