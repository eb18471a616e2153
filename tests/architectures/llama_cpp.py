"""llama.cpp as a black box: a process that loads GGUF files and gives the logits of tokens."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import peers

_PROGRAM = """
import json, sys
import numpy as np
import llama_cpp
for line in sys.stdin:
    request = json.loads(line)
    answer = {}
    try:
        if request["kind"] == "quantize":
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.nthread = request["ftype"], 2
            answer["code"] = llama_cpp.llama_model_quantize(
                request["path"].encode(), request["out"].encode(), params
            )
        elif request["kind"] == "tokens":
            model = llama_cpp.Llama(request["path"], vocab_only=True)
            text = request["text"].encode()
            answer["tokens"] = model.tokenize(text, add_bos=False, special=True)
        else:
            # caches in float32
            model = llama_cpp.Llama(
                request["path"], n_ctx=request["context"], logits_all=True, n_threads=1, type_k=0, type_v=0,
                n_batch=request["context"], verbose=True,
            )
            scores = []
            for tokens in request["texts"]:
                model.reset()
                model.eval(tokens)
                scores.append(np.array(model.scores[: len(tokens)]))
            np.save(request["out"], np.stack(scores))
            del model
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    print("ANSWER " + json.dumps(answer), flush=True)
"""


class LlamaCpp:
    """A process of llama.cpp.

    Args:
        python: The interpreter of its environment.
    """

    def __init__(self, python: Path) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.log = Path(self.folder.name) / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(python), "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        before = self.log.stat().st_size
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
                if "error" in answer:
                    log = self.log.read_text("utf-8", "replace")[before:]
                    lines = [text for text in log.splitlines() if "rror" in text or "ailed" in text]
                    raise AssertionError(f"llama.cpp: {answer['error']}; {'; '.join(lines)}")
                return answer
        raise AssertionError(f"llama.cpp ended: {self.log.read_text('utf-8', 'replace')[-2000:]}")

    def logits(
        self, path: Path, texts: Sequence[Sequence[int]], context: int = 128
    ) -> np.ndarray[Any, Any]:
        """The logits of all tokens of texts of one length, ``[texts, tokens, vocabulary]``."""
        out = Path(self.folder.name) / "logits.npy"
        self._ask(
            kind="logits",
            path=str(path),
            texts=[list(map(int, text)) for text in texts],
            context=context,
            out=str(out),
        )
        return np.load(out)

    def perplexity(self, path: Path, windows: Sequence[Sequence[int]]) -> float:
        """The perplexity of windows of one length, of which each begins anew."""
        logits = self.logits(path, windows, len(windows[0])).astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chosen = np.take_along_axis(logs[:, :-1], np.array(windows)[:, 1:, None], 2)
        return float(np.exp(-chosen.mean()))

    def quantize(self, path: Path, out: Path, file_type: int) -> None:
        """Quantizes a file by llama.cpp's number of a kind of files."""
        assert self._ask(kind="quantize", path=str(path), out=str(out), ftype=file_type) == {
            "code": 0
        }

    def tokens(self, path: Path, text: str) -> list[int]:
        """The tokens of a text by a file's tokenizer."""
        return self._ask(kind="tokens", path=str(path), text=text, context=8)["tokens"]

    def close(self) -> None:
        """Ends the process."""
        with self.process:
            self.process.kill()
        self.folder.cleanup()


def start() -> LlamaCpp:
    """A process; skips the test where llama.cpp is not installed (``python -m benchmarks.peers llama-avx2``)."""
    python = peers.python("llama-avx2")
    if python is None:
        pytest.skip("llama.cpp is not installed: python -m benchmarks.peers llama-avx2")
    return LlamaCpp(python)
