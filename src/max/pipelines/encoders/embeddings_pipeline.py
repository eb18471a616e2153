"""The pipeline of embeddings: runs batches of texts on a model, one step each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from max.engine import InferenceSession
from max.graph.weights import WeightsFormat
from max.interfaces import (
    EmbeddingsContext,
    EmbeddingsGenerationInputs,
    EmbeddingsGenerationOutput,
    Pipeline,
    PipelineTokenizer,
    RequestID,
)
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import NotFiniteError
from max.pipelines.encoders.encoder_model import to_host
from max.pipelines.models.loading import load_model
from max.pipelines.models.pipeline_model import PipelineModel, WeightsAdapter

__all__ = ["EmbeddingsPipeline"]


@final
class EmbeddingsPipeline(Pipeline[EmbeddingsGenerationInputs, EmbeddingsGenerationOutput]):
    """Computes vectors of texts, or the scores of a classifier: loads and compiles the model, and runs it.

    Texts of any lengths share an execution: they are rows of one tensor, and nothing is padded. An execution
    has at most ``prefill_chunk_size`` tokens (a longer text has one of its own), and ``max_batch_size`` texts.

    Args:
        pipeline_config: The configuration, resolved.
        pipeline_model: The model's class.
        eos_token_id: Unused: nothing is generated.
        weight_adapters: For each format the function that renames a checkpoint's weights.
        tokenizer: Makes the contexts of requests.

    Raises:
        ValueError: The configuration has no encoding.
        UserError: The model's files do not fit the architecture.
    """

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        pipeline_model: type[PipelineModel[EmbeddingsContext]],
        eos_token_id: int,
        weight_adapters: dict[WeightsFormat, WeightsAdapter],
        tokenizer: PipelineTokenizer[Any, Any, Any],
    ) -> None:
        if pipeline_config.model_config.quantization_encoding is None:
            raise ValueError(
                "EmbeddingsPipeline: quantization_encoding is not set; resolve the config"
            )
        devices = pipeline_config.model_config.devices
        self._pipeline_config, self._tokenizer = pipeline_config, tokenizer
        self._session = InferenceSession(
            devices=devices, batch_invariant=pipeline_config.batch_invariant
        )
        pipeline_config.configure_session(self._session)
        self._model = load_model(
            pipeline_model, weight_adapters, pipeline_config, self._session, devices
        )

    @property
    def pipeline_config(self) -> PipelineConfig:
        """The configuration."""
        return self._pipeline_config

    @property
    def tokenizer(self) -> PipelineTokenizer[Any, Any, Any]:
        """The tokenizer."""
        return self._tokenizer

    def execute(
        self, inputs: EmbeddingsGenerationInputs
    ) -> dict[RequestID, EmbeddingsGenerationOutput]:
        """Runs a batch, in as many executions as the limits of the configuration need.

        Args:
            inputs: The requests.

        Returns:
            For each request its vector ``[size]``, float32; a vector per token ``[n, size]`` with
            ``pool_embeddings=False``.

        Raises:
            ValueError: A text has no tokens, or more than the model reads.
            NotFiniteError: A result is infinite or NaN.
        """
        outputs: dict[RequestID, EmbeddingsGenerationOutput] = {}
        batch = inputs.batch
        for part in self._parts(list(batch.items())):
            contexts = [context for _, context in part]
            model_inputs = self._model.prepare_initial_token_inputs(contexts)
            result = self._model.execute(model_inputs)
            # [texts, size], or [tokens, size] with offsets
            rows = to_host(result.logits)
            # a row for each token, cut into texts
            if result.logit_offsets is not None:
                bounds = to_host(result.logit_offsets).tolist()
                rows = [rows[bounds[i] : bounds[i + 1]] for i in range(len(part))]
            for (request_id, _), row in zip(part, rows, strict=True):
                if not np.isfinite(row).all():
                    raise NotFiniteError(f"the result of request {request_id} is not finite")
                outputs[request_id] = EmbeddingsGenerationOutput(row)
        return outputs

    def _parts(
        self, requests: Sequence[tuple[RequestID, EmbeddingsContext]]
    ) -> Iterator[list[tuple[RequestID, EmbeddingsContext]]]:
        """The requests of each execution."""
        budget = self._pipeline_config.prefill_chunk_size
        max_texts = self._pipeline_config.max_batch_size or 1
        part: list[tuple[RequestID, EmbeddingsContext]] = []
        tokens = 0
        for request in requests:
            length = request[1].active_length
            # a text beyond the budget runs alone
            if part and (tokens + length > budget or len(part) == max_texts):
                yield part
                part, tokens = [], 0
            part.append(request)
            tokens += length
        if part:
            yield part

    def release(self, request_id: RequestID) -> None:
        """Does nothing: a request holds nothing after its execution.

        Args:
            request_id: The request.
        """
