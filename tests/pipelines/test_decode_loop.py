"""Several decoding steps in one call give the same tokens as single steps."""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from max._compiler import pipeline
from max._config import flags
from max.driver import Tensor
from max.engine import InferenceSession
from max.engine.load import program_store
from max.graph import DeviceRef
from max.interfaces import (
    GenerationStatus,
    PipelineTask,
    RequestID,
    SamplingParams,
    TextGenerationInputs,
    TextGenerationRequest,
)
from max.mlir import entry
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.core.exceptions import NotFiniteError
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.generation import Generation
from max.pipelines.generation.replica import Replica
from max.pipelines.generation.steps.decode_loop import next_step_graph
from max.pipelines.sampling.inputs import step_seed

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
PROMPTS = ["Hello", "def f(x):", "The capital of", "x = ", "a" * 300]


def pipeline_of(steps: int, model: Path = TINY, **values):
    config = PipelineConfig(
        model_path=model,
        quantization_encoding="float32",
        max_num_steps=steps,
        **{"max_length": 512, "max_batch_size": 8, **values},
    )
    return PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]


@pytest.fixture(scope="module")
def single():
    return pipeline_of(1)


@pytest.fixture(scope="module")
def several():
    return pipeline_of(5)


def generated(pipeline, prompts=PROMPTS, new=40, **params):
    given = SamplingParams(**{"temperature": 0, "max_new_tokens": new, **params})
    requests = [
        TextGenerationRequest(RequestID(), "m", prompt=p, sampling_params=given) for p in prompts
    ]
    return [(o.tokens, o.final_status) for o in pipeline.generate(requests)]


def context(prompt: list[int], new: int, **values) -> TextContext:
    return TextContext(
        max_length=len(prompt) + new, tokens=np.array(prompt),
        sampling_params=SamplingParams(temperature=0, **values),
    )  # fmt: skip


def run(pipeline, steps: int, *contexts: TextContext):
    return pipeline.execute(TextGenerationInputs([{c.request_id: c for c in contexts}], steps))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 2**63 + 5},
        {"ignore_eos": True},
        {"stop_token_ids": [13, 15, 16]},
        {"frequency_penalty": 0.7},
        {"min_new_tokens": 7},
    ],
    ids=str,
)
def test_it_equals_single_steps(single, several, params) -> None:
    wanted = generated(single, **params)
    assert {status for _, status in wanted} <= {
        GenerationStatus.END_OF_SEQUENCE, GenerationStatus.MAXIMUM_LENGTH,
    }  # fmt: skip
    assert generated(several, **params) == wanted
    cache = several.kv_managers[0]
    cache.pages.check()
    assert cache.free_pages == cache.total_num_pages


def test_it_runs_fewer_executions(several, monkeypatch) -> None:
    calls: list[int] = []
    real = Replica._run_loop

    def count(self, loop, batch, num_steps, *given):
        calls.append(num_steps)
        return real(self, loop, batch, num_steps, *given)

    monkeypatch.setattr(Replica, "_run_loop", count)
    ((tokens, _),) = generated(several, ["x = "], 42, ignore_eos=True)
    assert len(tokens) == 42
    # one token with the prompt, then calls of five steps, and one step
    assert calls == [5] * 8


def test_over_the_ends_of_pages_and_to_the_last_place(single, several) -> None:
    text = (TINY / "heldout.txt").read_text()[:430]
    for new in (90, None):
        params = {"max_new_tokens": new, "ignore_eos": True}
        assert generated(several, [text], **params) == generated(single, [text], **params)


def test_an_end_stops_all_so_that_nothing_is_wasted(several) -> None:
    """The other sequence continues with the next call."""
    (tokens, _), (other, _) = generated(several, ["x = ", "Hello"], 12, ignore_eos=True)
    prompts = [several.tokenizer.encode_now(p).tolist() for p in ("x = ", "Hello")]
    first, second = context(prompts[0], 12), context(prompts[1], 12)
    first.eos_token_ids = {tokens[3]}
    cut = tokens.index(tokens[3]) + 1
    run(several, 1, first, second)
    outputs = run(several, 10, first, second)
    assert outputs[first.request_id].tokens == tokens[1:cut]
    assert outputs[first.request_id].final_status == GenerationStatus.END_OF_SEQUENCE
    assert outputs[second.request_id].tokens == other[1:cut]
    several.release(first.request_id)
    assert run(several, 4, second)[second.request_id].tokens == other[cut : cut + 4]
    several.release(second.request_id)


def test_log_probabilities_and_profiles_take_single_steps(several) -> None:
    prompt = several.tokenizer.encode_now("x = ").tolist()
    ((tokens, _),) = generated(several, ["x = "], 9, ignore_eos=True)
    one = context(prompt, 9)
    one.log_probabilities = 2
    run(several, 1, one)
    inputs = TextGenerationInputs([{one.request_id: one}], 3)
    outputs = several.execute(inputs)[one.request_id]
    assert outputs.tokens == tokens[1:4] and len(outputs.log_probabilities) == 3
    several.release(one.request_id)
    two = context(prompt, 9)
    run(several, 1, two)
    with several.replicas[0].model.model.profile() as profile:
        assert run(several, 4, two)[two.request_id].tokens == tokens[1:5]
    assert profile.to_dict()
    several.release(two.request_id)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory, several) -> tuple[Path, list[int], int]:
    """A checkpoint with a token whose embedding is NaN; the tokens of "x = " up to this one, and those of "Hello"."""
    (tokens, _), (other, _) = generated(several, ["x = ", "Hello"], 12, ignore_eos=True)
    prompts = np.concatenate([several.tokenizer.encode_now(p) for p in ("x = ", "Hello")])
    last = next(
        n for n, token in enumerate(tokens)
        if n > 1 and token not in (*tokens[:n], *other, *prompts.tolist())
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][tokens[last]] = math.nan
    save_file(weights, folder / "model.safetensors")
    return folder, tokens[: last + 1], other


@pytest.mark.parametrize("steps", [1, 3, 12])
def test_logits_that_become_nan_end_their_request_only(damaged, steps: int) -> None:
    folder, tokens, other = damaged
    pipeline = pipeline_of(steps, folder)
    prompts = [pipeline.tokenizer.encode_now(p).tolist() for p in ("x = ", "Hello")]
    bad, good = (context(prompt, 12, ignore_eos=True) for prompt in prompts)
    run(pipeline, 1, bad, good)
    while bad.failure is None:
        run(pipeline, steps, bad, good)
    assert bad.generated_tokens.tolist() == tokens
    assert bad.status is GenerationStatus.CANCELLED
    assert f"after token {len(prompts[0]) + len(tokens)} of request" in str(bad.failure)
    pipeline.release(bad.request_id)
    while not good.is_done:
        run(pipeline, min(steps, 12 - len(good.generated_tokens)), good)
    assert good.generated_tokens.tolist() == other
    pipeline.release(good.request_id)
    with pytest.raises(NotFiniteError, match="are all NaN"):
        generated(pipeline, ["x = "], 12, ignore_eos=True)
    cache = pipeline.kv_managers[0]
    cache.pages.check()
    assert cache.free_pages == cache.total_num_pages


def test_an_interrupt_ends_it_after_a_step(several) -> None:
    prompt = several.tokenizer.encode_now("x = ").tolist()
    one = context(prompt, 300, ignore_eos=True)
    run(several, 1, one)
    several.interrupt()
    assert len(run(several, 100, one)[one.request_id].tokens) == 1
    assert len(run(several, 20, one)[one.request_id].tokens) == 20
    # from another thread, during the steps
    counts: list[int] = []
    worker = threading.Thread(
        target=lambda: counts.append(len(run(several, 250, one)[one.request_id].tokens))
    )
    worker.start()
    while worker.is_alive():
        several.interrupt()
        time.sleep(0.001)
    worker.join()
    assert 1 <= counts[0] < 250
    several.release(one.request_id)


def test_a_request_that_comes_meanwhile_waits_for_one_step_only(several) -> None:
    generation = Generation.of(several)
    interrupts: list[None] = []
    real, execute = several.interrupt, several.execute

    def executing(inputs):
        generation.cancel(RequestID())
        return execute(inputs)

    several.interrupt = lambda: interrupts.append(real())
    try:
        stream = generation.stream([context([5, 6, 7], 60, ignore_eos=True)])
        next(stream)
        generation.cancel(RequestID())
        assert not interrupts, "no step runs"
        several.execute = executing
        next(stream)
        assert len(interrupts) == 1
        stream.close()
    finally:
        del several.interrupt, several.execute


def test_the_graph_between_steps_is_compiled_beside_the_model(tmp_path, monkeypatch) -> None:
    names, compile_module = [], pipeline.compile_module

    def compiled(module, *arguments, **options):
        names.append(entry(module).sym_name)
        return compile_module(module, *arguments, **options)

    monkeypatch.setattr(pipeline, "compile_module", compiled)
    load = program_store.ProgramStore.load_staged_graph
    ends = []

    def loaded(self, description, stage):
        try:
            return load(self, description, stage)
        finally:
            ends.append("next_step" if str(description).startswith("next_step") else "model")

    monkeypatch.setattr(program_store.ProgramStore, "load_staged_graph", loaded)
    with flags.override(MAX_CACHE_DIR=tmp_path, MAX_CHECK=1):
        pipeline_of(1)
    # the third casts weights
    assert names[1:] == ["next_step", "convert"]
    # casts go by this method too
    assert ends[0] == ends[-1] == "next_step" and ends.count("next_step") == 2
    # the second start compiles neither
    with flags.override(MAX_CACHE_DIR=tmp_path, MAX_CHECK=1):
        pipeline_of(1)
    assert len(names) == 3


def test_how_many_steps_are_found_out() -> None:
    pipeline = pipeline_of(-1)
    limits = limits_of(pipeline)
    assert limits.max_num_steps == 8 and limits.max_seconds == 0.04
    scheduler = Generation.of(pipeline).scheduler
    scheduler.add(context([5, 6, 7], 100))
    batch = list(scheduler.schedule().batch.values())
    run(pipeline, 1, *batch)
    scheduler.update(batch)
    for seconds, steps, expected in [(None, 0, 1), (0.008, 1, 5), (1.0, 1, 1), (0.001, 1, 1)]:
        if seconds is not None:
            scheduler.record_step(seconds, steps)
        assert scheduler._steps() == expected
    for _ in range(20):
        scheduler.record_step(0.001, 1)
    assert scheduler._steps() == 8


@pytest.mark.parametrize("seed", range(4))
def test_the_graph_between_two_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, steps, width = int(rng.integers(1, 6)), int(rng.integers(1, 5)), int(rng.integers(0, 4))
    model = InferenceSession().load(next_step_graph(DeviceRef.CPU()))
    first = rng.integers(0, 2**64, batch, np.uint64)
    ends = rng.integers(-1, 6, (batch, width))
    tokens, lengths = np.zeros(batch, np.int64), rng.integers(0, 999, batch, np.uint32)
    most = np.array([[1, lengths.max()]], np.uint32)
    seeds, history = np.zeros(batch, np.uint64), np.full((steps, batch), -9)
    done, again, interrupted = np.zeros(1, np.int64), np.ones(1, np.uint8), np.zeros(1, np.uint8)
    changed = [tokens, lengths, most, seeds, history, done, again]
    for step in range(steps):
        chosen = rng.integers(-1, 40, batch)
        before = lengths.copy()
        interrupted[0] = rng.random() < 0.2
        model.execute(*map(Tensor.from_numpy, [chosen, first, ends, interrupted, *changed]))
        np.testing.assert_array_equal(tokens, chosen)
        np.testing.assert_array_equal(history[step], chosen)
        np.testing.assert_array_equal(lengths, before + 1)
        # a step's token follows the cached tokens and the new one
        assert seeds.tolist() == [
            step_seed(int(s), int(n) + 1) for s, n in zip(first, lengths, strict=True)
        ]
        ended = any(chosen[row] < 0 or chosen[row] in ends[row] for row in range(batch))
        assert again[0] == (not ended and not interrupted[0] and step + 1 < steps)
    assert most.tolist() == [[1, int(lengths.max())]] and done[0] == steps
    with pytest.raises(IndexError, match=f"step {steps} of {steps}"):
        model.execute(*map(Tensor.from_numpy, [chosen, first, ends, interrupted, *changed]))
