"""Perplexity of a Llama model on a text in each encoding: what quantized weights cost.

The text is read in windows; of each, all tokens but the first are predicted. ``python -m benchmarks.perplexity``.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gguf_files import write_gguf
from benchmarks.runner import ROOT, exit_on_sigterm
from max.interfaces import PipelineTask
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines import perplexity as library

BOUNDS = {"Q8_0": 0.005, "Q6_K": 0.01, "Q5_K": 0.03, "Q4_K": 0.03, "Q4_0": 0.03}
"""By what share a perplexity may be above or below that of float32."""
BATCH = library.BATCH


def windows_of(folder: Path, text: str, size: int, most: int) -> list[list[int]]:
    """The tokens of a text in parts of equal size; a last shorter part is left out."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return library.windows_of(tokenizer.encode(text, add_special_tokens=False).ids, size, most)


def log_probabilities(folder: Path, windows: list[list[int]], **options: object) -> np.ndarray:
    """The log-probabilities of all tokens of windows but the first, ``[windows, size - 1]``, by a pipeline.

    Args:
        folder: The model.
        windows: The tokens.
        options: More of `PipelineConfig`.
    """
    config = PipelineConfig(
        model_path=folder,
        max_length=len(windows[0]) + 1,
        max_batch_size=BATCH,
        enable_echo=True,
        **options,
    )
    pipeline = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]
    return np.array(list(library.log_probabilities(pipeline, windows)))


def log_probabilities_of_transformers(
    folder: Path, windows: list[list[int]], prepare: Callable[[Any], None] | None = None
) -> np.ndarray:
    """The same, by transformers in float32; `prepare` may change the torch model before."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if prepare is not None:
        prepare(model)
    rows: list[np.ndarray] = []
    with torch.inference_mode():
        for start in range(0, len(windows), BATCH):
            tokens = torch.tensor(windows[start : start + BATCH])
            logs = model(tokens).logits[:, :-1].double().log_softmax(-1)
            rows.append(logs.gather(-1, tokens[:, 1:, None])[..., 0].numpy())
    return np.concatenate(rows)


def perplexity(logs: np.ndarray) -> float:
    """The perplexity of tokens of some log-probabilities."""
    return math.exp(-float(np.mean(logs)))


def measure(
    folder: Path, windows: list[list[int]], encodings: list[str], files: Path
) -> dict[str, float]:
    """The perplexity in float32 and bfloat16, and in each encoding of GGUF files.

    Args:
        folder: The model.
        windows: The tokens.
        encodings: Names of `QuantizationEncoding`.
        files: Where GGUF files are written.
    """
    found = {
        name: perplexity(log_probabilities(folder, windows, quantization_encoding=name))
        for name in ("float32", "bfloat16")
    }
    for name in encodings:
        path = write_gguf(folder, files / f"{name}.gguf", name)
        found[name] = perplexity(log_probabilities(folder, windows, weight_path=[path]))
    return found


def table(
    model: Path = ROOT / "models" / "tiny-chat",
    text: Path = ROOT / "models" / "tiny-chat" / "heldout.txt",
    window: int = 512,
    most: int = 1000,
    encodings: Sequence[str] = tuple(BOUNDS),
) -> Iterator[str]:
    """The lines of the table.

    Args:
        model: The model.
        text: A text that it was not trained on.
        window: Tokens of a window.
        most: How many windows at most.
        encodings: Names of `QuantizationEncoding`.
    """
    windows = windows_of(model, text.read_text(encoding="utf-8"), window, most)
    yield f"| {model.name}, {len(windows)} windows of {window} tokens | perplexity | to float32 | bound |"
    yield "|---|---|---|---|"
    reference = perplexity(log_probabilities_of_transformers(model, windows))
    with tempfile.TemporaryDirectory() as files:
        found = measure(model, windows, list(encodings), Path(files))
    plain = found["float32"]
    for name, value in {"float32, transformers": reference, **found}.items():
        bound = f"{BOUNDS[name]:.1%}" if name in BOUNDS else ""
        yield f"| {name} | {value:.4f} | {value / plain - 1:+.3%} | {bound} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-chat")
    parser.add_argument("--text", type=Path, default=ROOT / "models" / "tiny-chat" / "heldout.txt")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=1000, help="how many at most")
    parser.add_argument("--encodings", nargs="*", default=list(BOUNDS))
    args = parser.parse_args()
    exit_on_sigterm()
    for line in table(args.model, args.text, args.window, args.windows, args.encodings):
        print(line, flush=True)


if __name__ == "__main__":
    main()
