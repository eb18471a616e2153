"""Text from a model in three lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from max.interfaces import (
    PipelineTask,
    RequestID,
    SamplingParamsInput,
    TextGenerationContext,
    TextGenerationRequest,
)
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.generation.coroutines import run_async
from max.pipelines.generation.generation import Generation
from max.pipelines.registry.registry import PIPELINE_REGISTRY
from max.pipelines.sampling.defaults import sampling_params_for
from max.pipelines.tokenization.text_stream import GeneratedText
from max.pipelines.tokenization.tokenizer import TextTokenizer

__all__ = ["LLM"]


class LLM:
    """A model that continues text.

    The constructor loads and compiles the model. Several threads may call it at once:
    their prompts run in common batches.

    Args:
        pipeline_config: The configuration of the model.

    Raises:
        UserError: The configuration or the model's files do not fit.
    """

    def __init__(self, pipeline_config: PipelineConfig) -> None:
        if not isinstance(pipeline_config, PipelineConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"LLM: the argument is {pipeline_config!r}, expected a PipelineConfig, such as "
                "LLM(PipelineConfig(model_path=...))"
            )
        pipeline_config.resolve()
        self._config = pipeline_config
        tokenizer, pipeline = PIPELINE_REGISTRY.retrieve(
            pipeline_config, PipelineTask.TEXT_GENERATION
        )
        if not isinstance(tokenizer, TextTokenizer):
            raise TypeError(f"LLM: {type(tokenizer).__name__} is no TextTokenizer")
        self._tokenizer = tokenizer
        # a generation holds no reference to its pipeline
        self._pipeline = pipeline
        self._generation = Generation.of(pipeline)

    def generate(
        self,
        prompts: str | Sequence[str],
        max_new_tokens: int | None = 100,
        use_tqdm: bool = True,
        *,
        grammar: str | None = None,
    ) -> Sequence[str]:
        """Continues texts. No chat template is applied.

        The likeliest tokens are taken, unless the model's generation_config.json asks for sampling.

        Args:
            prompts: A text, or a list of texts.
            max_new_tokens: The most tokens to generate for each; None: until the text ends or the
                context is full.
            use_tqdm: Whether to show a progress bar on stderr.
            grammar: The grammar that each continuation matches, made by a function of
                ``max.pipelines.structured.grammar``, such as ``of_json_schema({...})``; None: any text.

        Returns:
            A continuation for each text, in their order.

        Raises:
            ValueError: There are no prompts, or one does not fit the model.
            RuntimeError: The model failed.
        """
        if isinstance(prompts, bytes | Mapping | Set) or not isinstance(prompts, Iterable):
            raise ValueError(
                f"LLM.generate: prompts is {prompts!r}; expected a text or a sequence of texts"
            )
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts:
            raise ValueError("LLM.generate: prompts is empty")
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"LLM.generate: a prompt is {text!r}; expected a text")
        if not isinstance(grammar, str | None):
            raise ValueError(
                f"LLM.generate: grammar is {grammar!r}; expected what a function of "
                "max.pipelines.structured.grammar returns, such as of_json_schema({...})"
            )
        contexts = run_async(self._contexts(texts, max_new_tokens, grammar))
        pieces = {
            context.request_id: GeneratedText(self._decode, context.eos_token_ids)
            for context in contexts
        }
        generated: dict[RequestID, str] = dict.fromkeys(pieces, "")
        with _Progress(len(contexts), use_tqdm) as progress:
            for output in self._generation.stream(contexts):
                text = pieces[output.request_id]
                generated[output.request_id] += text.push(output.tokens, output.final_status).text
                if output.is_done:
                    progress.update()
        return [generated[context.request_id] for context in contexts]

    async def _contexts(
        self, texts: list[str], max_new_tokens: int | None, grammar: str | None
    ) -> list[TextGenerationContext]:
        model = self._config.model_config
        sampling = SamplingParamsInput(max_new_tokens=max_new_tokens)
        contexts = [
            await self._tokenizer.new_context(
                TextGenerationRequest(
                    request_id=RequestID(),
                    model_name=model.model_name,
                    prompt=text,
                    sampling_params=sampling_params_for(sampling, model.sampling_params_defaults),
                )
            )
            for text in texts
        ]
        for context in contexts:
            context.grammar = grammar
        return [*contexts]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode_now(tokens, skip_special_tokens=True)


class _Progress:
    """A progress bar, or none."""

    def __init__(self, total: int, show: bool) -> None:
        self._total, self._show = total, show
        self._bar = None

    def __enter__(self) -> _Progress:
        if self._show:
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="prompt")
        return self

    def update(self) -> None:
        """Counts a finished prompt."""
        if self._bar is not None:
            self._bar.update(1)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()
