"""A smaller model drafts tokens: the texts stay those of the model, and its cache follows the requests."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from max.driver import Tensor
from max.interfaces import PipelineTask, RequestID, SamplingParams, TextGenerationInputs
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.drafts.draft_model import ModelDrafter
from max.pipelines.generation.drafts.rejection import kept_tokens, sampled_logits
from max.pipelines.generation.engine import Engine
from max.pipelines.kv_cache.page_tables import OutOfPagesError
from tests.pipelines.test_drafts import LENGTH, TINY, always, generated, requests


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    """The model without its last layer: it guesses many tokens, and not all."""
    folder = tmp_path_factory.mktemp("draft") / "model"
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    last = f"layers.{config['num_hidden_layers']}."
    save_file(
        {name: value for name, value in weights.items() if last not in name},
        folder / "model.safetensors",
    )
    return folder


def pipeline_of(draft=None, **values):
    if draft is not None:
        values |= dict(draft_model_path=draft, draft_quantization_encoding="float32")
    config = PipelineConfig(
        model_path=TINY, quantization_encoding="float32", max_length=LENGTH, max_batch_size=8,
        **values,
    )  # fmt: skip
    pipeline = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]
    return pipeline if draft is None else always(pipeline)


@pytest.fixture(scope="module")
def plain():
    return pipeline_of()


@pytest.fixture(scope="module")
def drafting(smaller):
    return pipeline_of(smaller, num_speculative_tokens=4)


def released(pipeline) -> None:
    draft, model = pipeline.kv_managers
    for cache in (draft, model):
        cache.pages.check()
        assert cache.used_pages == 0
    assert not pipeline._drafter._texts


def texts(pipeline, contexts) -> list[list[int]]:
    engine = Engine(pipeline, limits_of(pipeline))
    for one in contexts:
        engine.submit(one)
    while not engine.idle:
        engine.step()
    assert all(one.failure is None for one in contexts)
    return [one.generated_tokens.tolist() for one in contexts]


@pytest.mark.parametrize("seed", range(2))
def test_texts_are_those_of_the_model(plain, drafting, seed: int) -> None:
    before = drafting.metrics
    assert texts(drafting, requests(drafting, seed)) == generated(plain, requests(plain, seed))
    released(drafting)
    after = drafting.metrics
    assert after.draft_tokens_accepted > before.draft_tokens_accepted
    assert 0.2 < after.acceptance_rate < 1
    assert after.tokens_per_step > 1.5


@pytest.mark.parametrize(
    "values",
    [
        dict(enable_in_flight_batching=True, prefill_chunk_size=32),
        dict(kv_cache_page_size=16, few=12),
        dict(kv_cache_page_size=16, few_of_draft=9),
        dict(enable_prefix_caching=False),
    ],
    ids=["chunks", "few pages", "few pages of the draft model", "no prefixes"],
)
def test_texts_in_other_configurations(plain, smaller, values) -> None:
    few, few_of_draft = values.pop("few", None), values.pop("few_of_draft", None)
    pipeline = pipeline_of(smaller, num_speculative_tokens=3, **values)
    for cache, count in zip(pipeline.kv_managers, (few_of_draft, few), strict=True):
        for pool in cache.pages.pools if count else ():
            for _ in range(pool.num_pages - count):
                pool._free.popitem()
            pool._users = [1 if page not in pool._free else 0 for page in range(pool.num_pages)]
    engine = Engine(pipeline, limits_of(pipeline))
    contexts = requests(pipeline, 7)
    for one in contexts:
        engine.submit(one)
    while not engine.idle:
        engine.step()
    found = [one.generated_tokens.tolist() for one in contexts]
    assert found == generated(plain, requests(plain, 7))
    assert pipeline.metrics.draft_tokens_accepted > 0
    released(pipeline) if not (few or few_of_draft) else None
    if few:
        assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_of_requests_that_do_not_end_by_themselves(
    drafting, fails: bool, monkeypatch
) -> None:
    """Cancelled between two steps, or ended by a step that failed."""
    engine = Engine(drafting, limits_of(drafting))
    contexts = requests(drafting, 4)
    for one in contexts:
        engine.submit(one)
    while not all(len(one.generated_tokens) > 3 or one.is_done for one in contexts):
        engine.step()
    drafts = drafting.replicas[0].drafts
    assert drafting._drafter._texts and drafts.lengths._shares
    if fails:
        monkeypatch.setattr(drafting.replicas[0], "execute", lambda *arguments: 1 / 0)
        engine.step()
    else:
        for one in contexts:
            engine.cancel(one.request_id)
        engine.apply_changes()
    assert len(engine.scheduler) == 0
    released(drafting)
    assert not drafts.lengths._shares and not drafts._truncations


def test_texts_of_two_devices(smaller) -> None:
    """Each has a part of both models: drafts of a smaller model, and by look-up, change nothing."""
    devices = "cpu:0,1"
    plain = pipeline_of(device_specs=devices)
    expected = generated(plain, requests(plain, 3))
    drafting = pipeline_of(smaller, num_speculative_tokens=3, device_specs=devices)
    assert texts(drafting, requests(drafting, 3)) == expected
    assert drafting.metrics.draft_tokens_accepted > 0
    released(drafting)
    looking_up = always(
        pipeline_of(speculative_method="ngram", num_speculative_tokens=6, device_specs=devices)
    )
    assert texts(looking_up, requests(looking_up, 3)) == expected
    assert looking_up.draft_counts[1] > 0


def test_the_draft_model_reads_each_token_once(drafting, monkeypatch) -> None:
    """Prompts by chunks and shared prefixes from its cache; after wrong tokens, it goes back and reads only these."""
    rows, model = [], drafting._draft.model
    prepare = model.prepare_initial_token_inputs

    def counted(contexts, *arguments):
        rows.append(sum(one.active_length for one in contexts))
        return prepare(contexts, *arguments)

    monkeypatch.setattr(model, "prepare_initial_token_inputs", counted)
    monkeypatch.setattr(drafting._drafter, "_chunk", 32)
    tokens = drafting.tokenizer.encode_now("all of these words are new to it " * 40)
    for expected in (len(tokens), 0):
        rows.clear()
        one = TextContext(
            tokens=tokens, max_length=len(tokens) + 30,
            sampling_params=SamplingParams(top_k=1, ignore_eos=True),
        )  # fmt: skip
        texts(drafting, [one])
        assert max(rows) <= 33
        # the prompt, then one or two tokens a draft
        of_prompt = [count for count in rows if count > 2]
        assert expected - 2 <= sum(of_prompt) <= expected
    released(drafting)


def test_a_draft_model_with_shorter_texts_drafts_only_these(plain, smaller, tmp_path) -> None:
    folder = tmp_path / "short"
    shutil.copytree(smaller, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    pipeline = pipeline_of(folder, num_speculative_tokens=3)
    tokens = pipeline.tokenizer.encode_now("one two three four five six seven " * 6)
    results, drafted = [], []
    for used in (plain, pipeline):
        contexts = [
            TextContext(
                tokens=np.array(tokens[:n]), max_length=n + 20,
                sampling_params=SamplingParams(top_k=1, ignore_eos=True),
            )
            for n in (10, 30, len(tokens))
        ]  # fmt: skip
        results.append(texts(used, contexts))
        drafted.append(used.draft_counts[0])
    assert results[0] == results[1]
    assert drafted[1] > 0
    released(pipeline)


def test_the_stages_of_a_step(plain, drafting) -> None:
    """Called one by one they give the greedy text of the model."""
    tokens = np.array(drafting.tokenizer.encode_now("one two three four five six seven " * 4))
    made = [
        TextContext(
            tokens=tokens[:n], max_length=n + 20, request_id=RequestID(f"{n}"),
            sampling_params=SamplingParams(top_k=1, ignore_eos=True),
        )
        for n in (20, 9)
    ]  # fmt: skip
    draft_model, model = drafting._draft.model, drafting.replicas[0].model
    responses: dict[RequestID, list[int]] = {one.request_id: [] for one in made}
    # the first token of each, which only the model gives
    for key, output in drafting.execute(
        TextGenerationInputs(batches=[{one.request_id: one for one in made}], num_steps=1)
    ).items():
        responses[key] += output.tokens
    before = drafting.metrics.verified_steps
    while batch := [one for one in made if not one.is_done]:
        for one in batch:
            one.set_draft(())
        steps = 2
        for one in batch:
            steps = drafting.calculate_num_steps(
                model, model.huggingface_config, steps, one, is_draft=True
            )
            steps = min(steps, max(one.max_length - one.end_idx - 1, 0))
        if not steps:
            outputs = drafting.execute(
                TextGenerationInputs(batches=[{o.request_id: o for o in batch}], num_steps=1)
            )
            for key, output in outputs.items():
                responses[key] += output.tokens
            continue
        inputs, steps = drafting.prepare_batch(draft_model, batch, steps, 1, is_draft=True)
        steps, drafted, logits, inputs, all_logits = drafting.generate_draft_tokens(
            batch, steps, inputs
        )
        assert drafted.shape == logits.shape == (len(batch), steps)
        assert list(all_logits.shape[:2]) == [steps, len(batch)]
        merged = [
            [int(o.next_tokens[-1]), *r]
            for o, r in zip(batch, drafted.to_numpy().tolist(), strict=True)
        ]
        offsets = np.cumsum([0, *map(len, merged)]).astype(np.uint32)
        flat = Tensor.from_numpy(np.concatenate(merged).astype(np.int64))
        results = drafting.verify_draft_tokens_with_target_model(
            inputs, batch, steps, drafted, logits, flat, Tensor.from_numpy(offsets), all_logits
        )
        arrays = [result.to_numpy() for result in results]
        drafting.update_contexts(batch, *arrays, drafted.to_numpy(), steps)
        for key, output in drafting.build_response(batch).items():
            responses[key] += output.tokens
    assert drafting.metrics.verified_steps > before
    expected = []
    for n in (20, 9):
        one = TextContext(
            tokens=tokens[:n], max_length=n + 20,
            sampling_params=SamplingParams(top_k=1, ignore_eos=True),
        )  # fmt: skip
        expected += texts(plain, [one])
    assert list(responses.values()) == expected
    for one in made:
        drafting.release(one.request_id)
    released(drafting)


def test_stages_without_room(drafting) -> None:
    one = TextContext(tokens=np.arange(5, 15), max_length=LENGTH)
    pool = drafting.kv_managers[0].pages.pools[0]
    free, pool._free = pool._free, type(pool._free)()
    try:
        with pytest.raises(OutOfPagesError):
            drafting.prepare_batch(drafting._draft.model, [one], 2, 1, is_draft=True)
    finally:
        pool._free = free
    released(drafting)


@pytest.mark.parametrize(
    "values",
    [
        dict(top_k=-1), dict(top_k=3, temperature=0.7), dict(top_p=0.6), dict(min_p=0.2),
        dict(temperature=1.6, top_k=5, top_p=0.8, min_p=0.05), dict(top_k=1),
    ],
    ids=str,
)  # fmt: skip
def test_rejection_gives_the_distribution_of_the_target(values) -> None:
    """Chi-square of the first two tokens over a small vocabulary."""
    draw, vocab, count = np.random.default_rng(5), 6, 20000
    params = SamplingParams(**values)
    logits = draw.normal(0, 1.5, (2, 3, vocab)).astype(np.float32)

    def probabilities(rows):
        shares = np.exp(sampled_logits(rows, [params] * len(rows)).astype(np.float64))
        return shares / shares.sum(-1, keepdims=True)

    draft, target = probabilities(logits[0])[:2], probabilities(logits[1])
    seen = np.zeros((vocab, vocab))
    lengths = np.zeros(3)
    for _ in range(count):
        drafted = [int(draw.choice(vocab, p=row)) for row in draft]
        kept, others = kept_tokens(drafted, draft, target, draw.random((3, 2)))
        lengths[kept] += 1
        tokens = [*drafted[:kept], others[kept]]
        if len(tokens) == 1:  # the next step of the model gives the second token
            tokens.append(int(draw.choice(vocab, p=target[1])))
        seen[tokens[0], tokens[1]] += 1
    expected = np.outer(target[0], target[1]) * count
    assert not seen[expected == 0].any()
    rare = expected > 5
    statistic = ((seen - expected)[rare] ** 2 / expected[rare]).sum()
    freedom = max(rare.sum() - 1, 1)
    # the mean and four standard deviations of the chi-square distribution
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 1e-9
    # a token is kept with the probability that both distributions share
    share = np.minimum(draft[0], target[0]).sum()
    assert abs((count - lengths[0]) / count - share) < 4 * np.sqrt(0.25 / count)


def test_what_is_refused(smaller, tmp_path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(smaller, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = [word for word, number in vocab.items() if number in (300, 301)]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="has another tokenizer than .*: token 300 is"):
        pipeline_of(folder)
    for values, message in (
        (dict(speculative_method="standalone"), "there is no draft model"),
        (dict(speculative_method="ngram", draft_model=smaller), "is 'ngram', and .* is to draft"),
        (dict(speculative_method="none", draft_model=smaller), "is 'none', and .* is to draft"),
        (dict(draft_quantize="q4_k"), "draft_quantize is given, and there is no draft model"),
        (dict(draft_model=smaller, draft_quantize="q9"), "quantize is 'q9'"),
    ):
        with pytest.raises(ConfigError, match=message):
            PipelineConfig(model_path=TINY, **values)
    config = PipelineConfig(model_path=TINY, draft_model=smaller, max_length=64)
    assert config.draft_model_config.model_path == str(smaller)
    assert config.speculative_method.value == "standalone"
    assert PipelineConfig(model_path=TINY, draft_model=None).draft_model_config is None


def test_drafts_are_what_the_smaller_model_writes(drafting, smaller, monkeypatch) -> None:
    """Inputs of earlier calls are used again, also after wrong tokens: each draft is that of a pipeline of its own."""
    drafts: list[tuple[list[int], list[int]]] = []
    propose = ModelDrafter.propose_all

    def recorded(self, contexts, most):
        found = propose(self, contexts, most)
        drafts.extend(
            (one.all_tokens.tolist(), list(own)) for one, own in zip(contexts, found, strict=True)
        )
        return found

    monkeypatch.setattr(ModelDrafter, "propose_all", recorded)
    contexts = [
        TextContext(
            tokens=drafting.tokenizer.encode_now(text), max_length=LENGTH,
            sampling_params=SamplingParams(top_k=1, ignore_eos=True, max_new_tokens=40),
        )
        for text in ("Once upon a time there was a cat", "The colors of the rainbow are")
    ]  # fmt: skip
    for one in contexts:
        texts(drafting, [one])
    config = PipelineConfig(
        model_path=smaller, quantization_encoding="float32", max_length=LENGTH, max_batch_size=8,
        max_num_steps=1,
    )  # fmt: skip
    own = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]
    chosen = drafts[:: max(len(drafts) // 24, 1)]
    alone = [
        TextContext(
            tokens=tokens, max_length=len(tokens) + len(drafted),
            sampling_params=SamplingParams(top_k=1, ignore_eos=True),
        )
        for tokens, drafted in chosen
    ]  # fmt: skip
    lengths = {len(drafted) for _, drafted in chosen}
    assert texts(own, alone) == [drafted for _, drafted in chosen] and max(lengths) == 4
