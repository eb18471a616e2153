"""The configuration of a pipeline of speech."""

from __future__ import annotations

from enum import Enum
from typing import Any

from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import ConfigError


class PrependPromptSpeechTokens(str, Enum):
    """When the audio decoder receives the speech tokens of the voice."""

    NEVER = "never"
    """Never."""
    ONCE = "once"
    """With the first block."""
    ROLLING = "rolling"
    """With the first block, and with later blocks while the buffer needs them."""


class PrometheusMetricsMode(str, Enum):
    """How metrics are served."""

    INSTRUMENT_ONLY = "instrument_only"
    """Counted; the application serves them."""
    LAUNCH_SERVER = "launch_server"
    """Served by a separate server."""
    LAUNCH_MULTIPROC_SERVER = "launch_multiproc_server"
    """Served by a separate server that collects them from several processes."""


class AudioGenerationConfig(PipelineConfig):
    """The configuration of a pipeline of speech.

    Args:
        audio_decoder: The architecture of the audio decoder.
        audio_decoder_weights: Its weight file.
        chunk_size: The sizes of the chunks to stream.
        buffer: The number of earlier speech tokens in each step of the decoder.
        block_causal: Whether earlier tokens attend to tokens of the current block.
        prepend_prompt_speech_tokens: When the decoder receives the voice's tokens.
        prepend_prompt_speech_tokens_causal: Whether they attend to the current block.
        run_model_test_mode: Whether the model runs as in tests.
        prometheus_metrics_mode: How metrics are served.
        kwargs: Fields of :class:`PipelineConfig`.
    """

    audio_decoder: str = ""
    audio_decoder_weights: str = ""
    chunk_size: list[int] | None = None
    buffer: int = 0
    block_causal: bool = False
    prepend_prompt_speech_tokens: PrependPromptSpeechTokens = PrependPromptSpeechTokens.ONCE
    prepend_prompt_speech_tokens_causal: bool = False
    prometheus_metrics_mode: PrometheusMetricsMode = PrometheusMetricsMode.INSTRUMENT_ONLY
    audio_decoder_config: dict[str, Any]

    def __init__(
        self,
        audio_decoder: str,
        audio_decoder_weights: str = "",
        chunk_size: list[int] | None = None,
        buffer: int = 0,
        block_causal: bool = False,
        prepend_prompt_speech_tokens: PrependPromptSpeechTokens = PrependPromptSpeechTokens.NEVER,
        prepend_prompt_speech_tokens_causal: bool = False,
        run_model_test_mode: bool = False,
        prometheus_metrics_mode: PrometheusMetricsMode = PrometheusMetricsMode.INSTRUMENT_ONLY,
        **kwargs: object,
    ) -> None:
        self.audio_decoder = audio_decoder
        self.audio_decoder_weights = audio_decoder_weights
        self.chunk_size = chunk_size
        self.buffer = buffer
        self.block_causal = block_causal
        self.prepend_prompt_speech_tokens = PrependPromptSpeechTokens(prepend_prompt_speech_tokens)
        self.prepend_prompt_speech_tokens_causal = prepend_prompt_speech_tokens_causal
        self.run_model_test_mode = run_model_test_mode
        self.prometheus_metrics_mode = PrometheusMetricsMode(prometheus_metrics_mode)
        self.audio_decoder_config = {}
        super().__init__(**kwargs)

    @classmethod
    def help(cls) -> dict[str, str]:
        """The fields and what they do."""
        own = {
            "audio_decoder": "The architecture of the audio decoder.",
            "audio_decoder_weights": "Its weight file.",
            "chunk_size": "The sizes of the chunks to stream.",
            "buffer": "The number of earlier speech tokens in each step of the decoder.",
            "block_causal": "Earlier tokens attend to tokens of the current block.",
            "prepend_prompt_speech_tokens": "When the decoder receives the voice's tokens.",
            "prepend_prompt_speech_tokens_causal": "They attend to the current block.",
            "prometheus_metrics_mode": "How metrics are served.",
        }
        return {**own, **super().help()}

    @classmethod
    def from_flags(
        cls, audio_flags: dict[str, str], **config_flags: object
    ) -> AudioGenerationConfig:
        """Makes a configuration from flags.

        Args:
            audio_flags: Flags of the audio decoder, as strings.
            config_flags: Fields of :class:`PipelineConfig`.

        Raises:
            ConfigError: A flag is unknown, or a value does not fit.
        """
        flags = dict(audio_flags)
        decoder = flags.pop("audio_decoder", "")
        if not decoder:
            raise ConfigError("no audio decoder is given", "Give audio_decoder.")

        def boolean(name: str) -> bool:
            text = flags.pop(name, "false").lower()
            if text not in ("true", "false"):
                raise ConfigError(f"{name} is {text!r}", "It must be true or false.")
            return text == "true"

        def integers(text: str) -> list[int] | None:
            return [int(part) for part in text.split(",")] if text else None

        config = cls(
            audio_decoder=decoder,
            audio_decoder_weights=flags.pop("audio_decoder_weights", ""),
            chunk_size=integers(flags.pop("chunk_size", "")),
            buffer=int(flags.pop("buffer", "0")),
            block_causal=boolean("block_causal"),
            prepend_prompt_speech_tokens=PrependPromptSpeechTokens(
                flags.pop("prepend_prompt_speech_tokens", "once")
            ),
            prepend_prompt_speech_tokens_causal=boolean("prepend_prompt_speech_tokens_causal"),
            run_model_test_mode=boolean("run_model_test_mode"),
            prometheus_metrics_mode=PrometheusMetricsMode(
                flags.pop("prometheus_metrics_mode", "instrument_only")
            ),
            **config_flags,
        )
        config.audio_decoder_config = dict(flags)
        return config
