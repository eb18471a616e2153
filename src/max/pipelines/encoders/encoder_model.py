"""The base of encoders in pipelines: loading, inputs, execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from max.driver import CPU, Device, Tensor
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue
from max.interfaces import EmbeddingsContext
from max.nn.kv_cache.manager import KVCacheInputs
from max.nn.layer import Module
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.checkpoints.model_types import with_type_of
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import ConfigError, WeightsError
from max.pipelines.encoders.encoder import Encoder
from max.pipelines.encoders.encoder_config import EncoderConfig, HeadConfig, read_labels
from max.pipelines.encoders.heads import ClassifierHead, SentenceHead
from max.pipelines.encoders.sentence_files import SentenceFiles, read_sentence_files
from max.pipelines.encoders.weight_names import EncoderNames
from max.pipelines.models.graph_model import GraphModel
from max.pipelines.models.inputs import ModelInputs, ModelOutputs

__all__ = ["EncoderInputs", "EncoderModel"]

MOST_TEXTS = 256
"""The most texts of an execution by default."""


class EncoderInputs(ModelInputs):
    """The inputs of an execution.

    Args:
        tokens: The tokens of all texts, int64 ``[total]``.
        positions: The position of each token in its text, int64 ``[total]``.
        token_types: The type of each token, int64 ``[total]``.
        input_row_offsets: Where each text begins in ``tokens``, uint32 ``[batch + 1]``.
    """

    def __init__(
        self, tokens: Tensor, positions: Tensor, token_types: Tensor, input_row_offsets: Tensor
    ) -> None:
        self.tokens = tokens
        self.positions = positions
        self.token_types = token_types
        self.input_row_offsets = input_row_offsets


class _EncoderWithHead(Module):
    """Hidden states, and what the head computes from them.

    Args:
        encoder: The encoder.
        head: The head; None: the hidden states are the result.
    """

    def __init__(self, encoder: Encoder, head: SentenceHead | ClassifierHead | None) -> None:
        self.encoder, self.head = encoder, head

    def __call__(self, *inputs: TensorValue) -> TensorValue:
        """The result.

        Args:
            inputs: The arguments of `Encoder`; the last one is where each text begins.
        """
        h = self.encoder(*inputs)
        return h if self.head is None else self.head(h, inputs[-1])


class EncoderModel(GraphModel[EmbeddingsContext]):
    """An encoder: vectors of texts, or the scores of a classifier.

    An architecture subclasses it, sets `weight_names`, and overrides `read_config`; a classifier sets `head`, too.
    """

    weight_names: ClassVar[EncoderNames]
    """Renames a checkpoint's weights if the architecture is registered without adapters."""

    model_types: ClassVar[tuple[str, ...]] = ()
    """The values of ``model_type`` whose defaults count for keys that a config.json leaves out, the usual one first."""

    head: ClassVar[HeadConfig | None] = None
    """The shape of a classifier's head without the number of its outputs; None: the model computes vectors."""

    gives_rows_of_tokens: bool = False
    """Whether the result has a row for each token, not for each text."""

    @classmethod
    def keys_of(cls, config: HuggingFaceConfig) -> ConfigKeys:
        """The keys of a config.json, with the defaults of its type.

        Args:
            config: The config.json.
        """
        return with_type_of(ConfigKeys(config), cls.model_types)

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> EncoderConfig:
        """The shape of the encoder.

        Args:
            keys: The keys of config.json.

        Raises:
            ModelFilesError: A value is missing, or does not fit.
        """
        raise NotImplementedError(f"{cls.__name__} does not override read_config")

    @classmethod
    def read_head(cls, keys: ConfigKeys) -> HeadConfig | None:
        """The shape of the classifier's head: `head` with config.json's number of labels; None: no classifier.

        Args:
            keys: The keys of config.json.

        Raises:
            ModelFilesError: A value is missing, or does not fit.
        """
        return None if cls.head is None else replace(cls.head, outputs=read_labels(keys))

    def load_model(self, session: InferenceSession) -> Model:
        """Builds, compiles and loads the graph.

        Args:
            session: The session that runs it.

        Raises:
            UserError: config.json does not fit the architecture.
            WeightsError: The weights do not.
        """
        keys = self.keys_of(self.huggingface_config)
        config, device = self.read_config(keys), DeviceRef.from_device(self.devices[0])
        encoder = Encoder(config, self.dtype, device, self.max_seq_len)
        encoder.use_subgraphs = self.pipeline_config.model_config.use_subgraphs
        head_config = self.read_head(keys)
        files = SentenceFiles(steps=())
        head: SentenceHead | ClassifierHead | None = None
        if head_config is not None:
            head = ClassifierHead(config, head_config, self.dtype, device)
        elif self.pipeline_config.pool_embeddings:
            files = read_sentence_files(self.pipeline_config.model_config.huggingface_model_repo)
            head = SentenceHead(files.steps, self.dtype, device)
        self.gives_rows_of_tokens = head is None
        model = _EncoderWithHead(encoder, head)
        self._load_weights(model, config, files)
        # tokens, positions, token types
        types = [TensorType(DType.int64, ["total_seq_len"], device)] * 3
        types.append(TensorType(DType.uint32, ["bounds"], device))
        with Graph("encoder", input_types=types) as graph:
            graph.output(model(*(value.tensor for value in graph.inputs)))
        return session.load(graph, weights_registry=model.state_dict())

    def _load_weights(
        self, model: _EncoderWithHead, config: EncoderConfig, files: SentenceFiles
    ) -> None:
        """Loads the checkpoint's weights, and those of the modules after the encoder."""
        state_dict = self.renamed_weights(
            dict(self.weights.items()), self.weight_names.from_safetensors
        )
        # a longer checkpoint would lose layers in silence
        stored = {name.split(".")[1] for name in state_dict if name.startswith("layers.")}
        if len(stored) != config.num_layers:
            raise WeightsError(
                f"config.json says {config.num_layers} layers, the weight files have the weights "
                f"of {len(stored)} layers"
            )
        own = {
            name if name.startswith("head.") else f"encoder.{name}": value
            for name, value in state_dict.items()
        } | {f"head.{name}": value for name, value in files.weights.items()}
        expected = model.raw_state_dict()
        # a checkpoint may have the head of another task
        values = {
            name: value.cast_at_load(self.dtype)
            for name, value in own.items()
            if name in expected or not name.startswith("head.")
        }
        try:
            model.load_state_dict(values)
        except (KeyError, ValueError) as error:
            raise WeightsError(str(error)) from error

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Runs a batch.

        Args:
            model_inputs: Made by `prepare_initial_token_inputs`.

        Returns:
            ``logits`` has the vectors or scores, float32 ``[batch, size]``; without pooling the hidden states
            ``[total, hidden_size]``, and ``logit_offsets`` where each text begins.

        Raises:
            TypeError: They are another model's inputs.
        """
        inputs = self.own_inputs(model_inputs, EncoderInputs)
        (vectors,) = self.model.execute(
            inputs.tokens, inputs.positions, inputs.token_types, inputs.input_row_offsets
        )
        offsets = inputs.input_row_offsets if self.gives_rows_of_tokens else None
        return ModelOutputs(vectors, logit_offsets=offsets)

    def prepare_initial_token_inputs(
        self,
        context_batch: Sequence[EmbeddingsContext],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int = 1,
    ) -> EncoderInputs:
        """The inputs of a batch.

        Args:
            context_batch: The requests.
            kv_cache_inputs: Unused: encoders have no cache.
            return_n_logits: Unused.

        Raises:
            ValueError: The batch is empty, or a text has no tokens or more than the model reads.
        """
        if not context_batch:
            raise ValueError(f"{type(self).__name__}: a batch needs requests")
        parts = [np.asarray(c.tokens[: c.active_length], np.int64) for c in context_batch]
        for context, tokens in zip(context_batch, parts, strict=True):
            if not 0 < len(tokens) <= self.max_seq_len:
                raise ValueError(
                    f"request {context.request_id} has {len(tokens)} tokens; expected 1 to "
                    f"{self.max_seq_len}"
                )
        types = [
            _token_types(context, len(p)) for context, p in zip(context_batch, parts, strict=True)
        ]
        lengths = [len(tokens) for tokens in parts]
        return EncoderInputs(
            self.on_device(np.concatenate(parts)),
            # positions begin anew in each text
            self.on_device(np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])),
            self.on_device(np.concatenate(types)),
            self.on_device(np.cumsum([0, *lengths], dtype=np.uint32)),  # [texts + 1]
        )

    def prepare_next_token_inputs(
        self, next_tokens: Tensor, prev_model_inputs: ModelInputs
    ) -> ModelInputs:
        """Not supported: an encoder runs one step.

        Args:
            next_tokens: Unused.
            prev_model_inputs: Unused.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no tokens: it runs one step")

    @classmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """The configured ``max_length``; by default what sentence-transformers' files say, else the model's longest.

        Args:
            pipeline_config: The configuration of the pipeline.
            huggingface_config: The model's config.json.

        Raises:
            ConfigError: ``max_length`` is longer than the model supports.
        """
        longest = cls.read_config(cls.keys_of(huggingface_config)).max_length
        if pipeline_config.max_length is None:
            repo = pipeline_config.model_config.huggingface_model_repo
            return min(longest, read_sentence_files(repo).max_length or longest)
        if pipeline_config.max_length > longest:
            raise ConfigError(
                f"max_length {pipeline_config.max_length} is more than the {longest} tokens that "
                "the model supports",
                "Give a smaller --max-length.",
            )
        return pipeline_config.max_length

    @classmethod
    def infer_optimal_batch_size(
        cls,
        pipeline_config: PipelineConfig,
        available_cache_memory: int,
        huggingface_config: HuggingFaceConfig,
        devices: list[Device],
        kv_cache_config: KVCacheConfig,
        cache_dtype: DType,
    ) -> int:
        """The most texts of an execution; their tokens are bounded by ``prefill_chunk_size``.

        Args:
            pipeline_config: The configuration of the pipeline.
            available_cache_memory: Unused: there is no cache.
            huggingface_config: The model's config.json.
            devices: Where the model runs.
            kv_cache_config: Unused.
            cache_dtype: Unused.
        """
        return MOST_TEXTS


def to_host(tensor: Tensor) -> Any:
    """A tensor's values as an array."""
    return tensor.to(CPU()).to_numpy()


def _token_types(context: EmbeddingsContext, count: int) -> Any:
    types = getattr(context, "token_types", None)
    return np.zeros(count, np.int64) if types is None else types
