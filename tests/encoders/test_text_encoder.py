"""Texts to vectors and scores: files of sentence-transformers, prompts, truncation, rankers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from max.interfaces import (
    EmbeddingsGenerationInputs,
    PipelineTask,
    RequestID,
    TextGenerationRequest,
)
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.core.exceptions import ConfigError, InputError, ModelFilesError
from max.pipelines.encoders.text_encoder import TextEncoder
from max.pipelines.lib.embeddings_pipeline import EmbeddingsPipeline
from tests.encoders.harness import VOCAB, checkpoint, reference

WORDS = [f"w{i}" for i in range(VOCAB - 5)]
TEXTS = ["w1 w2 w3", "w7", "w9 w8 w7 w6 w5 w4 w3", "W20 unknown w2"]


def write_tokenizer(folder: Path) -> Tokenizer:
    """Writes a word tokenizer with BERT's special tokens."""
    vocab = {word: i for i, word in enumerate(["[CLS]", "[PAD]", "[SEP]", "[UNK]", ":", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 2)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def write_modules(folder: Path, *modules: tuple[str, dict[str, Any] | None]) -> None:
    entries = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (kind, config) in enumerate(modules, 1):
        entries.append({"path": f"{number}_{kind}", "type": f"sentence_transformers.models.{kind}"})
        if config is not None:
            (folder / f"{number}_{kind}").mkdir(exist_ok=True)
            (folder / f"{number}_{kind}/config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(entries))


@pytest.fixture(autouse=True)
def fresh_caches() -> Iterator[None]:
    yield
    PIPELINE_REGISTRY.reset()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Writes a BERT with a tokenizer."""
    source, _ = checkpoint("Bert")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    write_tokenizer(tmp_path)
    return tmp_path


def states(folder: Path, text: str) -> np.ndarray:
    """Returns transformers' hidden states of a text."""
    _, model = checkpoint("Bert")
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return reference(model, np.array(ids)).last_hidden_state[0].numpy()


def encoder(folder: Path, **options: Any) -> TextEncoder:
    return TextEncoder(PipelineConfig(model_path=str(folder), **options))


def test_all_poolings_are_concatenated_in_order(folder: Path) -> None:
    flags = ["cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens"]
    flags += ["weightedmean_tokens", "lasttoken"]
    write_modules(folder, ("Pooling", {f"pooling_mode_{flag}": True for flag in flags}))
    got = encoder(folder).encode(TEXTS)
    for text, vector in zip(TEXTS, got, strict=True):
        h = states(folder, text)
        n = len(h)
        weights = np.arange(1, n + 1)[:, None]
        want = [
            h[0],
            h.max(0),
            h.mean(0),
            h.sum(0) / np.sqrt(n),
            (h * weights).sum(0) / weights.sum(),
            h[-1],
        ]
        np.testing.assert_allclose(vector, np.concatenate(want), rtol=1e-4, atol=1e-5)


def test_dense_layers_norms_and_normalization(folder: Path) -> None:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(32, 20, bias=False), torch.nn.Linear(20, 6)
    norm = torch.nn.LayerNorm(6)
    torch.nn.init.normal_(norm.weight)
    tanh = "torch.nn.modules.activation.Tanh"
    identity = "torch.nn.modules.linear.Identity"
    write_modules(
        folder,
        ("Pooling", {"pooling_mode": "mean"}),
        ("Dense", {"in_features": 32, "out_features": 20, "bias": False, "activation_function": tanh}),
        ("Dense", {"in_features": 20, "out_features": 6, "activation_function": identity}),
        ("LayerNorm", {"dimension": 6}),
        ("Normalize", None),
    )  # fmt: skip
    for number, prefix, layer in ((2, "linear", first), (3, "linear", second), (4, "norm", norm)):
        kind = "LayerNorm" if prefix == "norm" else "Dense"
        weights = {f"{prefix}.{name}": value for name, value in layer.state_dict().items()}
        save_file(weights, folder / f"{number}_{kind}/model.safetensors")
    got = encoder(folder).encode(TEXTS)
    for text, vector in zip(TEXTS, got, strict=True):
        with torch.no_grad():
            x = torch.from_numpy(states(folder, text).mean(0))
            want = norm(second(torch.tanh(first(x))))
        np.testing.assert_allclose(vector, want / want.norm(), rtol=1e-4, atol=1e-5)


def test_a_text_alone_and_rows_of_tokens(folder: Path) -> None:
    rows = encoder(folder, pool_embeddings=False).encode(TEXTS)
    for text, got in zip(TEXTS, rows, strict=True):
        np.testing.assert_allclose(got, states(folder, text), rtol=1e-4, atol=1e-5)
    alone = encoder(folder).encode(TEXTS[0])
    assert isinstance(alone, np.ndarray) and alone.shape == (1, 32)
    np.testing.assert_allclose(alone[0], states(folder, TEXTS[0]).mean(0), rtol=1e-4, atol=1e-5)


def test_long_texts_are_truncated_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 5}')
    made = encoder(folder)
    with caplog.at_level(logging.WARNING, "max.pipelines"):
        got = made.encode(["w1 w2", "w1 w2 w3 w4 w5 w6"])
    assert "1 of 2 texts are longer than 5 tokens and were cut off (number 1)" in caplog.text
    # the end token is kept
    np.testing.assert_allclose(got[1], states(folder, "w1 w2 w3").mean(0), rtol=1e-4, atol=1e-5)


def test_prompts(folder: Path) -> None:
    prompts = {"prompts": {"query": "w40 : ", "document": ""}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    made = encoder(folder)
    assert made.prompt_names == ["query", "document"]
    for name, text in ((None, "w40 : w1"), ("query", "w40 : w1"), ("document", "w1")):
        want = states(folder, text).mean(0)
        np.testing.assert_allclose(made.encode(["w1"], name)[0], want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="no prompt 'querry'; did you mean 'query'"):
        made.encode(["w1"], "querry")
    # queries and documents have different prompts
    query, texts = states(folder, "w40 : w1").mean(0), [states(folder, t).mean(0) for t in TEXTS]
    want = [t @ query / np.linalg.norm(t) / np.linalg.norm(query) for t in texts]
    np.testing.assert_allclose(made.rank("w1", TEXTS), want, rtol=1e-4)


@pytest.mark.parametrize("key", [None, "old", "new"])
def test_a_ranker_reads_query_and_text_together(tmp_path: Path, key: str | None) -> None:
    source, model = checkpoint("Bert", "ForSequenceClassification")
    tokenizer = write_tokenizer(tmp_path)
    config = json.loads((source / "config.json").read_text())
    config["id2label"] = {"0": "LABEL_0"}
    identity = "torch.nn.modules.linear.Identity"
    if key == "old":
        config["sbert_ce_default_activation_function"] = identity
    if key == "new":
        config["sentence_transformers"] = {"activation_fn": identity}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    for name in ("classifier.weight", "classifier.bias"):
        weights[name] = weights[name][:1].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    got = encoder(tmp_path).rank("w5 w6", TEXTS)
    for text, score in zip(TEXTS, got, strict=True):
        pair = tokenizer.encode("w5 w6", text)
        types = torch.tensor(pair.type_ids)[None]
        want = reference(model, np.array(pair.ids), token_type_ids=types).logits[0, 0]
        want = want.sigmoid() if key is None else want
        np.testing.assert_allclose(score, float(want), rtol=1e-4, atol=1e-5)


def test_requests_of_the_pipeline(folder: Path) -> None:
    """The pipeline interface: a tokenizer, contexts, inputs by replica, outputs by request."""
    config = PipelineConfig(model_path=str(folder))
    config.resolve()
    tokenizer, pipeline = PIPELINE_REGISTRY.retrieve(config, PipelineTask.EMBEDDINGS_GENERATION)
    assert isinstance(pipeline, EmbeddingsPipeline) and pipeline.tokenizer is tokenizer

    def context(prompt: Any) -> Any:
        request = TextGenerationRequest(request_id=RequestID(), model_name="m", prompt=prompt)
        coroutine = tokenizer.new_context(request)
        with pytest.raises(StopIteration) as done:
            coroutine.send(None)
        assert done.value.value.request_id == request.request_id
        return done.value.value

    one, two = context("w1 w2"), context([0, 6, 7, 2])
    np.testing.assert_array_equal(one.tokens, two.tokens)
    outputs = pipeline.execute(
        EmbeddingsGenerationInputs([{one.request_id: one}, {two.request_id: two}])
    )
    assert list(outputs) == [one.request_id, two.request_id]
    assert all(output.is_done for output in outputs.values())
    for output in outputs.values():
        want = states(folder, "w1 w2").mean(0)
        np.testing.assert_allclose(output.embeddings, want, rtol=1e-4, atol=1e-5)
    pipeline.release(one.request_id)


def test_texts_that_do_not_fit(folder: Path) -> None:
    made = encoder(folder)
    with pytest.raises(InputError, match="there are no texts"):
        made.encode([])
    with pytest.raises(InputError, match="not UTF-8"):
        made.encode(["\udcff"])
    source, _ = checkpoint("Bert", "ForSequenceClassification")
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((source / name).read_bytes())
    PIPELINE_REGISTRY.reset()
    with pytest.raises(ConfigError, match="the model gives 3 scores per text"):
        encoder(folder).rank("w1", ["w2"])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", "{}", "holds an object; expected a JSON array"),
        ("modules.json", "[3]", "holds an array with a number; expected"),
        ("modules.json", '[{"type": "x.Transformer"}]', "lacks entry 0.path"),
        ("modules.json", '[{"path": "", "type": "x.CNN"}]', "entry 0.type is 'x.CNN'; expected"),
        ("modules.json", '[{"path": "", "type": "x.Transformer"}]', "has no module Pooling"),
        ("modules.json", '[{"path": "1", "type": "x.Pooling"}]', "lacks 1/config.json"),
        ("sentence_bert_config.json", '{"max_seq_length": 0}', "max_seq_length is 0; expected"),
        ("config_sentence_transformers.json", '{"prompts": {"a": 1}}', "an object of texts"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "q"}', "default_prompt"),
    ],
)
def test_files_that_are_broken(folder: Path, file: str, content: str, message: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(ModelFilesError, match=message):
        encoder(folder)


def test_pooling_that_does_not_fit(folder: Path) -> None:
    for config, message in (
        ({"pooling_mode_mean_tokens": False}, "lacks|expected true"),
        ({"pooling_mode": "median"}, "pooling_mode is 'median'; expected"),
    ):
        write_modules(folder, ("Pooling", config))
        with pytest.raises(ModelFilesError, match=message):
            encoder(folder)
    dense = {"in_features": 32, "out_features": 8, "activation_function": "a.b.Softplus"}
    write_modules(folder, ("Pooling", {"pooling_mode": "cls"}), ("Dense", dense))
    with pytest.raises(ModelFilesError, match=r"'a\.b\.Softplus'; expected one of torch's"):
        encoder(folder)
