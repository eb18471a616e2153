"""Never refuse what transformers loads: config.json files whose keys are absent, null, of older names or extreme.

Files of each family are drawn (`edited_files`). transformers' config class takes them or not; where its model computes
finite logits, ours reads the same file and has the same logits.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from max.nn.transformer import ReturnLogits
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.models.blocks.parallel_hybrid import ParallelHybridForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.model import DecoderModel
from tests.architectures.edited_files import ACTIVATIONS, edited
from tests.architectures.families import CASES, architecture_named, varied
from tests.architectures.llama_harness import Server, reference_logits, weights_of
from tests.architectures.test_drawn_configs import FAMILIES, _stable_topk, assert_near, served

REFUSED = (
    "hidden_act is 'prelu'",  # an activation with weights
    "hidden_activation is 'prelu'",
    "activation_function is 'prelu'",
    "mlp_hidden_act is 'prelu'",
    "hidden_act is 'xielu'",
    # convolutions of state-space layers take SiLU only
    *(f"hidden_act is {name!r}; expected one of silu, swish" for name in ACTIVATIONS),
    "sliding_window is 0",  # tokens that see nothing
    # transformers takes the frequencies of GPT-NeoX from the key, and the rest from the hidden size
    "layers.0.self_attn.qkv_proj",
    "num_attention_heads is",  # heads of an odd size: transformers rotates halves of different sizes
    "num_key_value_heads is",  # more than heads: transformers fails with its first tokens
)
"""What is refused though transformers makes a model of it, by the beginning of the message."""
MOST_WEIGHTS = 400_000


def transformers_logits(name: str, config: Any, tokens: list[int]) -> tuple[Any, Any] | None:
    """A random model of a config and its logits; None if it cannot be made, is large, or has none that are finite."""
    made = getattr(transformers, name)
    try:
        with torch.device("meta"):
            if sum(p.numel() for p in made(config).parameters()) > MOST_WEIGHTS:
                return None
        torch.manual_seed(len(tokens))
        model = varied(made(config).float().eval())
        with patch.object(torch.Tensor, "topk", _stable_topk):
            logits = reference_logits(model, tokens)
    except Exception:  # whatever a model raises for a config that its class accepts
        return None
    norms = np.linalg.norm(logits, axis=-1)
    return (model, logits) if np.isfinite(norms).all() and norms.all() else None


def loaded(cls: Any, file: dict[str, Any]) -> Any:
    """The config that transformers makes of a file; it writes an infinite number as an object."""
    return cls.from_dict(cls._decode_special_floats(json.loads(json.dumps(file))))


def check(name: str, data: st.DataObject) -> None:
    """Draws a file, and compares the logits of a prompt where transformers computes some."""
    kind, drawn = FAMILIES[name]
    cls = getattr(transformers, kind)
    options = {"vocab_size": 61, "initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": 2}
    options |= {"pad_token_id": None, "tie_word_embeddings": False}
    whole = cls(**{**options, **drawn(data.draw)})
    file = edited(data.draw, json.loads(whole.to_json_string()), cls)
    longest = data.draw(st.integers(3, 24))
    tokens = np.random.default_rng(longest).integers(0, 61, longest).tolist()
    try:
        config = loaded(cls, file)
    except Exception:  # the classes raise several kinds of errors
        return
    reference = transformers_logits(name, config, tokens)
    if reference is None:
        return
    model, _ = reference
    architecture = cast(type[DecoderModel], architecture_named(name).pipeline_model)
    try:
        ours = Server(
            HuggingFaceConfig(file),
            weights_of(model),
            "interpreter",
            page_size=5,
            max_seq_len=served(model, longest)[0],
            architecture=architecture,
            return_logits=ReturnLogits.ALL,
        )
    except ValueError as error:
        messages = str(error), str(error).partition(": ")[2]
        assert any(message.startswith(REFUSED) for message in messages), (str(error), file)
        return
    assert_near(ours.step({"a": tokens}).logits[0], model, tokens)


def run(name: str, examples: int, number: int) -> None:
    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[*HealthCheck],
        database=None,
        phases=[Phase.generate],
    )
    @given(st.data())
    def drawn(data: st.DataObject) -> None:
        check(name, data)

    drawn()


QUICK = [*FAMILIES][::9]
"""Some families; `test_files_for_long` draws files of all."""


@pytest.mark.any_target
@pytest.mark.parametrize("family", QUICK)
def test_files(family: str) -> None:
    run(family, 3, 1)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_files_for_long(family: str) -> None:
    run(family, 60, 2)


FIRST = {case.architecture: case for case in reversed(CASES.values())}


@pytest.mark.any_target
@pytest.mark.parametrize("family", FIRST)
@pytest.mark.filterwarnings("ignore")
def test_each_key_may_be_absent_or_null(family: str) -> None:
    """A file without a key is read as the file with all keys that transformers makes of it, as one with null is."""
    case = FIRST[family]
    cls = getattr(transformers, case.config)
    config_class = cast(Any, architecture_named(family).pipeline_model).config_class

    def fields(file: dict[str, Any]) -> DecoderConfig | None:
        try:
            read = config_class.from_huggingface(HuggingFaceConfig(json.loads(json.dumps(file))))
        except ValueError:
            return None
        return comparable(read)

    whole = json.loads(cls(**{"vocab_size": 61, **case.sizes, **case.options}).to_json_string())
    # transformers itself does not write that all layers have the same heads
    for key in {*whole} - {"model_type", "transformers_version", "per_layer_config"}:
        for change in ("absent", "null"):
            file = {other: value for other, value in whole.items() if other != key}
            file |= {key: None} if change == "null" else {}
            try:
                config = loaded(cls, file)
            except Exception:  # the classes raise several kinds of errors
                continue
            expected = fields(json.loads(json.dumps(config.to_dict(), default=str)))
            assert fields(file) == expected, (key, change)


def comparable(shape: DecoderConfig) -> DecoderConfig:
    """A decoder whose rotations without scaling have no parameters, as their kind does not use them."""
    for index, block in enumerate(shape.blocks):
        mixer = block.mixer
        mixer = mixer.attention if isinstance(mixer, ParallelHybridForm) else mixer
        rope = getattr(mixer, "rope", None)
        if rope is not None and rope.kind == "default":
            shape = shape.with_attention([index], rope=replace(rope, parameters={}))
    return shape
