"""Never refuse what transformers loads: config.json files of encoders with absent, null, renamed or extreme keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from max.pipelines import PIPELINE_REGISTRY
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.encoders.encoder_model import EncoderModel
from max.pipelines.models.decoder.config import DecoderConfig
from tests.architectures.edited_files import ACTIVATIONS, edited
from tests.architectures.test_config_files import comparable, loaded
from tests.encoders.harness import CASES, pipeline, randomized, reference, run, texts

REFUSED = (
    "hidden_act is 'prelu'",  # an activation with weights
    "hidden_activation is 'prelu'",
    "activation is 'prelu'",
    "attn_logit_softcapping is",
    "sliding_window is 0",
    "relative_attention_num_buckets is",
    "max_length",  # texts longer than the file says
)
"""What is refused though transformers makes a model of it, by the beginning of the message."""


def family_of(case: str) -> tuple[str, type[Any], type[EncoderModel]]:
    """The class of a model, its config class, and our model."""
    name = f"{CASES[case][0]}Model"
    config = getattr(transformers, f"{CASES[case][0]}Config")
    PIPELINE_REGISTRY.load_own([name])
    found = cast(Any, PIPELINE_REGISTRY.architectures[name]).pipeline_model
    return name, config, found


def whole_file(case: str) -> dict[str, Any]:
    """A config.json with all keys."""
    name, cls, _ = family_of(case)
    return json.loads(cls(**CASES[case][1]).to_json_string()) | {"architectures": [name]}


def fields(ours: type[EncoderModel], file: dict[str, Any]) -> dict[str, Any] | None:
    """What is read of a file; None if it is refused."""
    try:
        read = ours.read_config(ours.keys_of(HuggingFaceConfig(json.loads(json.dumps(file)))))
    except ValueError:
        return None
    return {
        key: comparable(value) if isinstance(value, DecoderConfig) else value
        for key, value in vars(read).items()
    }


@pytest.mark.any_target
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_each_key_may_be_absent_or_null(case: str) -> None:
    """A file without a key is read as the file with all keys that transformers makes of it, as one with null is."""
    _, cls, ours = family_of(case)
    whole = whole_file(case)
    assert fields(ours, whole) is not None
    for key in {*whole} - {"model_type", "transformers_version", "architectures"}:
        for change in ("absent", "null"):
            file = {other: value for other, value in whole.items() if other != key}
            file |= {key: None} if change == "null" else {}
            try:
                config = loaded(cls, file)
                with torch.device("meta"):
                    getattr(transformers, whole["architectures"][0])(config)
            except Exception:  # the classes raise several kinds of errors
                continue
            expected = fields(ours, json.loads(json.dumps(config.to_dict(), default=str)))
            assert fields(ours, file) == expected, (key, change)


def check(case: str, draw: Callable[[Any], Any], folder: Path) -> None:
    """Draws a file, and compares the hidden states of a text where transformers computes some."""
    name, cls, _ = family_of(case)
    file = edited(draw, whole_file(case), cls)
    file["architectures"] = [name]
    (tokens,) = texts([draw(st.integers(1, 20))])
    try:
        config = loaded(cls, file)
        with torch.device("meta"):
            count = sum(p.numel() for p in getattr(transformers, name)(config).parameters())
        if count > 400_000:
            return
        torch.manual_seed(len(tokens))
        model = getattr(transformers, name)(config).float().eval()
        randomized(model)
        want = reference(model, tokens).last_hidden_state[0].numpy()
    except Exception:  # whatever a model raises for a config that its class accepts
        return
    if not np.isfinite(want).all() or not want.any():
        return
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(file))
    try:
        pipe = pipeline(folder, pool_embeddings=False, max_length=len(tokens))
    except ValueError as error:
        messages = str(error), str(error).partition(": ")[2]
        assert any(message.startswith(REFUSED) for message in messages), (str(error), file)
        return
    (got,) = run(pipe, [tokens])
    scale = float(np.linalg.norm(want))
    assert np.linalg.norm(got - want) / scale < 1e-4, file


def draws(case: str, examples: int, number: int, folder: Path) -> None:
    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],
    )
    @given(st.data())
    def drawn(data: st.DataObject) -> None:
        PIPELINE_REGISTRY.reset()
        inside = folder / str(len([*folder.iterdir()]))
        inside.mkdir()
        check(case, data.draw, inside)

    drawn()


@pytest.mark.parametrize("case", ["Roberta", "ModernBert"])
def test_files(case: str, tmp_path: Path) -> None:
    draws(case, 2, 1, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_files_for_long(case: str, tmp_path: Path) -> None:
    draws(case, 60, 2, tmp_path)


def test_activations_have_names() -> None:
    """Those of transformers that have no weights."""
    for name in {*ACTIVATIONS} - {"prelu"}:
        file = whole_file("Bert") | {"hidden_act": name}
        assert fields(family_of("Bert")[2], file) is not None, name
