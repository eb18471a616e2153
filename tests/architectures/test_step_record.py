"""The named inputs of a decoder's graph, and hidden states in place of those of some tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph.weights import WeightData
from max.nn.transformer import ReturnLogits
from max.pipelines.architectures.llama3.llama3 import (
    build_graph,
    input_types,
    weights_registry,
)
from max.pipelines.architectures.llama3.weight_adapters import convert_safetensor_state_dict
from max.pipelines.models.decoder.step_record import StepRecord
from tests.architectures.test_llama3_config import checkpoint, parts


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("sampling", [(), ("t", "k")])
@pytest.mark.parametrize("cache", [(), ("b",), ("b", "l", "t")])
def test_a_record_keeps_its_places(cache, sampling, embeddings: bool) -> None:
    more = dict(embeddings="e", embedding_rows="r") if embeddings else {}
    names = StepRecord("x", "o", "n", cache, sampling=sampling, **more)
    flat = ["x", "o", "n", *cache, *more.values(), *sampling]
    assert names.flat_inputs() == flat
    numbers = names.with_inputs(range(len(flat)))
    assert numbers.flat_inputs() == list(range(len(flat)))
    assert numbers.tokens == 0 and len(numbers.cache) == len(cache)
    assert [flat[i] for i in numbers.sampling] == list(sampling)
    if embeddings:
        assert [flat[i] for i in (numbers.embeddings, numbers.embedding_rows)] == ["e", "r"]
    else:
        assert numbers.embeddings is numbers.embedding_rows is None
    for wrong in (len(flat) - 1, len(flat) + 1):
        with pytest.raises(ValueError, match=f"{wrong} inputs; the graph takes {len(flat)}"):
            names.with_inputs(range(wrong))


def test_hidden_states_in_place_of_tokens(rng: np.random.Generator) -> None:
    made, params = parts()
    random = {
        name: WeightData.from_numpy(
            rng.normal(size=[int(d) for d in weight.shape]).astype(np.float32) / 4, name
        )
        for name, weight in checkpoint(made, params, np.float32).items()
    }
    weights = convert_safetensor_state_dict(random)
    registry = weights_registry(made, params, DType.float32, weights)
    session = InferenceSession(devices=[CPU()])
    graphs = {
        embeddings: build_graph(
            made, params, DType.float32, ReturnLogits.ALL, with_embeddings=embeddings
        )
        for embeddings in (False, True)
    }
    types = input_types(made, params, with_embeddings=True)
    assert len(graphs[True].inputs) == len(types.flat_inputs()) == len(graphs[False].inputs) + 2
    models = {
        name: session.load(graph, weights_registry=registry) for name, graph in graphs.items()
    }
    table = np.asarray(weights["embed_tokens.weight"].to_buffer().to_numpy(), np.float32)

    def logits(tokens: Sequence[int], embedded: tuple | None) -> np.ndarray:
        shape = (
            2,
            2,
            made.num_layers,
            params.page_size,
            made.attention.num_key_value_heads,
            made.attention.head_dim,
        )
        cache = [
            np.zeros(shape, np.float32), np.zeros(1, np.uint32), np.array([[0, 1]], np.uint32),
            np.array([[len(tokens), 0]], np.uint32),
        ]  # fmt: skip
        arrays = StepRecord(
            np.array(tokens), np.array([0, len(tokens)], np.uint32), np.ones(1, np.int64), cache,
            *(() if embedded is None else embedded),
        )  # fmt: skip
        outputs = models[embedded is not None].execute(
            *map(Tensor.from_numpy, arrays.flat_inputs())
        )
        return outputs[1].to_numpy()

    tokens = rng.integers(0, 50, 9)
    plain = logits(tokens, None)
    none = np.zeros((0, made.hidden_size), np.float32), np.zeros(0, np.int64)
    np.testing.assert_array_equal(logits(tokens, none), plain)
    rows = rng.permutation(9)[:4]
    others = tokens.copy()
    others[rows] = (tokens[rows] + 7) % 50
    assert np.abs(logits(others, none) - plain).max() > 1e-3
    np.testing.assert_array_equal(logits(others, (table[tokens[rows]], rows)), plain)
    with pytest.raises(ValueError, match="9"):
        logits(tokens, (table[:1], np.array([9])))
