"""Layers of checkpoints that predict further tokens draft them: their logits are those of the papers' formula, and
texts stay those of the model.
"""

from __future__ import annotations

import copy
import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph.weights import GGUFWeights, open_gguf
from max.interfaces import PipelineTask, RequestID, SamplingParams
from max.nn.kv_cache import CacheGroup
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.core.predicted_text import PredictedText
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.drafts.drafter import KINDS
from max.pipelines.generation.drafts.head import HeadDrafter, _Row, _Text
from max.pipelines.generation.engine import Engine, Failure
from max.pipelines.gguf.export import export_gguf, forms_of
from max.pipelines.gguf.reader import config_of
from max.pipelines.gguf.tensor_names import decoder_weights
from max.pipelines.models.heads.prediction import (
    PredictionHead,
    head_config,
    head_weights,
    with_head,
)
from max.pipelines.sampling.inputs import step_seed
from tests.architectures import gguf_files
from tests.architectures.families import CASES, PLAIN_ROPE, architecture, random_model
from tests.architectures.llama_harness import relative_error, vary_vectors
from tests.pipelines.head_distributions import PARAMETERS, check_distribution
from tests.pipelines.test_drafts import always, generated
from tests.programs.architectures import TINY, random_checkpoint

LENGTH = 200
FAMILIES = [
    pytest.param("deepseek_v3", marks=pytest.mark.long),
    pytest.param("deepseek_v32", marks=pytest.mark.long),
    "glm4_moe",
    "mimo",
    "qwen3_next",
    pytest.param("qwen3_5", marks=pytest.mark.long),
]


@cache
def vocabulary() -> int:
    return json.loads((TINY / "config.json").read_text())["vocab_size"]


def spec_of(family: str) -> Any:
    """A case whose sequences are longer than those of other tests."""
    spec = CASES["qwen2" if family == "mimo" else family]
    longer: dict[str, Any] = {"max_position_embeddings": LENGTH}
    if family == "mimo":
        longer["tie_word_embeddings"] = False
    if family.startswith("qwen"):
        # the layer is like the last one, with attention
        kinds = ["linear_attention", "full_attention"] * 2
        longer |= {"layer_types": kinds, "num_hidden_layers": 4, "mlp_only_layers": []}
    else:
        longer["rope_parameters"] = PLAIN_ROPE
    return replace(spec, options=spec.options | longer)


class Reference(torch.nn.Module):
    """A prediction layer in PyTorch: the decoder layer is that of transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        size, layers = model.config.hidden_size, model.model.layers
        kind = type(layers[-1])
        self.enorm, self.hnorm, self.norm = (
            type(model.model.norm)(size, eps=model.config.rms_norm_eps) for _ in range(3)
        )
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
        self.block = kind(model.config, len(layers) - 1)
        self.head = torch.nn.Linear(size, model.config.vocab_size, bias=False)

    def states(self, model: Any, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """The normalized states of places, of the token after each and of the state of each."""
        embedded = model.model.embed_tokens(torch.tensor([tokens]))
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        count = len(tokens)
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        x = self.block(
            x, attention_mask=mask, position_ids=positions,
            position_embeddings=model.model.rotary_emb(x, positions),
        )  # fmt: skip
        return self.norm(x[0] if isinstance(x, tuple) else x)


def published_names(family: str, layers: int) -> dict[str, str]:
    """The names in files of the parts of `Reference`."""
    stem = f"model.layers.{layers}."
    if family.startswith("qwen"):
        return {
            "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
            "eh_proj": "mtp.fc", "norm": "mtp.norm", "block": "mtp.layers.0",
        }  # fmt: skip
    if family == "mimo":
        stem = "model.mtp_layers.0."
        return {
            "enorm": f"{stem}token_layernorm", "hnorm": f"{stem}hidden_layernorm",
            "eh_proj": f"{stem}input_proj", "norm": f"{stem}final_layernorm", "block": stem[:-1],
        }  # fmt: skip
    return {
        "enorm": f"{stem}enorm", "hnorm": f"{stem}hnorm", "eh_proj": f"{stem}eh_proj",
        "norm": f"{stem}shared_head.norm", "head": f"{stem}shared_head.head", "block": stem[:-1],
    }  # fmt: skip


@cache
def made(family: str, guesses: bool = True) -> tuple[Any, Reference]:
    """A random model and a head; one that guesses has the model's output layer, and both write much the same after a
    token.
    """
    model = random_model(spec_of(family), len(family), vocabulary())
    torch.manual_seed(5)
    head, size = Reference(model), model.config.hidden_size
    vary_vectors(head)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
        for block in (*model.model.layers, head.block) if guesses else ():
            for name, parameter in block.named_parameters():
                if name.endswith(
                    ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
                ):
                    parameter *= 0.02
        if guesses:
            head.enorm.weight.fill_(0 if family.startswith("qwen") else 1)
            head.eh_proj.weight[:, :size] = torch.eye(size)
            head.eh_proj.weight[:, size:] *= 0.2
            head.norm.weight.copy_(model.model.norm.weight)
        if guesses or family.startswith(("qwen", "mimo")):
            head.head.weight.copy_(model.lm_head.weight)
    return model.eval(), head.eval()


def checkpoint(
    folder: Path, model: Any, head: Reference, family: str, with_head: bool = True
) -> Path:
    """Writes the model, and its head by the published names."""
    random_checkpoint(folder, model)
    layers = model.config.num_hidden_layers
    file = folder / "model.safetensors"
    weights = load_file(file)
    names = published_names(family, layers)
    # as the checkpoint has the block's experts
    last = {
        name.replace(f"layers.{layers - 1}.", "", 1)
        for name in weights
        if f"layers.{layers - 1}." in name
    }
    if with_head:
        state = head.state_dict()
        for name, value in state.items():
            part, _, rest = name.partition(".")
            if part != "block" and part in names:
                if part == "eh_proj" and family == "mimo":
                    # it has the state before the embedding
                    value = value.roll(value.shape[1] // 2, dims=1)
                weights[f"{names[part]}.{rest}"] = value.clone()
        stored = {name: value for name, value in saved_block(model, head).items()}
        assert len(stored) == len(last)
        weights |= {f"{names['block']}.{name}": value for name, value in stored.items()}
        if family == "mimo":
            # a second layer, which is left out
            weights |= {
                name.replace("mtp_layers.0.", "mtp_layers.1."): value + 1
                for name, value in weights.items()
                if "mtp_layers.0." in name
            }
    save_file(weights, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if not family.startswith("qwen"):
        config["num_nextn_predict_layers"] = int(with_head)
    if family == "mimo":
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
        config["num_nextn_predict_layers"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def saved_block(model: Any, head: Reference) -> dict[str, torch.Tensor]:
    """The head's block by the names of a checkpoint, which stores each expert."""
    own = copy.deepcopy(model)
    layer = own.config.num_hidden_layers - 1
    own.model.layers[layer].load_state_dict(head.block.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        own.save_pretrained(folder)
        weights = load_file(f"{folder}/model.safetensors")
    before = f"model.layers.{layer}."
    return {
        name.removeprefix(before): value.clone()
        for name, value in weights.items()
        if name.startswith(before)
    }


def pipeline_of(folder: Path, drafts: int, method: str = "mtp", **values: Any) -> Any:
    if drafts:
        values |= dict(speculative_method=method, num_speculative_tokens=drafts)
    values = dict(max_length=LENGTH, max_batch_size=8, quantization_encoding="float32") | values
    config = PipelineConfig(model_path=str(folder), **values)
    pipeline = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]
    return always(pipeline) if drafts else pipeline


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp(family), *made(family), family)


def drafting_pipeline(folder: Path) -> Any:
    return pipeline_of(
        folder, 4, kv_cache_page_size=16, prefill_chunk_size=24, enable_in_flight_batching=True
    )


@pytest.fixture(scope="module")
def drafting(folder: Path) -> Any:
    return drafting_pipeline(folder)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return pipeline_of(folder, 0)


def head_drafter(pipeline: Any) -> HeadDrafter:
    *_, (_, drafter) = pipeline.replicas[0].drafts._drafter.parts
    assert isinstance(drafter, HeadDrafter)
    return drafter


def request(tokens: list[int], new: int, **values: Any) -> TextContext:
    return TextContext(
        tokens=np.array(tokens), max_length=len(tokens) + new,
        sampling_params=SamplingParams(**dict(top_k=1, ignore_eos=True) | values),
    )  # fmt: skip


def recorded_logits(drafter: HeadDrafter, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The logits of all steps of the head."""
    found: list[Any] = []
    execute = drafter._head.execute

    def recording(inputs: Any) -> Any:
        outputs = execute(inputs)
        found.append(outputs.logits.to_numpy().copy())
        return outputs

    monkeypatch.setattr(drafter._head, "execute", recording, raising=False)
    monkeypatch.setattr(drafter, "_loop", None)
    return found


def test_logits_are_those_of_the_formula(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts in chunks, of answers, and of the head's own tokens after them."""
    model, head = made(family, guesses=False)
    drafting = drafting_pipeline(checkpoint(tmp_path, model, head, family))
    drafter = head_drafter(drafting)
    monkeypatch.setattr(drafter, "_chunk", 7)
    logits = recorded_logits(drafter, monkeypatch)
    draw = np.random.default_rng(1)
    engine = Engine(drafting, limits_of(drafting))
    one = request(draw.integers(3, vocabulary(), 43).tolist(), 9)
    engine.submit(one)
    checked = 0
    while not engine.idle:
        logits.clear()
        engine.step()
        if one.is_done or one.active_idx < one.end_idx or not one.draft_tokens:
            continue
        tokens = one.all_tokens.tolist()
        with torch.no_grad():
            hidden = model.model(torch.tensor([tokens[:-1]])).last_hidden_state
            following = tokens[1:]
            for found in logits[-len(one.draft_tokens) :]:
                states = head.states(model, following, hidden)
                wanted = head.head(states[0, -1]).numpy()
                assert relative_error(found, wanted[None]) < 1e-4
                checked += 1
                hidden = torch.cat([hidden, states[:, -1:]], dim=1)
                following = [*following, int(wanted.argmax())]
        assert list(one.draft_tokens) == following[len(tokens) - 1 :]
    assert checked > 7


def requests(seed: int) -> list[TextContext]:
    """Requests, some with a common beginning, greedy and sampled ones."""
    draw = np.random.default_rng(seed)
    made = []
    start = draw.integers(3, vocabulary(), 40).tolist()
    for number in range(6):
        own = draw.integers(3, vocabulary(), int(draw.integers(1, 50))).tolist()
        sampled = number % 3 == 2
        params = SamplingParams(
            temperature=0.8 if sampled else 0, top_k=-1 if sampled else 1, seed=number,
            ignore_eos=True, frequency_penalty=0.4 if number == 1 else 0,
        )  # fmt: skip
        made.append(
            TextContext(
                request_id=RequestID(f"{number}"),
                tokens=np.array(start + own if number % 2 else own),
                max_length=min(len(own) + 40 + int(draw.integers(2, 60)), LENGTH),
                sampling_params=params,
            )
        )
    return made


def texts(pipeline: Any, seed: int) -> list[list[int]]:
    return generated(pipeline, requests(seed))


def test_texts_are_those_of_the_model(drafting: Any, plain: Any) -> None:
    """In chunks, from the pages of shared prefixes, greedy and sampled; the second time from the first one's pages."""
    before = drafting.draft_counts
    wanted = texts(plain, 3)
    for _ in range(2):
        assert texts(drafting, 3) == wanted
        drafted, right = np.subtract(drafting.draft_counts, before)
        assert 0.08 * drafted < right < drafted
    assert not head_drafter(drafting)._texts


def test_predictions_come_before_the_head(drafting: Any, plain: Any) -> None:
    """Right ones, and ones with other tokens in between; requests beside have none."""
    wanted = texts(plain, 6)
    for step in (1000, 11):
        contexts = requests(6)
        for number, (one, answer) in enumerate(zip(contexts, wanted, strict=True)):
            parts = [answer[n : n + step] + [5, 6] for n in range(0, len(answer) // 2, step)]
            one.prediction = PredictedText(sum(parts, [])) if number % 4 else None
        assert generated(drafting, contexts) == wanted
        counts = [one.prediction.take_counts()[0] for one in contexts if one.prediction]
        assert len(counts) == 4 and min(counts) > 0
    assert not head_drafter(drafting)._texts


@pytest.mark.parametrize("values", PARAMETERS, ids=str)
def test_sampled_texts_have_the_distribution_of_the_model(
    drafting: Any, family: str, values: dict[str, Any]
) -> None:
    check_distribution(drafting, made(family)[0], values)


def test_texts_where_pages_run_out(drafting: Any, plain: Any) -> None:
    """Preempted requests are read again by the head too; drafts take no pages that others need."""
    (pool, *others) = drafting.kv_managers[0].pages.pools
    held = [[each.take() for _ in range(each.num_pages - 10)] for each in (pool, *others)]
    engine = Engine(drafting, limits_of(drafting))
    contexts = requests(5)
    for one in contexts:
        engine.submit(one)
    while not engine.idle:
        assert not [x for x in engine.step() if isinstance(x, Failure)]
    for each, pages in zip((pool, *others), held, strict=True):
        for page in pages:
            each.drop(page)
    assert [one.failure for one in contexts] == [None] * 6
    assert engine.scheduler.preemptions > 0
    assert [one.generated_tokens.tolist() for one in contexts] == texts(plain, 5)


def test_removed_tokens_are_read_again(drafting: Any) -> None:
    drafter = head_drafter(drafting)
    one = request([5, 6, 7, 8], 20)
    engine = Engine(drafting, limits_of(drafting))
    engine.submit(one)
    while one.current_length < 12:
        assert not engine.idle  # it failed
        engine.step()

    (text,) = drafter._texts.values()
    assert text.read == one.current_length - 1
    drafter.rewind(one)
    assert text.read == 3
    drafter.rewind(request([1], 2))
    while not engine.idle:
        engine.step()
    assert not drafter._texts


def test_the_configuration_chooses_the_head(folder: Path, plain: Any, family: str) -> None:
    if family != "glm4_moe":
        return
    pipeline = pipeline_of(folder, 3, "auto")
    kinds = [type(drafter).__name__ for _, drafter in pipeline.replicas[0].drafts._drafter.parts]
    assert kinds == ["PredictionDrafter", "RecentAnswersDrafter", "LookupDrafter", "HeadDrafter"]
    assert texts(pipeline, 4) == texts(plain, 4)
    # each draft counts for the drafter that made it
    shares = pipeline.replicas[0].drafts.lengths._all
    assert 3 * KINDS in shares and len(shares) > 1
    assert pipeline.kv_managers[0].params.groups[-1] == CacheGroup(1, 1, 24, None, True)
    assert len(plain.kv_managers[0].params.groups) < len(pipeline.kv_managers[0].params.groups)
    pipeline = pipeline_of(folder, 3, "ngram")
    assert len(plain.kv_managers[0].params.groups) == len(pipeline.kv_managers[0].params.groups)
    with pytest.raises(ConfigError, match="8 bits, which holds no hidden states"):
        pipeline_of(folder, 3, kv_cache_format="q8_0")
    pipeline_of(folder, 3, "auto", kv_cache_format="q8_0")


def test_a_checkpoint_without_such_layers() -> None:
    with pytest.raises(ConfigError, match="'mtp', and .* has no layers that predict further"):
        pipeline_of(TINY, 3)


def test_names_in_gguf_files(tmp_path: Path) -> None:
    """The layer follows the others; its own parts are named ``nextn``."""
    model, head = made("glm4_moe")
    layers = model.config.num_hidden_layers
    longer = copy.deepcopy(model)
    longer.config.num_hidden_layers += 1
    longer.model.layers.append(head.block)
    names = published_names("glm4_moe", layers)
    parts = {
        f"{names[part]}.weight": getattr(head, part).weight.detach().numpy()
        for part in ("enorm", "hnorm", "eh_proj", "norm", "head")
    }
    path = tmp_path / "model.gguf"
    gguf_files.write(
        path, longer, "glm4moe", lambda writer: writer.add_nextn_predict_layers(1),
        lambda state, _: {**state, **parts},
    )  # fmt: skip
    file = open_gguf(path)
    config = cast(Any, architecture("glm4_moe").pipeline_model).config_class
    config = config.from_huggingface(config_of(file))
    assert (config.num_layers, config.prediction_layers) == (layers, 1)
    weights = decoder_weights(forms_of("Glm4MoeForCausalLM")[0], dict(GGUFWeights(path).items()))
    own = head_weights(config, weights)
    for name, part in {
        "embedding_norm": head.enorm, "hidden_norm": head.hnorm, "projection": head.eh_proj,
        "norm": head.norm, "lm_head": head.head, "embed_tokens": model.model.embed_tokens,
        "layers.0.self_attn.q_proj": head.block.self_attn.q_proj,
        "layers.0.mlp.shared.down_proj": head.block.mlp.shared_experts.down_proj,
    }.items():  # fmt: skip
        array = Tensor.from_dlpack(own[f"{name}.weight"].data).to_numpy()
        np.testing.assert_array_equal(array, part.weight.detach().numpy())
    shape = head_config(with_head(config), own)
    params = shape.cache_params(DType.float32, 16)
    assert own.keys() == PredictionHead(shape, params, DType.float32).raw_state_dict().keys()


def test_a_quantized_file_keeps_the_layer(
    folder: Path, plain: Any, family: str, tmp_path: Path
) -> None:
    if family not in ("glm4_moe", "deepseek_v3"):
        return  # no GGUF form, or none of the layer
    path = tmp_path / "model.gguf"
    session = InferenceSession(devices=[CPU()])
    if family == "glm4_moe":
        assert export_gguf(folder, path, "f32", session).left_out == 0
    else:
        assert export_gguf(folder, path, "f32", session).left_out == 1
        export_gguf(folder, path, "f32", session, prediction_layers=True)
    pipeline = pipeline_of(path, 3)
    assert texts(pipeline, 3) == texts(plain, 3)
    drafted, right = pipeline.draft_counts
    assert 0.08 * drafted < right
    written = export_gguf(folder, path, "f32", session, prediction_layers=False)
    assert written.left_out == 1
    with pytest.raises(ConfigError, match="'mtp', and .* has no layers that predict further"):
        pipeline_of(path, 3)


def test_a_head_samples_as_the_model_does() -> None:
    """Its place of a token is one before that of the model, which samples the same token with the same seed."""
    for seed in (0, 5, (1 << 63) + 11, (1 << 64) - 1):
        params = _Text(request([1, 2], 3, seed=seed, top_k=7, temperature=0.3), 0, 0).params
        assert step_seed(params.seed, 8) == step_seed(seed, 9)
        assert (params.top_k, params.temperature) == (7, 0.3)


def test_a_row_goes_on_after_several_steps() -> None:
    one = request([1, 2, 3, 4, 5, 6], 9)
    row = _Row(one, _Text(one, 0, 2), 5)
    assert (row.start_idx, row.active_idx, row.active_length) == (2, 5, 3)
    assert row.next_tokens.tolist() == [4, 5, 6]
    # the step reads the token at place 5; three steps more read up to place 7, and wrote that of place 8
    for steps, place in ((1, 5), (3, 8), (1, 9)):
        row.advance(7, steps)
        assert (row.start_idx, row.active_idx, row.active_length) == (place, place + 1, 1)
        assert row.next_tokens.tolist() == [7]
