"""The architectures that pipelines can run, by the names that Hugging Face configs give them."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from max.interfaces import Pipeline, PipelineTask, PipelineTokenizer
from max.pipelines.core.exceptions import ConfigError, UserError
from max.pipelines.lib.config_enums import RopeType, SupportedEncoding

if TYPE_CHECKING:
    from max.graph.weights import WeightData, WeightsFormat
    from max.nn.kv_cache.cache_params import KVCacheStrategy
    from max.pipelines.core import TextAndVisionContext, TextContext
    from max.pipelines.lib.config import PipelineConfig
    from max.pipelines.lib.hf_config import HuggingFaceConfig
    from max.pipelines.lib.hf_utils import HuggingFaceRepo
    from max.pipelines.lib.interfaces import PipelineModel

logger = logging.getLogger("max.pipelines")

PipelineTypes: TypeAlias = Pipeline[Any, Any]


@dataclass(frozen=False)
class SupportedArchitecture:
    """An architecture, with all that it takes to run a model of it.

    Args:
        name: The class's name in ``architectures`` of config.json, such as ``LlamaForCausalLM``.
        example_repo_ids: Models of this architecture on the Hugging Face hub.
        default_encoding: The encoding when neither the user nor the checkpoint says.
        supported_encodings: The encodings it runs with, and the cache strategies of each; the encodings alone, as later
            versions have them, are for the paged cache.
        pipeline_model: The model's class.
        task: What it makes.
        tokenizer: Makes its tokenizer.
        default_weights_format: The format whose names the model's weights have.
        rope_type: How it rotates queries and keys.
        weight_adapters: For each format a function that renames a checkpoint's weights.
        multi_gpu_supported: Whether it runs on several devices.
        required_arguments: Values that fields of the configuration must have.
        context_validators: Check each request before the model sees it.
        supports_empty_batches: Whether it can run with no requests.
        context_type: The class of its requests' state in later versions; not read: it is `TextContext`.
        config: The class of its form in later versions; not read: the model's class knows it.

    Names stand for members of enumerations too: ``"bfloat16"``, ``"paged"``, ``"normal"``.

    Raises:
        ValueError: One of these names is unknown.
    """

    name: str
    example_repo_ids: list[str]
    default_encoding: SupportedEncoding
    supported_encodings: dict[SupportedEncoding, list[KVCacheStrategy]]
    pipeline_model: type[PipelineModel[Any]]
    task: PipelineTask
    tokenizer: Callable[..., PipelineTokenizer[Any, Any, Any]]
    default_weights_format: WeightsFormat
    rope_type: RopeType = RopeType.none
    weight_adapters: dict[WeightsFormat, Callable[..., dict[str, WeightData]]] = field(
        default_factory=dict
    )
    multi_gpu_supported: bool = False
    required_arguments: dict[str, bool | int | float] = field(default_factory=dict)
    context_validators: list[Callable[[TextContext | TextAndVisionContext], None]] = field(
        default_factory=list
    )
    supports_empty_batches: bool = False
    context_type: type[Any] | None = None
    config: type[Any] | None = None

    def __post_init__(self) -> None:
        from max.nn.kv_cache.cache_params import KVCacheStrategy

        self.default_encoding = SupportedEncoding(self.default_encoding)
        self.rope_type = RopeType(self.rope_type)
        given: Any = self.supported_encodings
        if not isinstance(given, Mapping):
            given = {encoding: [KVCacheStrategy.PAGED] for encoding in sorted(given)}
        self.supported_encodings = {
            SupportedEncoding(encoding): [KVCacheStrategy(strategy) for strategy in strategies]
            for encoding, strategies in given.items()
        }

    @property
    def tokenizer_cls(self) -> type[PipelineTokenizer[Any, Any, Any]]:
        """The tokenizer's class, also where ``tokenizer`` is a ``functools.partial`` of it."""
        made = getattr(self.tokenizer, "func", self.tokenizer)
        if isinstance(made, type):
            return made
        raise TypeError(f"{self.name}: the tokenizer is {made!r}, not a class")


class PipelineRegistry:
    """Architectures by name, with a cache of the models' configs.

    Args:
        architectures: The architectures to begin with.
    """

    def __init__(self, architectures: list[SupportedArchitecture]) -> None:
        self.architectures = {architecture.name: architecture for architecture in architectures}
        self._configs: dict[Any, HuggingFaceConfig] = {}
        self._tokenizers: dict[Any, Any] = {}
        self._own_loaded = False

    def load_own(self) -> None:
        """Registers the architectures of this package, once."""
        if not self._own_loaded:
            self._own_loaded = True
            from max.pipelines.architectures import register_all_models

            register_all_models()

    def load_custom(self, modules: list[str]) -> None:
        """Registers the architectures of modules of the user's.

        Args:
            modules: ``module``, ``folder:module``, or the path of a package's folder. Each has a list
                ``ARCHITECTURES``.

        Raises:
            ConfigError: A module cannot be imported, or has no such list.
        """
        for entry in modules:
            folder, _, name = entry.rpartition(":")
            if not folder and Path(entry).expanduser().is_dir():
                package = Path(entry).expanduser().resolve()
                folder, name = str(package.parent), package.name
            if folder and (path := str(Path(folder).expanduser().resolve())) not in sys.path:
                sys.path.insert(0, path)
            try:
                module = importlib.import_module(name)
            except ImportError as error:
                raise ConfigError(
                    f"custom architecture {entry!r} cannot be imported: {error}",
                    "Give a module's name, or the folder that holds it as folder:module.",
                ) from error
            found = getattr(module, "ARCHITECTURES", None)
            if not isinstance(found, list):
                raise ConfigError(
                    f"custom architecture {entry!r} has no list ARCHITECTURES",
                    "Let the module define ARCHITECTURES = [SupportedArchitecture(...)].",
                )
            for architecture in found:
                self.register(architecture, allow_override=True)

    def register(
        self, architecture: SupportedArchitecture, *, allow_override: bool = False
    ) -> None:
        """Adds an architecture.

        Args:
            architecture: The architecture.
            allow_override: Whether it may replace one of the same name.

        Raises:
            ValueError: There is one of that name, and it may not be replaced.
        """
        if architecture.name in self.architectures and not allow_override:
            raise ValueError(
                f"an architecture named {architecture.name} is registered already; "
                "allow_override=True replaces it"
            )
        self.architectures[architecture.name] = architecture

    def reset(self) -> None:
        """Forgets all architectures and caches."""
        self.architectures.clear()
        self._configs.clear()
        self._tokenizers.clear()
        self._own_loaded = False

    def get_active_huggingface_config(self, huggingface_repo: HuggingFaceRepo) -> HuggingFaceConfig:
        """The config.json of a model, read once.

        Args:
            huggingface_repo: The model.
        """
        from max.pipelines.lib.hf_config import HuggingFaceConfig

        if huggingface_repo not in self._configs:
            self._configs[huggingface_repo] = HuggingFaceConfig.load(huggingface_repo)
        return self._configs[huggingface_repo]

    def get_active_tokenizer(self, huggingface_repo: HuggingFaceRepo) -> Any:
        """The tokenizer of a model, loaded once.

        Args:
            huggingface_repo: The model.
        """
        from max.pipelines.lib.hf_tokenizer import load_tokenizer

        if huggingface_repo not in self._tokenizers:
            self._tokenizers[huggingface_repo] = load_tokenizer(huggingface_repo)
        return self._tokenizers[huggingface_repo]

    def retrieve_architecture(
        self, huggingface_repo: HuggingFaceRepo
    ) -> SupportedArchitecture | None:
        """The architecture of a model; None where none fits.

        Args:
            huggingface_repo: The model.
        """
        self.load_own()
        names = self.get_active_huggingface_config(huggingface_repo).architectures
        return next((self.architectures[n] for n in names if n in self.architectures), None)

    def architecture_of(
        self, pipeline_config: PipelineConfig, override: str | None = None
    ) -> SupportedArchitecture:
        """The architecture of a configuration's model.

        Args:
            pipeline_config: The configuration.
            override: The name of an architecture to take instead.

        Raises:
            UserError: There is none; the message has those that there are.
        """
        self.load_own()
        self.load_custom(pipeline_config.custom_architectures)
        repo = pipeline_config.model_config.huggingface_model_repo
        if override is None:
            architecture = self.retrieve_architecture(repo)
            names = self.get_active_huggingface_config(repo).architectures
        else:
            architecture, names = self.architectures.get(override), [override]
        if architecture is None:
            raise UserError(
                f"{repo.repo_id}: architecture {', '.join(names)} is not supported"
                if names
                else f"{repo.repo_id}: config.json names no architectures",
                f"This release runs {', '.join(sorted(self.architectures))}; "
                "--custom-architectures adds your own.",
            )
        return architecture

    def retrieve_pipeline_task(self, pipeline_config: PipelineConfig) -> PipelineTask:
        """What the model of a configuration makes.

        Args:
            pipeline_config: The configuration.

        Raises:
            ValueError: No architecture fits the model.
        """
        return self.architecture_of(pipeline_config).task

    def retrieve_tokenizer(
        self, pipeline_config: PipelineConfig, override_architecture: str | None = None
    ) -> PipelineTokenizer[Any, Any, Any]:
        """Makes the tokenizer of a configuration's model.

        Args:
            pipeline_config: The configuration.
            override_architecture: The name of an architecture to take instead.

        Raises:
            ValueError: No architecture fits the model.
        """
        architecture = self.architecture_of(pipeline_config, override_architecture)
        model = pipeline_config.model_config
        return architecture.tokenizer(
            model_path=model.model_path,
            revision=model.huggingface_model_revision,
            max_length=pipeline_config.max_length,
            trust_remote_code=model.trust_remote_code,
            pipeline_config=pipeline_config,
            chat_template=pipeline_config.retrieve_chat_template(),
            context_validators=architecture.context_validators,
        )

    def retrieve_factory(
        self,
        pipeline_config: PipelineConfig,
        task: PipelineTask = PipelineTask.TEXT_GENERATION,
        override_architecture: str | None = None,
    ) -> tuple[PipelineTokenizer[Any, Any, Any], Callable[[], PipelineTypes]]:
        """Makes the tokenizer, and a function that makes the pipeline (which takes longer).

        Args:
            pipeline_config: The configuration.
            task: What the pipeline shall make.
            override_architecture: The name of an architecture to take instead.

        Raises:
            ValueError: No architecture fits the model, or it makes something else.
        """
        architecture = self.architecture_of(pipeline_config, override_architecture)
        if architecture.task != task:
            raise UserError(
                f"{architecture.name} is for {architecture.task.value}, not for {task.value}",
                "Give a model of an architecture for this task.",
            )
        pipeline_class = get_pipeline_for_task(task, pipeline_config)
        tokenizer = self.retrieve_tokenizer(pipeline_config, override_architecture)

        def factory() -> PipelineTypes:
            return pipeline_class(
                pipeline_config=pipeline_config,
                pipeline_model=architecture.pipeline_model,
                eos_token_id=tokenizer.eos,
                weight_adapters=architecture.weight_adapters,
                tokenizer=tokenizer,
            )

        return tokenizer, factory

    def retrieve(
        self,
        pipeline_config: PipelineConfig,
        task: PipelineTask = PipelineTask.TEXT_GENERATION,
        override_architecture: str | None = None,
    ) -> tuple[PipelineTokenizer[Any, Any, Any], PipelineTypes]:
        """Makes the tokenizer and the pipeline; loads and compiles the model.

        Args:
            pipeline_config: The configuration.
            task: What the pipeline shall make.
            override_architecture: The name of an architecture to take instead.

        Raises:
            ValueError: No architecture fits the model, or it makes something else.
        """
        tokenizer, factory = self.retrieve_factory(pipeline_config, task, override_architecture)
        return tokenizer, factory()


def get_pipeline_for_task(task: PipelineTask, pipeline_config: PipelineConfig) -> type[Any]:
    """The class of the pipelines of a task.

    Args:
        task: What the pipeline shall make.
        pipeline_config: The configuration.

    Raises:
        ValueError: There is no pipeline for it.
    """
    if task == PipelineTask.TEXT_GENERATION:
        from max.pipelines.lib.pipeline_variants.text_generation import TextGenerationPipeline

        return TextGenerationPipeline
    raise ValueError(f"there is no pipeline for {task.value} yet; text_generation is one")


PIPELINE_REGISTRY = PipelineRegistry([])
"""The registry that pipelines are made from."""
