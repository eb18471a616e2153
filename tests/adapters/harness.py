"""Random adapters as PEFT saves them, models of transformers with the same adapters merged, and our server for both."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import torch
from safetensors.numpy import save_file
from transformers.pytorch_utils import Conv1D

from max.dtype import DType
from max.graph.weights import GGUFFile, GGUFWeights
from max.pipelines.adapters.adapter import Adapter
from max.pipelines.adapters.base import base_of
from max.pipelines.adapters.layout import AdapterLayout, AdapterShape
from max.pipelines.adapters.placement import packed_terms, site_terms
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.gguf.reader import config_of
from max.pipelines.models.decoder.model import DecoderModel
from tests.architectures.families import CASES, architecture, config_file, transformers_model
from tests.architectures.llama_harness import (
    Server,
    reference_logits,
    relative_error,
    weights_of,
)
from tests.nn.harness import Array

Tensors = dict[str, Array]


def linear_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that PEFT changes if it is told "all-linear", the output layer, and the embedding."""
    output = model.get_output_embeddings()  # type: ignore[operator]
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) or module is output or module is embedding
    }


def sizes(module: torch.nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a module; of an embedding tokens and columns."""
    rows, columns = cast(torch.Tensor, module.weight).shape
    return (rows, columns) if isinstance(module, torch.nn.Embedding | Conv1D) else (columns, rows)


def random_whole_weights(
    model: torch.nn.Module, rng: np.random.Generator, change: float = 0.5
) -> Tensors:
    """Other weights of the embedding, the output layer and the norms of hidden states, as ``modules_to_save``."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    hidden = embedding.weight.shape[1]
    tensors: Tensors = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_norm = "Norm" in type(module).__name__ and weight is not None
        tables = embedding, model.get_output_embeddings()  # type: ignore[operator]
        if module in tables or (is_norm and weight is not None and weight.shape == (hidden,)):
            for part, value in module.named_parameters(recurse=False):
                own = value.detach().numpy()
                new = own * rng.uniform(1 - change, 1 + change, own.shape)
                new += 0.2 * change * rng.standard_normal(own.shape)
                tensors[f"base_model.model.{name}.{part}"] = new.astype(np.float32)
    return tensors


def random_adapter(
    modules: Mapping[str, torch.nn.Module],
    rng: np.random.Generator,
    ranks: Callable[[], int],
    *,
    dora: bool = False,
    size: float = 0.3,
) -> Tensors:
    """The tensors of an adapter of some modules."""
    tensors: Tensors = {}
    for name, module in modules.items():
        inputs, outputs = sizes(module)
        rank = ranks()
        table = isinstance(module, torch.nn.Embedding)
        keys = (
            ("lora_embedding_A", "lora_embedding_B")
            if table
            else ("lora_A.weight", "lora_B.weight")
        )
        a = rng.standard_normal((rank, inputs)) * size / np.sqrt(1 if table else inputs)
        b = rng.standard_normal((outputs, rank))
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.{keys[0]}"] = a.astype(np.float32)
        tensors[f"{prefix}.{keys[1]}"] = b.astype(np.float32)
        if dora:
            magnitude = rng.uniform(0.5, 1.5, outputs)
            tensors[f"{prefix}.lora_magnitude_vector"] = magnitude.astype(np.float32)
    return tensors


def save_adapter(folder: Path, tensors: Tensors, **options: Any) -> Path:
    """Writes an adapter as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "rank_pattern": {"x": 4}, **options}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def gguf_adapter(path: Path, parts: Tensors, kind: str = "adapter") -> Path:
    """Writes an adapter as llama.cpp's converter does, with an alpha of 6."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(kind)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 6.0)
    for name, values in parts.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merged(model: torch.nn.Module, adapter: Adapter, scale: float = 1.0) -> torch.nn.Module:
    """A copy of a model with an adapter in its weights, by PEFT's formulas."""
    copied = copy.deepcopy(model)
    output, embedding = copied.get_output_embeddings(), copied.get_input_embeddings()  # type: ignore[operator]
    if output is not None and output.weight is embedding.weight:
        # an adapter changes one of two tied layers
        output.weight = torch.nn.Parameter(output.weight.clone())
    with torch.no_grad():
        for name, values in adapter.saved_weights.items():
            old = copied.get_parameter(name)
            old += scale * (torch.from_numpy(values.astype(np.float32)) - old)
        for name, low_rank in adapter.modules.items():
            module = copied.get_submodule(name)
            weight = cast(torch.Tensor, module.weight)
            turned = isinstance(module, Conv1D | torch.nn.Embedding)
            product = low_rank.b.astype(np.float64) @ low_rank.a.astype(np.float64)
            # [outputs, inputs]
            w = (weight.T if turned else weight).double()
            delta = low_rank.scale * torch.from_numpy(product)
            new = w + delta
            if low_rank.magnitude is not None:
                new = new * (torch.tensor(low_rank.magnitude) / new.norm(dim=1))[:, None]
            new = w + scale * (new - w)
            weight.copy_(new.T if turned else new)
    return copied


def rounding_bound(model: torch.nn.Module, text: Sequence[int]) -> float:
    """The relative error of logits that rounding explains: random adapters can make a norm's variance nearly 0.

    It is eight times the change of the logits if each weight is off by up to four units in the last place.
    """
    other, draws = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in other.parameters():
            off = torch.rand(weight.shape, generator=draws) * 8 - 4
            weight *= 1 + off * torch.finfo(torch.float32).eps
    return 8 * relative_error(reference_logits(other, text), reference_logits(model, text))


class AdapterServer(Server):
    """A server of a random model, with adapters in its slots; its weights may be those of a file or another model."""

    def __init__(
        self,
        case: str,
        backend: str,
        slots: int,
        max_rank: int,
        whole: bool = False,
        file: Path | None = None,
        model: torch.nn.Module | None = None,
        **options: Any,
    ) -> None:
        model = transformers_model(case) if model is None else model
        shape = AdapterShape(slots, max_rank, options.get("dtype", DType.float32), whole)
        config, weights = config_file(model), weights_of(model)
        if file is not None:
            config = HuggingFaceConfig(config_of(GGUFFile(file)))
            weights = {name: value.data() for name, value in GGUFWeights(file).items()}
        super().__init__(
            config,
            weights,
            backend,
            max_seq_len=CASES[case].max_seq_len,
            architecture=cast(type[DecoderModel], architecture(case).pipeline_model),
            adapters=shape,
            gguf=file is not None,
            **options,
        )
        decoder = self.architecture.decoder_class(self.config, self.params, DType.float32)
        self.layout = AdapterLayout.of(decoder, shape)
        self.base = base_of(self.architecture, self.config, self.weights, is_gguf=self.gguf)
        memory = np.full((slots, self.layout.elements), np.nan, shape.dtype.to_numpy())
        self.adapters = memory, np.zeros((slots, self.layout.count, 2), np.int32)

    def place(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into a slot."""
        assert self.adapters is not None
        memory, forms = self.adapters
        forms[slot] = 0
        for site, terms in site_terms(adapter, self.base, self.layout):
            for at, values in packed_terms(site, terms, memory.dtype):
                memory[slot, at : at + values.size] = values
            forms[slot, site.index] = terms.rank, terms.has_vectors
