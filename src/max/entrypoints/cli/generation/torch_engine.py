"""`max generate --engine torch`: a model of transformers, exported by torch and run as graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from max._lazy import lazy_module
from max.driver import CPU
from max.engine import InferenceSession
from max.entrypoints.cli.errors import CommandError
from max.entrypoints.cli.generation.runner import Runner
from max.importers.errors import ImportFailure
from max.interfaces import SamplingParams, TextGenerationContext, TextGenerationOutput
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.sampling.sampler import Sampler
from max.pipelines.tokenization.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from max.torch import causal_lm
else:
    # needs torch
    causal_lm = lazy_module("max.torch.causal_lm")

__all__ = ["TorchRunner"]

_TAKEN = {
    "model_path", "huggingface_model_revision", "trust_remote_code", "max_length", "max_batch_size",
    "quantization_encoding", "chat_template",
}  # fmt: skip
"""The options of a configuration that have an effect."""
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16"}
_MOST = 4096
"""The longest sequence unless ``--max-length`` says more."""
_STEP = 64
"""Lengths of caches are multiples of it, so that requests of similar lengths run the same kernels."""


class TorchRunner(Runner):
    """A model that `torch.export` takes, and one request at a time.

    Args:
        config: The configuration.
        params: The sampling parameters of requests.
        given_options: The names of the options that the user gave.

    Raises:
        click.UsageError: An option has no effect with this engine.
        CommandError: torch or transformers is not installed, or the model is none of text.
    """

    def __init__(
        self, config: PipelineConfig, params: SamplingParams, given_options: Iterable[str]
    ) -> None:
        for name in given_options:
            if name not in _TAKEN:
                raise click.UsageError(
                    f"--{name.replace('_', '-')} has no effect with --engine torch"
                )
        self.config, self.params, self._grammar = config, params, None
        self._adapter = ("", 1.0)
        model = config.model_config
        encoding = model.quantization_encoding
        if encoding is not None and encoding.value not in _DTYPES:
            raise click.UsageError(
                f"--quantization-encoding {encoding.value}: --engine torch takes {' or '.join(_DTYPES)}"
            )
        self._dtype = "auto" if encoding is None else _DTYPES[encoding.value]
        self._transformers = _transformers()
        longest = config.max_length or min(self._positions(), _MOST)
        self.tokenizer = TextTokenizer(
            model.model_path,
            revision=model.huggingface_model_revision,
            max_length=longest,
            trust_remote_code=model.trust_remote_code,
            pipeline_config=config,
            chat_template=config.retrieve_chat_templates(),
        )
        self._longest = longest
        self._length = 0

    def _positions(self) -> int:
        """The longest sequence of the model."""
        config = self._load_part(self._transformers.AutoConfig)
        return getattr(config.get_text_config(), "max_position_embeddings", None) or _MOST

    def _load_part(self, cls: Any, **options: Any) -> Any:
        model = self.config.model_config
        try:
            return cls.from_pretrained(
                model.model_path,
                revision=model.huggingface_model_revision or "main",
                trust_remote_code=model.trust_remote_code,
                **options,
            )
        except (ValueError, OSError, KeyError, ImportError) as error:
            raise CommandError(
                f"transformers cannot load {model.model_name}: {error}",
                "Give a causal language model that the installed version of transformers has.",
            ) from error

    def context(
        self, prompt: str | None = None, messages: list[Any] | None = None
    ) -> TextGenerationContext:
        """The initial state of a request."""
        context = super().context(prompt, messages)
        # the cache has one length, which the longest request so far needs
        self._length = max(self._length, context.max_length or self._longest)
        return context

    def load(self) -> None:
        """Exports and compiles the model, with a cache of the length that the requests made so far need."""
        model = self._load_part(self._transformers.AutoModelForCausalLM, dtype=self._dtype)
        length = min(-(-self._length // _STEP) * _STEP, max(self._longest, 2))
        session = InferenceSession()
        try:
            self.model = causal_lm.CausalLM(model, length, session)
        except ImportFailure as error:
            raise CommandError(
                str(error), "Models of `max list` run with --engine max, without torch."
            ) from error
        self._sampler = Sampler(session, CPU(), self.config.sampling_config)
        self.generation: Any = self

    def stream(self, contexts: list[TextGenerationContext]) -> Iterator[TextGenerationOutput]:
        """The tokens of a request, one by one.

        Args:
            contexts: The request alone.
        """
        (context,) = contexts
        self.model.reset()
        while not context.is_done:
            logits = self.model.forward(context.next_tokens.tolist())
            token = self._sampler.sample(logits, [context])
            context.update(int(token.to_numpy()[0]))
            yield context.to_generation_output()

    def forget(self) -> None:
        """Nothing is kept from one request to the next."""


def _transformers() -> Any:
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise CommandError(
            f"--engine torch needs torch and transformers: {error}",
            'Install them: pip install "supremum[torch]" transformers',
        ) from error
    # `max` shows what it does
    transformers.utils.logging.disable_progress_bar()
    return transformers
