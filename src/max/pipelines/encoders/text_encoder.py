"""Vectors and scores of texts in three lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from max._spelling import did_you_mean
from max.interfaces import EmbeddingsGenerationInputs, PipelineTask
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import ConfigError, InputError
from max.pipelines.core.text import shortened_repr
from max.pipelines.encoders.context import EncoderTokenizer, TextEmbeddingContext
from max.pipelines.encoders.embeddings_pipeline import EmbeddingsPipeline
from max.pipelines.encoders.encoder_model import EncoderModel
from max.pipelines.encoders.sentence_files import read_scores_activation, read_sentence_files
from max.pipelines.registry.registry import PIPELINE_REGISTRY

__all__ = ["TextEncoder"]

Floats = npt.NDArray[np.float32]


class TextEncoder:
    """A model that makes a vector of a text, or scores a text for a query.

    ::

        encoder = TextEncoder(PipelineConfig(model_path="models/all-MiniLM-L6-v2"))
        vectors = encoder.encode(["a text", "another one"])          # [2, 384]
        scores = encoder.rank("a question", ["a text", "another one"])  # [2]

    The constructor loads and compiles the model.

    Args:
        pipeline_config: The configuration of the model.

    Raises:
        UserError: The configuration or the model's files do not fit.
    """

    def __init__(self, pipeline_config: PipelineConfig) -> None:
        pipeline_config.resolve()
        self._model_config = pipeline_config.model_config
        tokenizer, load = PIPELINE_REGISTRY.retrieve_factory(
            pipeline_config, PipelineTask.EMBEDDINGS_GENERATION
        )
        model = PIPELINE_REGISTRY.architecture_of(pipeline_config).pipeline_model
        if not isinstance(tokenizer, EncoderTokenizer):
            raise TypeError(
                f"TextEncoder: the tokenizer of {model.__name__} is {type(tokenizer).__name__}, expected TextTokenizer "
                "or EncoderTokenizer"
            )
        self._tokenizer = tokenizer
        self._files = read_sentence_files(self._model_config.huggingface_model_repo)
        keys = ConfigKeys(self._model_config.huggingface_config)
        # a model of another base makes vectors
        head = model.read_head(keys) if issubclass(model, EncoderModel) else None
        self.scores_per_text: int | None = None if head is None else head.outputs
        """The number of a ranker's scores; None: the model makes vectors."""
        self._activation = None if head is None else read_scores_activation(keys, head.outputs)
        pipeline: Any = load()
        assert isinstance(pipeline, EmbeddingsPipeline)
        self._pipeline = pipeline

    @property
    def prompt_names(self) -> list[str]:
        """The names of the model's prompts, which stand before a text, such as ``query``."""
        return list(self._files.prompts)

    def encode(
        self, texts: str | Sequence[str | Sequence[int]], prompt_name: str | None = None
    ) -> Floats | list[Floats]:
        """The vectors of texts.

        A text of more tokens than the model reads is cut off with a warning. The model's own
        sentence-transformers files say how hidden states are pooled and normalized; without them the mean is
        taken.

        Args:
            texts: A text, or a list of texts or of their tokens; tokens get no prompt, and are not cut off.
            prompt_name: The name of a prompt of the model, which is put before each text; by default the one
                that the model names, if it does.

        Returns:
            float32 ``[texts, size]``; with ``pool_embeddings=False`` a list of ``[tokens, size]``.

        Raises:
            InputError: There are no texts, or one is not UTF-8 or has no tokens.
            ConfigError: The model has no such prompt.
        """
        inputs = [texts] if isinstance(texts, str) else _sequence(texts, "texts")
        for text in inputs:
            if not isinstance(text, str):
                _sequence(text, "a text")
        prompt = self._prompt(prompt_name)
        rows = self._run([prompt + t if isinstance(t, str) else list(t) for t in inputs])
        # rows of tokens have two axes
        return np.stack(rows) if rows[0].ndim == 1 else rows

    def rank(self, query: str, texts: str | Sequence[str]) -> Floats:
        """The scores of texts for a query; greater is better.

        A ranker reads query and text together, and its config.json names the activation of its scores (a
        sigmoid by default). Of another model the score is the cosine of the vectors; its prompts ``query`` and
        ``document`` are used where it has them.

        Args:
            query: The query.
            texts: A text, or a list of texts.

        Returns:
            float32 ``[texts]``.

        Raises:
            InputError: There are no texts, or one is not UTF-8.
            ConfigError: The model gives several scores, or does not pool.
        """
        if not isinstance(query, str):
            raise InputError(
                f"the query is {shortened_repr(query)}, expected a text", "Give a text."
            )
        texts = [texts] if isinstance(texts, str) else _sequence(texts, "texts")
        for text in texts:
            if not isinstance(text, str):
                raise InputError(
                    f"a text is {shortened_repr(text)}, expected a text", "Give texts."
                )
        if self.scores_per_text is None:
            return self._cosines(query, texts)
        if self.scores_per_text != 1:
            raise ConfigError(
                f"the model gives {self.scores_per_text} scores per text, a ranker gives one",
                "Give a ranker, or a model that makes vectors.",
            )
        scores = np.stack(self._run([(query, text) for text in texts]))[:, 0]
        return activated_scores(scores, self._activation)

    def _cosines(self, query: str, texts: list[str]) -> Floats:
        """The cosines of the query's vector and each text's."""
        names = self._files.prompts
        vectors = [
            self.encode(side, prompt_name=name if name in names else None)
            for side, name in (([query], "query"), (texts, "document"))
        ]
        if not all(isinstance(side, np.ndarray) for side in vectors):
            raise ConfigError("texts cannot be ranked by vectors of tokens", "Leave pooling on.")
        query_vector, text_vectors = (np.asarray(side, np.float32) for side in vectors)
        # [texts]
        lengths = np.linalg.norm(query_vector, axis=1) * np.linalg.norm(text_vectors, axis=1)
        return (text_vectors @ query_vector[0]) / np.maximum(lengths, np.float32(1e-12))

    def _prompt(self, name: str | None) -> str:
        """The prompt of a name, the default prompt for None; empty if there is none."""
        files = self._files
        if name is None:
            name = files.default_prompt
            if name is None:
                return ""
        if name not in files.prompts:
            prompt_names = ", ".join(files.prompts) or "none"
            suggestion = did_you_mean(name, files.prompts)
            raise ConfigError(
                f"the model has no prompt {name!r}{suggestion}", f"It has {prompt_names}."
            )
        prompt = files.prompts[name]
        if prompt and not files.pools_prompts:
            raise ConfigError(
                f"the model does not pool the tokens of its prompt {name!r}, which is not supported",
                "Give the texts without a prompt.",
            )
        return prompt

    def _run(self, texts: Sequence[str | tuple[str, str] | list[int]]) -> list[Floats]:
        """The model's results, in the order of the texts."""
        if not texts:
            raise InputError("there are no texts", "Give at least one.")
        name = self._model_config.model_name
        of_texts = iter(
            self._tokenizer.contexts([t for t in texts if not isinstance(t, list)], name)
        )
        contexts = [
            TextEmbeddingContext(np.asarray(self._tokenizer.encode_now(text), np.int64), None, name)
            if isinstance(text, list)
            else next(of_texts)
            for text in texts
        ]
        for index, context in enumerate(contexts):
            if not context.active_length:
                raise InputError(f"text {index} has no tokens", "Give a text that is not empty.")
        batch = {context.request_id: context for context in contexts}
        outputs = self._pipeline.execute(EmbeddingsGenerationInputs([{**batch}]))
        return [
            np.asarray(outputs[context.request_id].embeddings, np.float32) for context in contexts
        ]


def _sequence(values: object, what: str) -> list[Any]:
    """The items of texts, or of the tokens of a text.

    Raises:
        InputError: They are no sequence of texts or numbers.
    """
    if isinstance(values, bytes | Mapping | Set) or not isinstance(values, Iterable):
        raise InputError(
            f"{what}: got {shortened_repr(values)}, expected a text or a list",
            "Give texts, or lists of their tokens.",
        )
    return list(values)


def activated_scores(scores: Floats, activation: str | None) -> Floats:
    """Scores after a ranker's activation.

    Args:
        scores: ``[texts]``.
        activation: As `read_scores_activation` names it.
    """
    if activation is None:
        return scores
    if activation == "sigmoid":
        # for large negative scores exp would overflow
        return (0.5 * (1 + np.tanh(0.5 * scores.astype(np.float64)))).astype(np.float32)
    if activation == "tanh":
        return np.tanh(scores)
    if activation == "relu":
        return np.maximum(scores, np.float32(0))
    raise ConfigError(
        f"a ranker with the activation {activation} is not supported",
        "Its config.json must name Sigmoid, Identity, Tanh or ReLU.",
    )
