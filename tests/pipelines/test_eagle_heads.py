"""Heads of EAGLE 3 draft tokens: their logits are those of the paper's formula, and texts stay those of the model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from max.pipelines.core.exceptions import ConfigError
from max.pipelines.core.predicted_text import PredictedText
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.engine import Engine
from tests.architectures.llama_harness import relative_error, vary_vectors
from tests.pipelines.head_distributions import PARAMETERS, PROMPT, check_distribution
from tests.pipelines.test_drafting_heads import (
    LENGTH,
    head_drafter,
    pipeline_of,
    recorded_logits,
    request,
    texts,
    vocabulary,
)
from tests.pipelines.test_drafts import generated
from tests.programs.architectures import TINY, random_checkpoint

SIZE, HEADS, PLACES, PREDICTED = 32, 4, [1, 2, 3], 300


class Reference(torch.nn.Module):
    """A head in PyTorch; the parts of the block have the names of published files."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        block = torch.nn.Module()
        attention = torch.nn.Module()
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(attention, name, torch.nn.Linear(2 * SIZE, SIZE, bias=False))
        attention.o_proj = torch.nn.Linear(SIZE, SIZE, bias=False)
        block.self_attn, block.mlp = attention, LlamaMLP(config)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(block, name, LlamaRMSNorm(SIZE))
        self.midlayer, self.norm = block, LlamaRMSNorm(SIZE)
        self.fc = torch.nn.Linear(3 * SIZE, SIZE, bias=False)
        self.lm_head = torch.nn.Linear(SIZE, PREDICTED, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def states(self, embedded: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The states after tokens, of the embedding of each and of the state before it, ``[1, n, size]``."""
        block, count = self.midlayer, state.shape[1]
        x = torch.cat([block.input_layernorm(embedded), block.hidden_norm(state)], dim=-1)
        parts = [
            projection(x).view(1, count, HEADS, -1).transpose(1, 2)
            for projection in (
                block.self_attn.q_proj,
                block.self_attn.k_proj,
                block.self_attn.v_proj,
            )
        ]
        cos, sin = self.rotary(x, torch.arange(count)[None])
        queries, keys = apply_rotary_pos_emb(parts[0], parts[1], cos, sin)
        y = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, parts[2], is_causal=True
        )
        h = state + block.self_attn.o_proj(y.transpose(1, 2).reshape(1, count, SIZE))
        return h + block.mlp(block.post_attention_layernorm(h))


@pytest.fixture(scope="module")
def made() -> tuple[Any, Reference, np.ndarray]:
    """A model, a head, and the tokens that the head predicts."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=vocabulary(), hidden_size=SIZE, intermediate_size=48, num_hidden_layers=5,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=LENGTH,
        initializer_range=0.2, rms_norm_eps=1e-6, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    head = Reference(config).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    vary_vectors(model), vary_vectors(head)
    tokens = np.sort(np.random.default_rng(3).choice(vocabulary(), PREDICTED, replace=False))
    return model, head, tokens


@pytest.fixture(scope="module")
def folders(made: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    model, head, tokens = made
    folder, own = tmp_path_factory.mktemp("llama"), tmp_path_factory.mktemp("eagle")
    random_checkpoint(folder, model)
    weights = {
        name: value.clone() for name, value in head.state_dict().items() if "rotary" not in name
    }
    weights["d2t"] = torch.from_numpy(tokens - np.arange(PREDICTED))
    weights["t2d"] = torch.zeros(vocabulary(), dtype=torch.bool)
    save_file(weights, own / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= dict(
        architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, draft_vocab_size=PREDICTED,
        eagle_config={"eagle_aux_hidden_state_layer_ids": PLACES},
    )  # fmt: skip
    (own / "config.json").write_text(json.dumps(config))
    return folder, own


@pytest.fixture(scope="module")
def drafting(folders: tuple[Path, Path]) -> Any:
    return pipeline_of(
        folders[0], 3, "eagle3", draft_model_path=str(folders[1]), kv_cache_page_size=16,
        prefill_chunk_size=24, enable_in_flight_batching=True,
    )  # fmt: skip


def test_logits_are_those_of_the_formula(
    made: Any, drafting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts in chunks, of answers, and of the head's own tokens after them."""
    drafter = head_drafter(drafting)
    monkeypatch.setattr(drafter, "_chunk", 7)
    logits = recorded_logits(drafter, monkeypatch)
    prompt = np.random.default_rng(1).integers(3, vocabulary(), 43).tolist()
    # the second one begins with pages of the first one, and goes on with another token
    for tokens in (prompt, [*prompt[:37], *prompt[:4]]):
        engine, one = Engine(drafting, limits_of(drafting)), request(tokens, 9)
        engine.submit(one)

        def read_again(one: Any = one) -> None:
            drafter._texts[one.request_id].read = 0

        def preempt(one: Any = one, engine: Engine = engine) -> None:
            # what was cached of it is lost
            cache = drafting.kv_managers[0]
            cache.forget_prefixes()
            engine.scheduler._preempt(one)
            for blocks in (cache.blocks, *cache.group_blocks):
                blocks.to_numpy()[:] = 0

        check_drafts(made, one, engine, logits, preempt if tokens is prompt else read_again)
    assert drafting.kv_managers[0].pages.reused_tokens >= 32


def check_drafts(
    made: Any, one: Any, engine: Engine, logits: list[Any], event: Callable[[], None]
) -> None:
    """Compares the logits of all drafts of a request, before and after an event."""
    model, head, tokens_of_head = made
    checked = 0
    while not engine.idle:
        logits.clear()
        engine.step()
        if one.is_done or one.active_idx < one.end_idx or not one.draft_tokens:
            continue
        if not logits:  # a prediction has drafted them
            assert one.prediction is not None
            continue
        tokens = one.all_tokens.tolist()
        with torch.no_grad():
            # the first of these states is that of the embeddings
            every = model.model(
                torch.tensor([tokens[:-1]]), output_hidden_states=True
            ).hidden_states
            state = head.fc(torch.cat([every[place] for place in PLACES], dim=-1))
            following = tokens[1:]
            for found in logits[-len(one.draft_tokens) :]:
                embedded = model.model.embed_tokens(torch.tensor([following]))
                after = head.states(embedded, state)
                wanted = head.lm_head(head.norm(after[0, -1])).numpy()
                assert relative_error(found[:, tokens_of_head], wanted[None]) < 1e-4
                others = np.setdiff1d(np.arange(vocabulary()), tokens_of_head)
                assert (found[:, others] < -1e29).all()
                checked += 1
                state = torch.cat([state, after[:, -1:]], dim=1)
                following = [*following, int(tokens_of_head[wanted.argmax()])]
        assert list(one.draft_tokens) == following[len(tokens) - 1 :]
        if checked == 6:
            event()
    assert checked > 9


def test_texts_are_those_of_the_model(drafting: Any, folders: tuple[Path, Path]) -> None:
    assert texts(drafting, 3) == texts(pipeline_of(folders[0], 0), 3)
    assert drafting.draft_counts[0] > 100


def test_the_head_reads_what_a_prediction_has_drafted(
    made: Any, drafting: Any, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks; the logits of its drafts after the prediction are those of the formula."""
    drafter = head_drafter(drafting)
    monkeypatch.setattr(drafter, "_chunk", 7)
    logits = recorded_logits(drafter, monkeypatch)
    prompt = np.random.default_rng(5).integers(3, vocabulary(), 21).tolist()
    plain = request(prompt, 40)
    (answer,) = generated(pipeline_of(folders[0], 0), [plain])
    # the second one is wrong at a place, and goes on
    for prediction in (answer[:20], [*answer[:9], 5, *answer[10:20]]):
        engine, one = Engine(drafting, limits_of(drafting)), request(prompt, 40)
        one.prediction = PredictedText(prediction)
        engine.submit(one)
        check_drafts(made, one, engine, logits, lambda: None)
        assert one.generated_tokens.tolist() == answer
        assert one.prediction.take_counts()[0] >= 12


@pytest.mark.parametrize("values", PARAMETERS, ids=str)
def test_sampled_texts_have_the_distribution_of_the_model(
    made: Any, drafting: Any, values: dict[str, Any]
) -> None:
    """The model prefers tokens that the head drafts, so that some of these are right."""
    drafted = Counter[int]()
    for seed in range(12):
        one, engine = request(PROMPT, 9, seed=seed, **values), Engine(drafting, limits_of(drafting))
        engine.submit(one)
        while not one.is_done:
            engine.step()
            drafted.update(one.draft_tokens)
    likely = {token: 9.0 for token, _ in drafted.most_common(8)}
    check_distribution(drafting, made[0], dict(values, logit_bias=likely))
    check_distribution(drafting, made[0], dict(values, logit_bias=likely), [*likely] * 3)


def test_what_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder, own = folders
    with pytest.raises(ConfigError, match="'eagle3', and there is no draft model"):
        pipeline_of(folder, 3, "eagle3")
    with pytest.raises(ConfigError, match="'eagle3', and .* is a LlamaForCausalLM"):
        pipeline_of(folder, 3, "eagle3", draft_model_path=str(folder))
    with pytest.raises(ConfigError, match="8 bits"):
        pipeline_of(folder, 3, "eagle3", draft_model_path=str(own), kv_cache_format="q8_0")
    with pytest.raises(ConfigError, match="1 blocks with hidden states of 32; .* needs one with"):
        pipeline_of(TINY, 3, "eagle3", draft_model_path=str(own))
    config = json.loads((own / "config.json").read_text())
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(own / "model.safetensors")
    with pytest.raises(ConfigError, match=r"is \[1, 2, 5\], and the model has 5 layers"):
        pipeline_of(folder, 3, "eagle3", draft_model_path=str(tmp_path))
