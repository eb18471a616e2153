"""With `batch_invariant` the logits of a text are bitwise equal alone, in batches, in chunks and after preemption."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gguf_files import write_gguf
from max.interfaces import PipelineTask, RequestID, SamplingParams, TextGenerationRequest
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.generation.generation import Generation

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
NEW = 20
LENGTHS = (118, 124, 250, 9, 110, 126, 300, 50)
"""Tokens of prompts: some come to the end of a page while they generate."""


class Recorded:
    """Returns the bundled model, and a dictionary from preceding tokens to the bits of the logits that it computes."""

    def __init__(self, encoding: str, **values: Any) -> None:
        config = PipelineConfig(
            model_path=TINY,
            quantization_encoding=encoding,
            max_length=512,
            batch_invariant=True,
            **values,
        )
        self.pipeline = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]
        self.logits: dict[tuple[int, ...], set[bytes]] = defaultdict(set)
        self.batches: set[int] = set()
        model, rows = self.pipeline.replicas[0].model, []
        execute, execute_model = self.pipeline.execute, model.execute

        def noting(inputs: Any) -> Any:
            contexts = inputs.batch.values()
            self.batches.add(len(contexts))
            rows[:] = [tuple(c.tokens[: c.active_idx].tolist()) for c in contexts]
            return execute(inputs)

        def keeping(inputs: Any) -> Any:
            outputs = execute_model(inputs)
            for tokens, row in zip(rows, outputs.logits.to_numpy(), strict=True):
                self.logits[tokens].add(row.tobytes())
            return outputs

        self.pipeline.execute, model.execute = noting, keeping

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        given = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
        requests = [
            TextGenerationRequest(RequestID(), "m", prompt=p, sampling_params=given)
            for p in prompts
        ]
        return [output.tokens for output in self.pipeline.generate(requests)]


@pytest.mark.parametrize("encoding", ["bfloat16", "float32", "q4_k"])
def test_logits_are_the_same_in_any_company(
    encoding: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, tmp_path: Path
) -> None:
    values = {}
    if encoding == "q4_k":
        values["weight_path"] = [str(write_gguf(TINY, tmp_path / "tiny.gguf", "Q4_K"))]
    alone = Recorded(encoding, enable_prefix_caching=False, max_num_steps=1, **values)
    text = (TINY / "heldout.txt").read_text()
    tokens = alone.pipeline.tokenizer.encode_now(text[:1300])
    starts = rng.integers(0, len(tokens) - 300, len(LENGTHS))
    prompts = [tokens[at : at + n].tolist() for at, n in zip(starts, LENGTHS, strict=True)]
    expected = [alone.generate([prompt])[0] for prompt in prompts]
    assert all(len(found) == 1 for found in alone.logits.values())

    bytes_a_page = 128 * 8 * 2 * 128 * (2 if encoding == "bfloat16" else 4)
    monkeypatch.setattr(PipelineConfig, "available_cache_memory", lambda self: 5 * bytes_a_page)
    small = Recorded(
        encoding, max_batch_size=8, max_num_steps=1, prefill_chunk_size=48,
        enable_in_flight_batching=True, **values,
    )  # fmt: skip
    assert small.generate(prompts) == expected
    assert Generation.of(small.pipeline).scheduler.preemptions > 0 and max(small.batches) > 2
    compared = 0
    for before in alone.logits.keys() & small.logits.keys():
        assert small.logits[before] == alone.logits[before], f"after {len(before)} tokens"
        compared += 1
    assert compared == len(prompts) * NEW

    monkeypatch.undo()
    # several steps per call, whole prompts, shared pages
    together = Recorded(encoding, max_batch_size=8, **values)
    assert together.generate([*prompts, *prompts]) == expected * 2
