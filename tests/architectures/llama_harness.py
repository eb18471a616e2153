"""Llama models of transformers as references, and a small server of ours around the same weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from max import _interpreter
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef
from max.graph.weights import WeightData
from max.interfaces import TextGenerationOutput
from max.nn.transformer import ReturnLogits
from max.pipelines.adapters.layout import AdapterShape
from max.pipelines.architectures.llama3.model import Llama3Model
from max.pipelines.generation.engine import Engine
from max.pipelines.gguf.tensor_names import decoder_weights
from max.pipelines.kv_cache.memory import group_shapes
from max.pipelines.models.decoder.fused_weights import split_fused
from max.pipelines.models.decoder.graph import build_graph
from max.pipelines.models.decoder.model import DecoderModel
from max.pipelines.models.decoder.weights import gguf_layout, weights_registry, with_embedding
from tests.nn.harness import Array, session

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped_untied_llama3": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "tied": {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "biased_wide_heads": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
    },
    "yarn": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
}


def make_reference(variant: str, initializer_range: float = 0.15) -> LlamaForCausalLM:
    """A small random model in float32; its logits are of order 1. transformers' own range is 0.02."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=3,
        max_position_embeddings=128,
        initializer_range=initializer_range,
        rms_norm_eps=1e-5,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **VARIANTS[variant],
    )
    model = LlamaForCausalLM(config).eval()
    vary_vectors(model)
    return model


def vary_vectors(model: Any) -> None:
    """Adds noise to norms and biases, which transformers initializes to 1 and 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)


def reference_logits(model: Any, tokens: Sequence[int]) -> Array:
    """The logits of all tokens of one sequence."""
    with torch.no_grad():
        # some hybrids count the tokens of a cache by their first layer with attention, which a drawn config may lack
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float().numpy()


def weights_of(model: Any) -> dict[str, WeightData]:
    """A model's weights as its checkpoint has them; transformers fuses those of experts when it loads them."""
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    if any(".experts." in name for name in state):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            state = load_file(f"{folder}/model.safetensors")
    return {
        name: WeightData.from_numpy(np.ascontiguousarray(value), name)
        for name, value in state.items()
    }


@dataclass
class Step:
    """The results of one execution, split by sequence."""

    last: Array
    logits: list[Array]
    tokens: Array | None


class Server:
    """Runs our graph for named sequences that grow, in pages of a shuffled cache.

    `change` changes the weights by the decoder's names.
    """

    def __init__(
        self,
        huggingface_config: Any,
        weights: Mapping[str, WeightData],
        backend: str,
        dtype: DType = DType.float32,
        *,
        page_size: int = 8,
        pages: int = 64,
        max_seq_len: int = 128,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
        with_sampling: bool = False,
        use_subgraphs: bool = True,
        architecture: type[DecoderModel] = Llama3Model,
        gguf: bool = False,
        change: Callable[[dict[str, WeightData]], Mapping[str, WeightData]] = lambda weights: (
            weights
        ),
        devices: int = 1,
        adapters: AdapterShape | None = None,
    ) -> None:
        config = architecture.config_class.from_huggingface(huggingface_config, max_seq_len)
        names, weights = architecture.weight_names, architecture.own_weights(weights)
        if gguf:
            renamed = decoder_weights(architecture.gguf[0], weights)
        else:
            renamed = names.from_safetensors(weights)
        renamed = dict(change(renamed))
        config, renamed = with_embedding(architecture.shape_by_weights(config, renamed), renamed)
        if gguf:
            config = gguf_layout(config, renamed, architecture.gguf[0].permuted)
        params = config.cache_params(dtype, page_size, n_devices=devices)
        decoder = architecture.decoder_class
        renamed = split_fused(config, renamed)
        registry = weights_registry(decoder, config, params, dtype, renamed)
        self.graph = build_graph(
            decoder,
            config,
            params,
            dtype,
            return_logits,
            with_sampling,
            devices=[DeviceRef.CPU(index) for index in range(devices)],
            use_subgraphs=use_subgraphs,
            state_dict=renamed,
            adapters=adapters,
        )
        self.config, self.weights, self.architecture, self.gguf = (
            config,
            renamed,
            architecture,
            gguf,
        )
        self.params = params
        # what the graph takes of adapters: their memory and forms
        self.adapters: tuple[Array, Array] | None = None
        self.with_sampling, self.return_logits = with_sampling, return_logits
        self.page_size = page_size
        # of each group and device; pages and states that no sequence has written must not be read
        self.blocks = [
            [
                np.full(
                    (
                        pages,
                        1 if p.is_mla else 2,
                        layers,
                        page_size,
                        p.n_kv_heads_per_device,
                        p.head_dim,
                    ),
                    np.nan,
                    dtype.to_numpy(),
                )
                for _ in range(devices)
            ]
            for p, layers in group_shapes(params, config.num_cached_layers)
        ]
        # the pages of further devices, by those of the interpreter
        self.others = {
            id(blocks): Tensor.from_numpy(blocks).to(CPU(index))
            for group in self.blocks
            for index, blocks in enumerate(group)
            if index
        }
        self.windows = [params.window, *(group.window for group in params.groups)]
        self.states = [
            np.full((pages, state.layers, *state.shape), np.nan, state.dtype.to_numpy())
            for state in config.states
        ]
        rng = np.random.default_rng(3)
        self.free, self.free_slots = (rng.permutation(pages).tolist() for _ in range(2))
        self.slots: dict[Any, int] = {}
        self.pages: dict[Any, list[int]] = {}
        self.lengths: dict[Any, int] = {}
        self.arrays = {k: Tensor.from_dlpack(v).to_numpy() for k, v in registry.items()}
        self.model = None
        if backend == "engine":
            cpus = [CPU(index) for index in range(devices)]
            run = session() if devices == 1 else InferenceSession(devices=cpus)
            self.model = run.load(self.graph, weights_registry=registry)

    def step(
        self,
        batch: Mapping[Any, Sequence[int]],
        n: int = 1,
        sampling: Sequence[Array] | None = None,
        adapters: Sequence[int] = (),
        scales: Sequence[float] = (),
    ) -> Step:
        """Feeds new tokens of some sequences, each with the adapter in a slot; -1: none."""
        new = [len(tokens) for tokens in batch.values()]
        for name, tokens in batch.items():
            have = self.pages.setdefault(name, [])
            length = self.lengths.setdefault(name, 0) + len(tokens)
            while len(have) * self.page_size < length:
                have.append(self.free.pop())
        cached = [self.lengths[name] for name in batch]
        first, *others = (self._table(list(batch), group) for group in range(len(self.blocks)))
        groups = [
            x
            for blocks, table in zip(self.blocks[1:], others, strict=True)
            for x in (*blocks, table)
        ]
        offsets = np.cumsum([0, *new]).astype(np.uint32)
        inputs: list[Array] = [
            np.concatenate([np.asarray(tokens, np.int64) for tokens in batch.values()]),
            offsets,
            np.arange(n)
            if self.return_logits is ReturnLogits.VARIABLE
            else np.array([n], np.int64),
            *self.blocks[0],
            np.array(cached, np.uint32),
            first,
            np.array([[max(new), max(cached)]], np.uint32),
            *groups,
        ]
        if self.states:
            for name in batch:
                if name not in self.slots:
                    self.slots[name] = self.free_slots.pop()
            slots = [self.slots[name] for name in batch]
            inputs += [np.array(slots, np.uint32), *self.states]
        if self.with_sampling:
            inputs += greedy(len(batch)) if sampling is None else list(sampling)
        if self.adapters is not None:
            own = np.array(adapters or [-1] * len(batch), np.int32)
            inputs += [*self.adapters, own, np.array(scales or [1.0] * len(batch), np.float32)]
        if self.model is None:
            outputs = _interpreter.run(self.graph, inputs, self.arrays)
        else:
            placed = [self.others.get(id(value), value) for value in inputs]
            outputs = [np.array(out.to_numpy()) for out in self.model.execute(*placed)]
        for name, tokens in batch.items():
            self.lengths[name] += len(tokens)
        tokens = outputs.pop(0) if self.with_sampling else None
        last, *more = outputs
        parts: list[Array] = []
        if more:
            logits, bounds = more
            parts = [logits[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
        return Step(last, parts, tokens)

    def _table(self, names: Sequence[Any], group: int) -> Array:
        """The pages of a group: each has another order; pages that its window has passed are none."""
        count, window = len(self.blocks[group][0]), self.windows[group]
        table = np.zeros((len(names), max(len(self.pages[name]) for name in names)), np.uint32)
        for row, name in zip(table, names, strict=True):
            held = [(page + 7 * group) % count for page in self.pages[name]]
            passed = 0 if window is None else max(0, self.lengths[name] - window + 1)
            passed //= self.page_size
            row[: len(held)] = [*[count] * passed, *held[passed:]]
        return table


def greedy(batch: int) -> list[Array]:
    """Sampling inputs that pick the likeliest tokens."""
    return [
        np.zeros(batch, np.float32),
        np.full(batch, -1, np.int64),
        np.ones(batch, np.float32),
        np.zeros(batch, np.float32),
        np.zeros(batch, np.uint64),
    ]


def centered(rows: Array) -> Array:
    """Each row minus its mean: logits and the log-probabilities of their softmax become equal.

    Args:
        rows: Logits or log-probabilities ``[rows, vocabulary]``.
    """
    return rows - rows.mean(axis=-1, keepdims=True)


def log_probabilities(engine: Engine, vocabulary: int) -> Array:
    """Runs an engine until it is idle; the log-probabilities of its tokens ``[tokens, vocabulary]``, in order.

    Args:
        engine: Its requests that ask for log-probabilities ask for those of the whole vocabulary.
        vocabulary: The number of tokens.
    """
    rows: list[list[float]] = []
    while not engine.idle:
        for outcome in engine.step():
            assert isinstance(outcome, TextGenerationOutput), outcome
            for logs in outcome.log_probabilities or ():
                rows += [
                    [row[token] for token in range(vocabulary)]
                    for row in logs.top_log_probabilities
                ]
    return np.array(rows)


def relative_error(actual: Array, expected: Array) -> float:
    """The greatest error of a row of logits, relative to the row's norm."""
    difference = np.linalg.norm(actual.astype(np.float64) - expected, axis=-1)
    return float((difference / np.linalg.norm(expected, axis=-1)).max())


def wrong_tokens(actual: Array, expected: Array, margin: float = 0.05) -> int:
    """The number of rows with another likeliest token, where the reference's top two differ by more than the margin."""
    top = np.sort(expected, axis=-1)
    sure = top[..., -1] - top[..., -2] > margin
    return int((sure & (actual.argmax(-1) != expected.argmax(-1))).sum())
