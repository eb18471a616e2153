"""The configuration of a pipeline."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from max._host.machine import available_memory
from max.graph.quantization import QuantizationEncoding
from max.pipelines import forms
from max.pipelines.checkpoints.chat_templates import DEFAULT, read_template_file
from max.pipelines.config.draft_options import DRAFT_HELP, draft_model_of, draft_options_in
from max.pipelines.config.enums import OF_DRAFT_MODELS, PipelineRole, SpeculativeMethod
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.config.lora_config import LoRAConfig
from max.pipelines.config.model_config import (
    MAXModelConfig,
    ProfilingConfig,
    SamplingConfig,
)
from max.pipelines.config.options import (
    StrictConfig,
    converted_value,
    default_of,
    option,
    options_of,
    unknown_fields,
)
from max.pipelines.config.resolver import resolver
from max.pipelines.core.exceptions import ConfigError

if TYPE_CHECKING:
    from max.engine import InferenceSession

logger = logging.getLogger("max.pipelines")

_TTS = "it is for pipelines of speech"
_GPU = "it is for GPUs"

MOST_STEPS = 8
"""Tokens per request and execution when ``max_num_steps`` is left open."""


def _parse_template(value: object) -> Path | None:
    if value is None or isinstance(value, (str, Path)):
        return None if value is None else Path(value).expanduser()
    raise ConfigError(f"chat_template is {value!r}", "It must be the path of a template file.")


class Arguments(Protocol):
    """An object that holds options of a `PipelineConfig`."""

    options: dict[str, Any]


@dataclass(init=False)
class PipelineConfig(StrictConfig):
    """The configuration of a pipeline.

    Takes the fields of this class and of its parts, all as keywords::

        PipelineConfig(model_path="models/tiny-chat", max_length=1024, kv_cache_page_size=256)

    The parts are ``model_config`` (:class:`MAXModelConfig`), ``model_config.kv_cache_config``,
    ``sampling_config``, ``profiling_config`` and ``lora_config``. ``model`` is short for ``model_path``, ``devices``
    for ``device_specs``. Parts may be given as objects: ``kv_cache=KVCacheConfig(…)``.

    Args:
        kwargs: Fields and their values.

    Raises:
        ConfigError: A field is unknown, or a value does not fit; the message has the nearest name.
        ModelFilesError: The model is missing, or its files are broken.
    """

    max_length: int | None = option(
        "The longest sequence in tokens, prompt included. Not set: the longest that the model supports.",
        default=None,
    )
    max_batch_size: int | None = option(
        "The most requests that run at once. Not set: as many as the memory holds.", default=None
    )
    max_ce_batch_size: int = option(
        "The most prompts that are read in one step; never more than max_batch_size.", default=192
    )
    max_queue_size_tg: int | None = option(
        "The most requests that generate at once. Not set: max_batch_size.", default=None
    )
    min_batch_size_tg: int | None = option(
        "Read no prompts while this number of requests generates.", default=None, no_effect=_TTS
    )
    max_batch_context_length: int | None = option(
        "The most tokens of all requests of a batch together. Not set: no bound.",
        default=None,
    )
    max_num_steps: int = option(
        "Tokens per request and execution; -1: chosen by the time that a step takes.", default=-1
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
        "Compute the same bits of a request's logits in every batch, for all chunks of its prompt, and after "
        "its pages are evicted.",
        default=False,
    )
    enable_echo: bool = option(
        "Load one graph that gives log-probabilities of prompts; without it a second one when they are asked for.",
        default=False,
    )
    speculative_method: SpeculativeMethod | None = option(
        "How tokens are drafted, several of which one step verifies: ngram (by look-up in the request's own text and "
        "in recent answers), mtp (by layers of the checkpoint that predict further tokens), standalone (by "
        "--draft-model), eagle3 (by an EAGLE 3 head, which --draft-model names), none, or auto (ngram where the model "
        "can verify drafts, and mtp where there are such layers). "
        "Not set: standalone with a draft model; else auto in `max serve`, and none elsewhere.",
        default=None,
    )
    num_speculative_tokens: int = option(
        "The most drafted tokens of a request and step, with speculative_method.", default=8
    )
    chat_template: Path | None = option(
        "A file with a chat template that replaces the model's.",
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
        reason="one process reads prompts and generates",
    )
    pool_embeddings: bool = option(
        "Make one vector of a text; off: one per token.",
        default=True,
    )
    ep_size: int = option(
        "Devices that share a model's experts.", default=1, reason="models run on one device"
    )
    ce_delay_ms: float = option(
        "The delay before a step that reads prompts.", default=0.0, no_effect=_TTS
    )
    enable_prioritize_first_decode: bool = option(
        "Generate a first token directly after a prompt is read.", default=False, no_effect=_TTS
    )
    execute_empty_batches: bool = option(
        "Run the model without requests.", default=False, no_effect=_GPU
    )
    experimental_background_queue: bool = option(
        "Empty the queue of requests in a separate thread.",
        default=False,
        no_effect="the worker always reads requests in a thread of its own",
    )
    pdl_level: str = option("Overlap of kernel launches.", default="0", no_effect=_GPU)
    use_experimental_kernels: str = option(
        "Use experimental kernels.", default="false", no_effect="there are none"
    )
    use_vendor_blas: str = option(
        "Use the vendor's matrix library.",
        default="false",
        no_effect="all kernels are this engine's own",
    )
    zmq_endpoint_base: str = option(
        "The prefix of the socket names between a server's processes; random.",
        default_factory=lambda: f"ipc:///tmp/max-{secrets.token_hex(8)}",
    )
    _model_config: MAXModelConfig = field(default_factory=MAXModelConfig)
    _kv_cache_config: KVCacheConfig = field(default_factory=KVCacheConfig)
    _sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    _profiling_config: ProfilingConfig = field(default_factory=ProfilingConfig)
    _lora_config: LoRAConfig = field(default_factory=LoRAConfig)

    PARTS = {
        "_model_config": MAXModelConfig,
        "_kv_cache_config": KVCacheConfig,
        "_sampling_config": SamplingConfig,
        "_profiling_config": ProfilingConfig,
        "_lora_config": LoRAConfig,
    }
    ALIASES = {
        "model": "model_path",
        "devices": "device_specs",
        "draft_model": "draft_model_path",
        "draft_devices": "draft_device_specs",
    }

    def __init__(self, **kwargs: object) -> None:
        defer_resolve = kwargs.pop("defer_resolve", False)
        options = kwargs
        has_parts = any(isinstance(value, StrictConfig) for value in kwargs.values())
        if has_parts or not kwargs.keys() <= {*self.help(), *self.ALIASES}:
            options = forms.own_options(kwargs)
        values = {self.ALIASES.get(name, name): value for name, value in options.items()}
        own_options = options_of(PipelineConfig)
        self._draft_options = draft_options_in(values)
        for name, part in self.PARTS.items():
            part_values = {n: values.pop(n) for n in list(values) if n in options_of(part)}
            setattr(self, name, part.of(**part_values))
        if unknown := [name for name in values if name not in own_options]:
            raise unknown_fields(unknown, self.help(), "PipelineConfig")
        self._model_config.kv_cache_config = self._kv_cache_config
        # a class variable only to be no option
        self._model_config.pipeline_config = self  # pyright: ignore[reportAttributeAccessIssue]
        for name, f in own_options.items():
            value = values[name] if name in values else default_of(f)
            setattr(self, name, converted_value(PipelineConfig, name, value))
        self._draft_model_config = draft_model_of(self._draft_options, self._model_config)
        self._check_ranges()
        self._check_drafts()
        self._resolved = False
        self._finds_num_steps = False
        if self.model_config.model_path and not defer_resolve:
            self.resolve()

    def _check_ranges(self) -> None:
        """Raises ConfigError for numbers that are too small."""
        at_least_1 = (
            "max_length", "max_batch_size", "max_ce_batch_size", "prefill_chunk_size",
            "max_batch_context_length", "max_queue_size_tg", "num_speculative_tokens",
        )  # fmt: skip
        for name in at_least_1:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}", "It must be at least 1.")
        if self.max_num_steps != -1 and self.max_num_steps < 1:
            raise ConfigError(f"max_num_steps is {self.max_num_steps}", "It must be -1 or >= 1.")

    def _check_drafts(self) -> None:
        """Sets the open way of drafting; raises ConfigError if it does not fit the draft model."""
        method, model = self.speculative_method, self._draft_model_config
        if method in (None, SpeculativeMethod.auto) and model is not None:
            self.speculative_method = SpeculativeMethod.standalone
        elif method in OF_DRAFT_MODELS and model is None:
            assert method is not None
            raise ConfigError(
                f"speculative_method is {method.value!r}, and there is no draft model",
                "Give one with --draft-model.",
            )
        elif method not in OF_DRAFT_MODELS and model is not None:
            assert method is not None  # set above
            raise ConfigError(
                f"speculative_method is {method.value!r}, and {model.model_path} is to draft",
                "Leave out --speculative-method, or --draft-model.",
            )

    @classmethod
    def help(cls) -> dict[str, str]:
        """The fields of this class and its parts, and what they do."""
        entries = super().help()
        for part in cls.PARTS.values():
            entries |= part.help()
        return entries | DRAFT_HELP

    @property
    def parts(self) -> tuple[StrictConfig, ...]:
        """This configuration and its parts: all objects that hold options."""
        return (self, *(getattr(self, name) for name in self.PARTS))

    @property
    def model_config(self) -> MAXModelConfig:
        """The model."""
        return self._model_config

    @classmethod
    def from_args(cls, args: Arguments) -> Self:
        """A configuration of the options that an object holds.

        Args:
            args: The object.

        Raises:
            ConfigError: As for the class.
        """
        return cls(**args.options)

    @property
    def draft_model_config(self) -> MAXModelConfig | None:
        """The model that drafts tokens; None: there is none."""
        return self._draft_model_config

    @property
    def draft_options(self) -> dict[str, Any]:
        """The options of the model that drafts tokens that were given, by the names of `MAXModelConfig`."""
        return dict(self._draft_options)

    is_draft = False
    """Whether the model drafts the tokens of another one."""

    @property
    def drafts_tokens(self) -> bool:
        """Whether tokens are drafted."""
        return self.speculative_method not in (None, SpeculativeMethod.none)

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """The KV cache."""
        return self._kv_cache_config

    @property
    def sampling_config(self) -> SamplingConfig:
        """The options of the sampling graph."""
        return self._sampling_config

    @property
    def profiling_config(self) -> ProfilingConfig:
        """The options of profiling."""
        return self._profiling_config

    @property
    def lora_config(self) -> LoRAConfig | None:
        """The options of adapters; None: requests take none."""
        return self._lora_config if self._lora_config.enable_lora else None

    @property
    def finds_num_steps(self) -> bool:
        """Whether ``max_num_steps`` was not set: it is then a maximum, and slow steps lower it."""
        return self._finds_num_steps

    @property
    def graph_quantization_encoding(self) -> QuantizationEncoding | None:
        """The packed form of the graph's weights; None for a plain dtype."""
        return self.model_config.graph_quantization_encoding

    def resolve(self) -> None:
        """Sets the open values from the model, and checks the others against it.

        Sets the encoding, the devices, ``max_length``, ``max_batch_size`` and ``max_num_steps``.

        Raises:
            UserError: A value does not fit; the message states which, and the remedy.
        """
        if self._resolved:
            return
        for part in (*self.parts, *filter(None, [self._draft_model_config])):
            part.check_supported()
            for name, why in part.without_effect().items():
                logger.warning("%s has no effect: %s", name, why)
        # a request that gives the name could mean either
        name = self.model_config.model_name
        if name in self._lora_config.paths:
            raise ConfigError(
                f"lora_paths has the name {name!r}, which is the model's",
                "Give the adapter or the model (--served-model-name) another one.",
            )
        if self.custom_architectures:
            # the form of a GGUF file may be among them
            resolver().load_custom(self.custom_architectures)
        # report a missing model before the registry and its architectures are imported
        _ = self.model_config.huggingface_config
        self.model_config.warn_of_hub_options()
        resolver().resolve(self)
        if self.max_num_steps == -1:
            self.max_num_steps, self._finds_num_steps = MOST_STEPS, True
        self._resolved = True

    @property
    def step_tokens(self) -> int | None:
        """The most new tokens of a sequence in a step; None: all its tokens."""
        return self.prefill_chunk_size if self.enable_chunked_prefill else None

    def available_cache_memory(self) -> int:
        """Bytes for the KV cache of a copy of the model: its part of the available memory, minus the weights; 0 where
        these take it all.

        4 GiB on a machine that does not report its memory.
        """
        free = self.free_memory()
        if free is None:
            # where the system does not tell its memory
            return 4 << 30
        share = int(free * self.kv_cache_config.device_memory_utilization)
        weights, draft = self.model_config.weights_size(), self._draft_model_config
        if draft is not None:
            # what both models' weights leave is divided in proportion to them
            share = share * weights // (weights + draft.weights_size())
        return max(share - weights, 0) // self.model_config.data_parallel_degree

    def host_memory(self) -> int | None:
        """Bytes of host memory for the KV cache of a copy of the model and its swap area: available less the weights;
        None if unknown.
        """
        free = available_memory()
        if free is None:
            return None
        if self.model_config.devices[0].is_host_unified:
            free = max(free - self.model_config.weights_size(), 0)
        return free // self.model_config.data_parallel_degree

    def free_memory(self) -> int | None:
        """Bytes that programs can have on all devices, cached files that the system would drop included; None if
        unknown.

        Devices on the host's memory share it; a model takes as much of each other device as of the fullest.
        """
        devices = self.model_config.devices
        if devices[0].is_host_unified:
            return available_memory() or devices[0].stats.get("free_memory") or None
        # a model is split evenly, so the device with the least memory limits all
        return (
            len(devices) * min(device.stats.get("free_memory") or 0 for device in devices) or None
        )

    def retrieve_chat_template(self) -> str | None:
        """The text of the user's chat template; None without one.

        Raises:
            ConfigError: The file cannot be read.
        """
        templates = self.retrieve_chat_templates()
        return None if templates is None else templates[DEFAULT]

    def retrieve_chat_templates(self) -> dict[str, str] | None:
        """The user's chat templates by name, ``default`` among them; None without any.

        Raises:
            ConfigError: The file cannot be read, or is JSON without a template.
        """
        return None if self.chat_template is None else read_template_file(self.chat_template)

    def configure_session(self, session: InferenceSession) -> None:
        """Configures a session for this pipeline.

        Args:
            session: The session.
        """
        # sessions read the MAX_* flags; a pipeline has no further settings for them

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
        self.log_basic_config()
        name = resolver().architecture_of(self).name
        logger.info("    %-24s : %s", "architecture", name)
        for part in self.parts:
            for name in options_of(type(part)):
                logger.info("    %-24s : %s", name, getattr(part, name))
