"""The text pipeline over a model in NumPy: batches, steps, sampling outside the graph, log-probabilities."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from max.entrypoints.llm import LLM
from max.interfaces import (
    GenerationStatus,
    PipelineTask,
    RequestID,
    SamplingParams,
    TextGenerationInputs,
    TextGenerationRequest,
)
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.core import InputError, ModelFilesError, UserError
from max.pipelines.core.exceptions import WeightsError
from max.pipelines.kv_cache.page_tables import OutOfPagesError
from max.pipelines.lib.interfaces import get_paged_manager
from max.pipelines.lib.log_probabilities import log_softmax
from max.pipelines.sampling.log_probabilities import of_rows
from tests.pipelines import fake_architecture
from tests.pipelines.fake_architecture import VOCAB, FakeModel, greedy, logits_of

PROMPTS = [[5, 6, 7], [8], list(range(10, 300)), [5, 6, 7, 8]]


def pipeline_of(folder, **values):
    config = PipelineConfig(model_path=folder, **values)
    return PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]


def request(prompt, new: int = 6, **params) -> TextGenerationRequest:
    return TextGenerationRequest(
        RequestID(), "m", prompt=prompt,
        sampling_params=SamplingParams(**{"max_new_tokens": new, "temperature": 0, **params}),
    )  # fmt: skip


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("chunk", [8192, 64])
def test_batched_equals_one_by_one(fake, tmp_path, in_graph, steps, chunk):
    folder = fake_architecture.folder(tmp_path / "m", samples_in_graph=in_graph)
    pipeline = pipeline_of(
        folder, max_num_steps=steps, prefill_chunk_size=chunk, max_batch_size=3, max_length=400
    )
    outputs = pipeline.generate([request(prompt) for prompt in PROMPTS])
    assert [o.tokens for o in outputs] == [greedy(prompt, 6) for prompt in PROMPTS]
    (cache,) = pipeline.kv_managers
    assert cache.free_pages == cache.total_num_pages
    assert get_paged_manager(pipeline) is cache
    assert asyncio.run(pipeline.generate_async(request([5])))[0].tokens == greedy([5], 6)


def test_a_prefix_is_read_once(fake):
    pipeline = pipeline_of(fake, max_batch_size=1)
    prompt = list(range(100, 400))
    expected = greedy(prompt, 4)
    for _ in range(2):
        assert pipeline.generate(request(prompt, 4))[0].tokens == expected
    assert pipeline.kv_managers[0].pages.reused_tokens == 299, "all but the last token"


def test_the_ends_of_a_request(fake):
    pipeline = pipeline_of(fake, max_length=16)
    (output,) = pipeline.generate(request(list(range(3, 13)), None))
    assert len(output.tokens) == 6 and output.final_status == GenerationStatus.MAXIMUM_LENGTH
    expected = greedy([3, 4], 5)
    (output,) = pipeline.generate(request([3, 4], 5, stop_token_ids=[expected[2]]))
    assert output.tokens == expected[:3]
    assert output.final_status == GenerationStatus.END_OF_SEQUENCE
    with pytest.raises(InputError, match="16 tokens, and the context holds 16"):
        pipeline.generate(request(list(range(16))))


def context(prompt, new=20, **params) -> TextContext:
    return TextContext(
        max_length=len(prompt) + new, tokens=np.array(prompt),
        sampling_params=SamplingParams(**{"temperature": 0, **params}),
    )  # fmt: skip


def step(pipeline, *contexts, steps=1):
    return pipeline.execute(TextGenerationInputs([{c.request_id: c for c in contexts}], steps))


def test_execute_reserves_pages_and_release_frees_them(fake):
    pipeline = pipeline_of(fake, max_length=256, max_batch_size=1)
    assert pipeline.kv_managers[0].total_num_pages == 2
    a, b = context([5] * 128, 100), context([6])
    outputs = step(pipeline, a, steps=3)
    assert outputs[a.request_id].tokens == greedy([5] * 128, 3)
    assert pipeline.kv_managers[0].free_pages == 0
    with pytest.raises(OutOfPagesError):
        step(pipeline, b)
    assert not pipeline.kv_managers[0].contains(b.request_id)
    pipeline.release(a.request_id)
    pipeline.release(a.request_id)  # nothing happens
    assert step(pipeline, b)[b.request_id].tokens == greedy([6], 1)
    assert step(pipeline) == {}
    with pytest.raises(ValueError, match="has 256 tokens, and the context holds 256"):
        pipeline.calculate_num_steps(1, context([1] * 256))


def test_pages_claimed_by_hand(fake):
    """`kv_manager.claim(context)` and `alloc(context)`, as programs of MAX write them; prefixes are found too."""
    pipeline = pipeline_of(fake, kv_cache_page_size=16, enable_prefix_caching=True)
    caches = pipeline.kv_manager
    assert [caches] == pipeline.kv_managers
    tokens = np.arange(40) % 7
    outputs = []
    for reused in (0, 39):
        mine = context(tokens)
        assert not caches.contains(mine)
        caches.claim(mine)
        with pytest.raises(ValueError, match="already"):
            caches.claim(mine, replica_idx=0)
        caches.alloc(mine)
        assert caches.contains(mine) and caches.contains(mine.request_id)
        assert mine.start_idx == reused and caches.used_pages == 3
        for _ in range(3):
            step(pipeline, mine)
            caches.alloc(mine)
        outputs.append(mine.generated_tokens.tolist())
        caches.step(mine)
        caches.release(mine)
        assert not caches.contains(mine) and caches.used_pages == 0
    assert outputs[0] == outputs[1]
    with pytest.raises(ValueError, match="the replica is 1"):
        caches.claim(context(tokens), 1)


def reference_penalties(logits, generated, frequency, presence, repetition):
    logits = logits.astype(np.float64)
    for token in set(generated):
        logits[token] = (
            logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        )
        logits[token] -= frequency * generated.count(token) + presence
    return logits


@pytest.mark.parametrize("in_graph", [True, False])
def test_penalties(fake, tmp_path, in_graph):
    folder = fake_architecture.folder(tmp_path / "m", samples_in_graph=in_graph)
    pipeline = pipeline_of(folder)
    settings = [(0.9, 0.0, 1.0), (0.0, 1.5, 1.0), (0.0, 0.0, 1.7), (0.2, 0.3, 1.4), (0.0, 0.0, 1.0)]
    # few tokens are likely, so that they repeat
    few = np.zeros(VOCAB, np.float32)
    few[40:44] = 30

    def lift(inputs):
        inputs.logits.to_numpy()[...] += few

    requests = [
        request([9, i], 12, frequency_penalty=f, presence_penalty=p, repetition_penalty=r, logits_processors=[lift])
        for i, (f, p, r) in enumerate(settings)
    ]  # fmt: skip
    outputs = pipeline.generate(requests)
    for i, (settings_of, output) in enumerate(zip(settings, outputs, strict=True)):
        made: list[int] = []
        for _ in range(12):
            logits = reference_penalties(logits_of([9, i, *made]) + few, made, *settings_of)
            made.append(int(logits.argmax()))
        assert output.tokens == made, settings_of


def test_no_end_before_the_minimum(fake):
    pipeline = pipeline_of(fake)

    def end(inputs):  # the model's likeliest first token is the end of the sequence
        inputs.logits.to_numpy()[:, 2] += np.float32(100)

    free = request([4, 4], 8, logits_processors=[end])
    held = request([4, 4], 8, min_new_tokens=4, logits_processors=[end])
    first, second = pipeline.generate([free, held])
    assert first.tokens == [2]
    # the processor runs after the mask, which is minus infinity
    assert second.tokens[:4] == greedy([4, 4], 4) and second.tokens[4:] == [2]


def test_sampling_is_reproducible_and_does_not_depend_on_the_batch(fake):
    pipeline = pipeline_of(fake, max_batch_size=4)

    def requests():
        return [request([7, i], 8, temperature=1.0, top_k=20, seed=11) for i in range(4)]

    together = [o.tokens for o in pipeline.generate(requests())]
    alone = [pipeline.generate(r)[0].tokens for r in requests()]
    assert together == alone
    other = pipeline.generate(request([7, 0], 8, temperature=1.0, top_k=20, seed=12))[0].tokens
    assert other != together[0]
    for i, tokens in enumerate(together):
        sequence = [7, i]
        for token in tokens:
            assert token in np.argsort(-logits_of(sequence), kind="stable")[:20]
            sequence.append(token)


def test_log_probabilities(fake):
    pipeline = pipeline_of(fake, enable_echo=True)
    contexts = [context([3, 4, 5]), context([6, 7]), context([8])]
    contexts[0].log_probabilities, contexts[0].log_probabilities_echo = 3, True
    contexts[1].log_probabilities = 2
    outputs = step(pipeline, *contexts)
    (logs,) = outputs[contexts[0].request_id].log_probabilities
    tokens = [4, 5, greedy([3, 4, 5], 1)[0]]
    assert len(logs.token_log_probabilities) == 3
    for i, token in enumerate(tokens):
        row = logits_of([3, 4, 5][: i + 1]).astype(np.float64)
        expected = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert logs.token_log_probabilities[i] == pytest.approx(expected[token], abs=1e-5)
        top = np.argsort(-row)[:3].tolist()
        assert list(logs.top_log_probabilities[i])[:3] == top
        assert token in logs.top_log_probabilities[i]
    (logs,) = outputs[contexts[1].request_id].log_probabilities
    assert len(logs.top_log_probabilities[0]) == 2
    assert outputs[contexts[2].request_id].log_probabilities is None


def test_the_logits_of_prompts_need_no_option(fake, monkeypatch):
    loaded = []
    load = FakeModel.__init__

    def loads(self, **kwargs):
        load(self, **kwargs)
        loaded.append((kwargs["return_logits"], self))

    monkeypatch.setattr(FakeModel, "__init__", loads)
    pipeline = pipeline_of(fake, max_num_steps=4)
    expected = step(pipeline_of(fake, enable_echo=True), echo := context([3, 4, 5]))
    del loaded[1:]
    plain = context([8, 9])
    assert step(pipeline, plain)[plain.request_id].log_probabilities is None
    assert len(loaded) == 1, "no request has asked for them"
    for tokens in ([3, 4, 5], [3, 4, 5, 6, 7]):
        one, other = context(tokens), context([8, 9])
        one.log_probabilities, one.log_probabilities_echo = 2, True
        outputs = step(pipeline, one, other)
        (logs,) = outputs[one.request_id].log_probabilities
        assert len(logs.token_log_probabilities) == len(tokens)
        assert outputs[other.request_id].tokens == greedy([8, 9], 1)
        for i, token in enumerate([*tokens[1:], greedy(tokens, 1)[0]]):
            row = log_softmax(logits_of(tokens[: i + 1])[None])[0]
            assert logs.token_log_probabilities[i] == pytest.approx(row[token], abs=1e-5)
    assert [logits.value for logits, _ in loaded] == ["last_token", "all"]
    assert expected[echo.request_id].tokens == greedy([3, 4, 5], 1)
    before = loaded[1][1].executions
    step(pipeline, one, other)
    assert loaded[1][1].executions == before, "later steps run on the first model"


def test_a_second_graph_that_does_not_fit_says_so(fake, monkeypatch):
    pipeline = pipeline_of(fake)
    monkeypatch.setattr(PipelineConfig, "free_memory", lambda self: 3)
    with pytest.raises(UserError, match="second graph.*free") as caught:
        pipeline.load_prompt_logits()
    assert "--enable-echo" in str(caught.value.remedy)
    monkeypatch.undo()
    pipeline.load_prompt_logits()


@pytest.mark.parametrize("count", [0, 1, 3, 49, 50, 60])
def test_the_likeliest_tokens_of_rows_with_equal_ones(count):
    rng = np.random.default_rng(count)
    rows = rng.integers(0, 6, size=(20, 50)).astype(np.float32)
    rows[0] = 1.0
    found = of_rows(rows, rng.integers(0, 50, 20).tolist(), count).top_log_probabilities
    for row, top in zip(log_softmax(rows), found, strict=True):
        assert list(top)[:count] == np.argsort(-row, kind="stable")[:count].tolist()


def test_log_softmax_of_extremes():
    rows = np.array([[1e30, 0, -1e30], [-np.inf, 1, 1]], np.float32)
    np.testing.assert_allclose(log_softmax(rows)[1, 1:], -np.log(2), rtol=1e-6)
    assert log_softmax(rows)[0, 0] == 0


def test_a_cache_that_is_too_small_says_so(fake, monkeypatch):
    monkeypatch.setattr(PipelineConfig, "available_cache_memory", lambda self: 100)
    with pytest.raises(UserError, match="does not fit into memory: .* for a page of 128 tokens"):
        pipeline_of(fake, max_length=512)


def test_loaded_weights_are_not_subtracted_from_memory_again(fake, monkeypatch):
    available = [1 << 30]
    monkeypatch.setattr(PipelineConfig, "available_cache_memory", lambda self: available[0])
    load = FakeModel.__init__

    def loads(self, **kwargs):
        load(self, **kwargs)
        available[0] = 0

    monkeypatch.setattr(FakeModel, "__init__", loads)
    pipeline_of(fake, max_length=512)
    assert available == [0]


def fails_with(error: Exception, monkeypatch):
    def broken(self, **kwargs):
        raise error

    monkeypatch.setattr(FakeModel, "__init__", broken)


def test_weights_that_do_not_fit_say_so(fake, monkeypatch):
    fails_with(WeightsError("weight 'a' is missing"), monkeypatch)
    with pytest.raises(ModelFilesError, match="do not fit its architecture: weight 'a' is missing"):
        pipeline_of(fake)


@pytest.mark.parametrize("error", [KeyError("rope"), ValueError("1 and 2"), RuntimeError("no")])
def test_an_error_inside_an_architecture_is_its_own(fake, monkeypatch, error):
    fails_with(error, monkeypatch)
    with pytest.raises(type(error)) as caught:
        pipeline_of(fake)
    assert caught.value is error
    (note,) = error.__notes__
    assert note == f"raised while tests.pipelines.fake_architecture.FakeModel loaded {fake}"


@pytest.mark.parametrize("attribute", ["n_ctx", "__len__"])
def test_only_what_config_json_lacks_is_told_as_such(fake, monkeypatch, attribute):
    def read_attribute(cls, pipeline_config, huggingface_config):
        return getattr(huggingface_config if attribute == "n_ctx" else object(), attribute)

    monkeypatch.setattr(FakeModel, "calculate_max_seq_len", classmethod(read_attribute))
    own = attribute != "n_ctx"
    with pytest.raises(AttributeError if own else ModelFilesError, match=attribute):
        PipelineConfig(model_path=fake)


def test_llm(fake, capfd):
    llm = LLM(PipelineConfig(model_path=fake, max_batch_size=3, max_length=200))
    texts = ["abc", "def ghi", "x" * 50, "jkl", "1 2 3"]
    together = llm.generate(texts, max_new_tokens=8, use_tqdm=False)
    assert capfd.readouterr().err == ""
    assert together == [llm.generate(text, max_new_tokens=8)[0] for text in texts]
    assert "1/1" in capfd.readouterr().err
    tokenizer = PIPELINE_REGISTRY.retrieve_tokenizer(PipelineConfig(model_path=fake))
    for text, found in zip(texts, together, strict=True):
        tokens = greedy(tokenizer.encode_now(text).tolist(), 8)
        assert found == tokenizer.decode_now(tokens, skip_special_tokens=True)
    assert len(llm.generate("abc", max_new_tokens=None, use_tqdm=False)[0]) > 100


def test_llm_in_several_threads(fake):
    llm = LLM(PipelineConfig(model_path=fake, max_batch_size=4, max_length=200))
    texts = [f"text {i}" for i in range(8)]
    expected = llm.generate(texts, max_new_tokens=12, use_tqdm=False)
    found: dict[int, str] = {}

    def user(i: int) -> None:
        (found[i],) = llm.generate(texts[i], max_new_tokens=12, use_tqdm=False)

    threads = [threading.Thread(target=user, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(8)] == expected


def test_llm_refuses(fake):
    llm = LLM(PipelineConfig(model_path=fake, max_length=20))
    with pytest.raises(ValueError, match="prompts is empty"):
        llm.generate([])
    with pytest.raises(ValueError, match="a prompt is 3; expected a text"):
        llm.generate([3])  # type: ignore[list-item]
    for count in ("4", 2.5):
        with pytest.raises(TypeError, match=f"max_new_tokens is {count!r}; it must be an integer"):
            llm.generate("a", max_new_tokens=count)  # type: ignore[arg-type]
    for prompts in (None, 3, b"text"):
        with pytest.raises(ValueError, match=f"prompts is {prompts!r}; expected a text"):
            llm.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="tokens, and the context holds 20"):
        llm.generate("word " * 40)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        llm.generate("a", max_new_tokens=0)


def test_llm_takes_a_configuration() -> None:
    with pytest.raises(TypeError, match=r"LLM: the argument is 'path', expected a PipelineConfig"):
        LLM("path")  # type: ignore[arg-type]
