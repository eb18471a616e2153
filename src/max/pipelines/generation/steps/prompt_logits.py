"""The model that also returns the logits of prompts, which is loaded when a request first asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from max._host.machine import byte_size
from max.interfaces import TextGenerationContext
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import UserError
from max.pipelines.models.pipeline_model import PipelineModel

__all__ = ["PromptLogits", "wants_prompt_logits"]


def wants_prompt_logits(context: TextGenerationContext) -> bool:
    """Whether the next step of a request returns log-probabilities of tokens of its prompt."""
    return bool(
        context.log_probabilities
        and getattr(context, "log_probabilities_echo", False)
        and context.is_initial_prompt
    )


class PromptLogits:
    """A second model of a pipeline, for the batches with such requests.

    All other batches run on the first model, whose output layer reads one token of each prompt. With ``enable_echo``
    the first model returns the logits of prompts too, and there is no second one.

    Args:
        config: The configuration, resolved.
        first: The pipeline's model.
        load: Loads the second model.
    """

    def __init__(
        self,
        config: PipelineConfig,
        first: PipelineModel[Any],
        load: Callable[[], PipelineModel[Any]],
    ) -> None:
        self._config, self._first, self._load = config, first, load
        self._lock = threading.Lock()
        self._model = first if config.enable_echo else None

    def load(self) -> PipelineModel[Any]:
        """The model; loaded once, by the first thread that asks for it, while batches may run on the other model.

        Raises:
            UserError: It does not fit into memory.
        """
        with self._lock:
            if self._model is None:
                self._check_memory()
                model = self._load()
                # their weights are in memory once
                model.share_adapters(self._first)
                self._model = model
            return self._model

    def model_of(
        self, batch: Sequence[TextGenerationContext], first: PipelineModel[Any]
    ) -> PipelineModel[Any]:
        """The model that runs a batch.

        Args:
            batch: The requests.
            first: The pipeline's model.
        """
        return self.load() if any(map(wants_prompt_logits, batch)) else first

    def _check_memory(self) -> None:
        """Refuses a load that could end the process: the graph may hold a packed copy of all weights."""
        free, size = self._config.free_memory(), self._config.model_config.weights_size()
        if free is not None and size > free:
            raise UserError(
                f"log-probabilities of prompts need a second graph, with weights of {byte_size(size)}, and "
                f"{byte_size(free)} are free",
                "Start with --enable-echo: one graph then serves all requests.",
            )
