"""The configuration of a pipeline."""

from __future__ import annotations

import logging
import secrets
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max.pipelines.core.exceptions import ConfigError, ModelFilesError, UserError
from max.pipelines.lib.base_config import (
    StrictConfig,
    converted,
    option,
    options_of,
    unknown_fields,
)
from max.pipelines.lib.config_enums import PipelineRole, RopeType, SupportedEncoding
from max.pipelines.lib.model_config import (
    PLAIN_FLOATS,
    KVCacheConfig,
    MAXModelConfig,
    ProfilingConfig,
    SamplingConfig,
)

if TYPE_CHECKING:
    from max.engine import InferenceSession
    from max.graph.quantization import QuantizationEncoding
    from max.pipelines.lib.registry import SupportedArchitecture

logger = logging.getLogger("max.pipelines")

_TTS = "it is for pipelines of speech"
_GPU = "it is for GPUs"

MOST_STEPS = 8
"""Tokens a request and execution, where their number is left open."""


def _parse_template(value: Any) -> Path | None:
    if value is None or isinstance(value, (str, Path)):
        return None if value is None else Path(value).expanduser()
    raise ConfigError(f"chat_template is {value!r}", "It must be the path of a template file.")


@dataclass(init=False)
class PipelineConfig(StrictConfig):
    """The configuration of a pipeline.

    Takes the fields of this class and of its parts, all as keywords::

        PipelineConfig(model_path="models/tiny-chat", max_length=1024, kv_cache_page_size=256)

    The parts are ``model_config`` (:class:`MAXModelConfig`), ``model_config.kv_cache_config``,
    ``sampling_config`` and ``profiling_config``. ``model`` is a short name of ``model_path``,
    ``devices`` one of ``device_specs``.

    Args:
        kwargs: Fields and their values.

    Raises:
        ConfigError: A field is unknown, or a value does not fit; the message has the nearest name.
        ModelFilesError: The model is missing, or its files are broken.
    """

    max_length: int | None = option(
        "The longest sequence in tokens, prompt included. Not set: what the model can do.",
        default=None,
    )
    max_batch_size: int | None = option(
        "How many requests run at once. Not set: found out from the memory.", default=None
    )
    max_ce_batch_size: int = option(
        "How many prompts are read in one step; never more than max_batch_size.", default=192
    )
    max_queue_size_tg: int | None = option(
        "How many requests generate at once; max_batch_size where it is not set.", default=None
    )
    min_batch_size_tg: int | None = option(
        "Read no prompts while so many requests generate.", default=None, no_effect=_TTS
    )
    max_batch_context_length: int | None = option(
        "The most tokens that the requests of a batch have together. Not set: no bound.",
        default=None,
    )
    max_num_steps: int = option(
        "Tokens a request and execution; -1: as many as take no longer than a moment.", default=-1
    )
    prefill_chunk_size: int = option(
        "The most tokens of prompts that are read in one step.", default=8192
    )
    enable_chunked_prefill: bool = option(
        "Read a long prompt in chunks of prefill_chunk_size.", default=True
    )
    enable_in_flight_batching: bool = option(
        "Read prompts and generate tokens in the same step.", default=False
    )
    batch_invariant: bool = option(
        "Compute each request's logits to the same bits whatever runs beside it, however its prompt is cut, and after its "
        "pages were taken.",
        default=False,
    )
    enable_echo: bool = option(
        "Let requests have the log-probabilities of their prompt.", default=False
    )
    chat_template: Path | None = option(
        "A file with a chat template to take instead of the model's own.",
        default=None,
        parse=_parse_template,
    )
    custom_architectures: list[str] = option(
        "Modules with architectures of your own, as module or folder:module; each has a list "
        "ARCHITECTURES.",
        default_factory=list,
    )
    force: bool = option(
        "Do not check the configuration against what the architecture needs.", default=False
    )
    pipeline_role: PipelineRole = option(
        "What the pipeline does: prefill_and_decode, prefill_only or decode_only.",
        default=PipelineRole.PrefillAndDecode,
        unsupported="one process reads prompts and generates",
    )
    pool_embeddings: bool = option(
        "Pool the embeddings of a text's tokens.",
        default=True,
        no_effect="there are no pipelines of embeddings",
    )
    ep_size: int = option(
        "Devices that share a model's experts.", default=1, unsupported="models run on one device"
    )
    ce_delay_ms: float = option(
        "Wait so long before a step that reads prompts.", default=0.0, no_effect=_TTS
    )
    enable_prioritize_first_decode: bool = option(
        "Generate a first token right after a prompt was read.", default=False, no_effect=_TTS
    )
    execute_empty_batches: bool = option(
        "Run the model when there are no requests.", default=False, no_effect=_GPU
    )
    experimental_background_queue: bool = option(
        "Empty the queue of requests in a thread of its own.",
        default=False,
        no_effect="there is no server yet",
    )
    pdl_level: str = option("Overlap of kernel launches.", default="0", no_effect=_GPU)
    use_experimental_kernels: str = option(
        "Use kernels that are being tried out.", default="false", no_effect="there are none"
    )
    use_vendor_blas: str = option(
        "Use the vendor's matrix library.",
        default="false",
        no_effect="all kernels are this engine's own",
    )
    zmq_endpoint_base: str = option(
        "Begins the names of the sockets between a server's processes; random.",
        default_factory=lambda: f"ipc:///tmp/max-{secrets.token_hex(8)}",
    )
    _model_config: MAXModelConfig = field(default_factory=MAXModelConfig)
    _kv_cache_config: KVCacheConfig = field(default_factory=KVCacheConfig)
    _sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    _profiling_config: ProfilingConfig = field(default_factory=ProfilingConfig)

    PARTS = {
        "_model_config": MAXModelConfig,
        "_kv_cache_config": KVCacheConfig,
        "_sampling_config": SamplingConfig,
        "_profiling_config": ProfilingConfig,
    }
    ALIASES = {"model": "model_path", "devices": "device_specs"}

    def __init__(self, **kwargs: Any) -> None:
        defer_resolve = kwargs.pop("defer_resolve", False)
        values = {self.ALIASES.get(name, name): value for name, value in kwargs.items()}
        own = options_of(PipelineConfig)
        for name, part in self.PARTS.items():
            mine = {n: values.pop(n) for n in list(values) if n in options_of(part)}
            setattr(self, name, part.of(**mine))
        if unknown := [name for name in values if name not in own]:
            raise unknown_fields(unknown, self.help(), "PipelineConfig")
        self._model_config.kv_cache_config = self._kv_cache_config
        for name, f in own.items():
            default = f.default_factory() if callable(f.default_factory) else f.default
            setattr(self, name, converted(PipelineConfig, name, values.get(name, default)))
        self._check_ranges()
        self._resolved = False
        self._finds_num_steps = False
        if self.model_config.model_path and not defer_resolve:
            self.resolve()

    def _check_ranges(self) -> None:
        at_least_1 = (
            "max_length", "max_batch_size", "max_ce_batch_size", "prefill_chunk_size",
            "max_batch_context_length", "max_queue_size_tg",
        )  # fmt: skip
        for name in at_least_1:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}", "It must be at least 1.")
        if self.max_num_steps != -1 and self.max_num_steps < 1:
            raise ConfigError(f"max_num_steps is {self.max_num_steps}", "It must be -1 or >= 1.")

    @classmethod
    def help(cls) -> dict[str, str]:
        """The fields of this class and its parts, and what they do."""
        entries = super().help()
        for part in cls.PARTS.values():
            entries |= part.help()
        return entries

    @property
    def model_config(self) -> MAXModelConfig:
        """The model."""
        return self._model_config

    @property
    def draft_model_config(self) -> MAXModelConfig | None:
        """The model that drafts tokens; None: there is none."""
        return None

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """The KV cache."""
        return self._kv_cache_config

    @property
    def sampling_config(self) -> SamplingConfig:
        """What the sampling graph must be able to do."""
        return self._sampling_config

    @property
    def profiling_config(self) -> ProfilingConfig:
        """What is measured."""
        return self._profiling_config

    @property
    def lora_config(self) -> None:
        """The adapters; None: adapters are not in use."""
        return None

    @property
    def finds_num_steps(self) -> bool:
        """Whether ``max_num_steps`` was left open: it is then the most, and less where steps take long."""
        return self._finds_num_steps

    @property
    def graph_quantization_encoding(self) -> QuantizationEncoding | None:
        """The packed form of the graph's weights; None for a plain dtype."""
        return self.model_config.graph_quantization_encoding

    def resolve(self) -> None:
        """Finds out what was left open, and checks what was given, against the model.

        Sets the encoding, the devices, ``max_length``, ``max_batch_size`` and ``max_num_steps``.

        Raises:
            UserError: Something does not fit; the message says what, and what to do.
        """
        if self._resolved:
            return
        from max.pipelines.lib.registry import PIPELINE_REGISTRY

        for part in (self, *(getattr(self, name) for name in self.PARTS)):
            part.check_supported()
            for name, why in part.without_effect().items():
                logger.warning("%s has no effect: %s", name, why)
        # a missing model is told before anything is imported for it
        _ = self.model_config.huggingface_config
        self.model_config.warn_of_hub_options()
        architecture = PIPELINE_REGISTRY.architecture_of(self)
        self.model_config.resolve_devices()
        self._resolve_encoding(architecture)
        self._resolve_arguments(architecture)
        shorten = self.max_length is None
        self._resolve_length(architecture)
        if shorten:
            self._fit_length(architecture)
        self._resolve_batch(architecture)
        if self.max_num_steps == -1:
            self.max_num_steps, self._finds_num_steps = MOST_STEPS, True
        self._resolved = True

    def _resolve_encoding(self, architecture: SupportedArchitecture) -> None:
        model = self.model_config
        stored = model.checkpoint_encoding()
        asked = model.quantization_encoding
        supported = architecture.supported_encodings
        encoding = asked or stored or architecture.default_encoding
        if asked is None and stored is not None and stored not in supported:
            encoding = stored  # named in the message below
        if encoding not in supported:
            raise ConfigError(
                f"{architecture.name} does not run with encoding {encoding.value}",
                f"It runs with {', '.join(e.value for e in supported)}.",
            )
        plain = {*PLAIN_FLOATS}
        if stored is not None and stored != encoding and not {stored, encoding} <= plain:
            raise ConfigError(
                f"the checkpoint stores {stored.value}, which cannot be converted to "
                f"{encoding.value}",
                f"Leave out --quantization-encoding, or give {stored.value}.",
            )
        model.quantization_encoding = encoding

    def _resolve_arguments(self, architecture: SupportedArchitecture) -> None:
        if self.force:
            return
        for name, value in architecture.required_arguments.items():
            for part in (self, *(getattr(self, each) for each in self.PARTS)):
                if hasattr(part, name) and getattr(part, name) != value:
                    logger.warning("%s needs %s to be %s", architecture.name, name, value)
                    setattr(part, name, value)
        rope_type = self.model_config.rope_type
        if rope_type not in (None, RopeType.none) and architecture.rope_type is RopeType.none:
            raise ConfigError(
                f"rope_type is {rope_type.value}, and {architecture.name} rotates nothing",
                "Leave out --rope-type.",
            )
        if len(self.model_config.devices) > 1 and not architecture.multi_gpu_supported:
            raise ConfigError(
                f"{architecture.name} runs on one device, and {len(self.model_config.devices)} "
                "are given",
                "Give one device with --devices.",
            )

    def _resolve_length(self, architecture: SupportedArchitecture) -> None:
        try:
            config = self.model_config.huggingface_config
            self.max_length = architecture.pipeline_model.calculate_max_seq_len(self, config)
        except UserError:
            raise
        except AttributeError as error:
            raise ModelFilesError(
                str(error), f"config.json must have what {architecture.name} needs."
            ) from error
        except ValueError as error:
            # an architecture's own words: about the length, or about its config.json
            if self.max_length is None:
                remedy = f"config.json must have what {architecture.name} needs."
                raise ModelFilesError(str(error), remedy) from error
            named = "" if "max_length" in str(error) else f"max_length {self.max_length}: "
            raise ConfigError(f"{named}{error}", "Give a smaller --max-length.") from error

    def _resolve_batch(self, architecture: SupportedArchitecture) -> None:
        if self.max_batch_size is None:
            model = self.model_config
            encoding = model.quantization_encoding
            assert isinstance(encoding, SupportedEncoding)
            self.max_batch_size = architecture.pipeline_model.infer_optimal_batch_size(
                self,
                self.available_cache_memory(),
                model.huggingface_config,
                model.devices,
                self.kv_cache_config,
                encoding.cache_dtype,
            )

    def _fit_length(self, architecture: SupportedArchitecture) -> None:
        """Shortens a ``max_length`` that nobody asked for to what the memory can hold."""
        from max.pipelines.lib.interfaces import KVCacheMixin

        pipeline_model, model = architecture.pipeline_model, self.model_config
        encoding = model.quantization_encoding
        if self.max_length is None or encoding is None:
            return
        if not issubclass(pipeline_model, KVCacheMixin):
            return
        needed = pipeline_model.estimate_kv_cache_size(
            self,
            sys.maxsize,
            model.devices,
            model.huggingface_config,
            self.kv_cache_config,
            encoding.cache_dtype,
        ) // (self.max_batch_size or 1)
        available = self.available_cache_memory()
        page = self.kv_cache_config.kv_cache_page_size
        pages = -(-self.max_length // page)
        fitting = available // max(needed // pages, 1)
        if fitting < pages and fitting >= 1:
            logger.warning(
                "the KV cache of one sequence of %d tokens does not fit into memory; max_length is "
                "%d (--max-length sets it)",
                self.max_length,
                fitting * page,
            )
            self.max_length = fitting * page

    def available_cache_memory(self) -> int:
        """Bytes for the KV cache: the share of the free memory, less the weights.

        On a machine that does not tell its free memory, 4 GiB.
        """
        free = self.model_config.devices[0].stats.get("free_memory")
        if not free:
            return 4 << 30
        share = int(free * self.kv_cache_config.device_memory_utilization)
        # the weights may be in the page cache, which counts as used, so they are not taken off twice
        return max(share - self.model_config.weights_size(), share // 4)

    def retrieve_chat_template(self) -> str | None:
        """The text of the chat template that was given; None where none was.

        Raises:
            ConfigError: The file cannot be read.
        """
        if self.chat_template is None:
            return None
        try:
            return self.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat template {self.chat_template} cannot be read: {error}",
                "Give the path of a template file with --chat-template.",
            ) from error

    def configure_session(self, session: InferenceSession) -> None:
        """Sets a session up for this pipeline.

        Args:
            session: The session.
        """
        # all that a session is told today comes from the registry of MAX_* flags

    def log_basic_config(self) -> None:
        """Logs the model and the limits, at level info."""
        model = self.model_config
        logger.info("Pipeline")
        for name, value in {
            "model": model.model_name,
            "encoding": model.quantization_encoding and model.quantization_encoding.value,
            "devices": ", ".join(f"{d.label}:{d.id}" for d in model.devices),
            "max_length": self.max_length,
            "max_batch_size": self.max_batch_size,
        }.items():
            logger.info("    %-24s : %s", name, value)

    def log_pipeline_info(self) -> None:
        """Logs the whole configuration, at level info.

        Raises:
            ValueError: No architecture fits the model.
        """
        from max.pipelines.lib.registry import PIPELINE_REGISTRY

        self.log_basic_config()
        logger.info("    %-24s : %s", "architecture", PIPELINE_REGISTRY.architecture_of(self).name)
        for part in (self, *(getattr(self, name) for name in self.PARTS)):
            for name in options_of(type(part)):
                logger.info("    %-24s : %s", name, getattr(part, name))


class PrependPromptSpeechTokens(str, Enum):
    """When the voice's speech tokens go to the audio decoder."""

    NEVER = "never"
    """Never."""
    ONCE = "once"
    """With the first block."""
    ROLLING = "rolling"
    """With the first block, and with later ones as far as the buffer needs them."""


class PrometheusMetricsMode(str, Enum):
    """How metrics are offered."""

    INSTRUMENT_ONLY = "instrument_only"
    """Counted; the application offers them."""
    LAUNCH_SERVER = "launch_server"
    """Offered by a server of their own."""
    LAUNCH_MULTIPROC_SERVER = "launch_multiproc_server"
    """Offered by a server that gathers them from several processes."""


class AudioGenerationConfig(PipelineConfig):
    """The configuration of a pipeline of speech.

    Args:
        audio_decoder: The architecture of the audio decoder.
        audio_decoder_weights: Its weight file.
        chunk_size: The sizes of the chunks to stream.
        buffer: Earlier speech tokens that go to the decoder with each step.
        block_causal: Whether earlier tokens attend to those of the current block.
        prepend_prompt_speech_tokens: When the voice's tokens go to the decoder.
        prepend_prompt_speech_tokens_causal: Whether they attend to the current block.
        run_model_test_mode: Run the model as tests do.
        prometheus_metrics_mode: How metrics are offered.
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
        **kwargs: Any,
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
            "buffer": "Earlier speech tokens that go to the decoder with each step.",
            "block_causal": "Earlier tokens attend to those of the current block.",
            "prepend_prompt_speech_tokens": "When the voice's tokens go to the decoder.",
            "prepend_prompt_speech_tokens_causal": "They attend to the current block.",
            "prometheus_metrics_mode": "How metrics are offered.",
        }
        return {**own, **super().help()}

    @classmethod
    def from_flags(cls, audio_flags: dict[str, str], **config_flags: Any) -> AudioGenerationConfig:
        """Makes a configuration out of flags.

        Args:
            audio_flags: Flags of the audio decoder, as texts.
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


__all__ = [
    "AudioGenerationConfig",
    "MAXModelConfig",
    "PipelineConfig",
    "PrependPromptSpeechTokens",
    "PrometheusMetricsMode",
]
