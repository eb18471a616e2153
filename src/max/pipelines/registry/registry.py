"""The architectures that pipelines can run, by the names in Hugging Face configs."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from max._host.garbage import rare_collections
from max._spelling import similar_names
from max.interfaces import Pipeline, PipelineTask, PipelineTokenizer
from max.pipelines import forms
from max.pipelines.architectures.index import GGUF_CLASSES, OWN_ARCHITECTURES
from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.checkpoints.huggingface_config import (
    HuggingFaceConfig,
    active_config,
    known_config,
)
from max.pipelines.checkpoints.model_types import family_and_task, other_kind
from max.pipelines.config.enums import SpeculativeMethod
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import ConfigError, UserError
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.registry.architecture import SupportedArchitecture
from max.pipelines.tokenization.hf_tokenizer import active_tokenizer, known_tokenizer

PipelineTypes: TypeAlias = Pipeline[Any, Any]

PIPELINES = {
    PipelineTask.TEXT_GENERATION: "max.pipelines.generation.text_generation:TextGenerationPipeline",
    PipelineTask.EMBEDDINGS_GENERATION: "max.pipelines.encoders.embeddings_pipeline:EmbeddingsPipeline",
}
"""The pipeline of each task as ``module:class``, imported when a pipeline is made."""
WITH_DRAFT_MODEL = (
    "max.pipelines.generation.speculative_decoding:SpeculativeDecodingTextGenerationPipeline"
)
"""The pipeline of text if another model drafts it."""


class PipelineRegistry:
    """Architectures by name, with a cache of the models' configs.

    Args:
        architectures: The initial architectures.
    """

    def __init__(self, architectures: list[SupportedArchitecture]) -> None:
        self.architectures: dict[str, SupportedArchitecture] = {}
        self._embedders: dict[str, SupportedArchitecture] = {}
        self._own_loaded: set[str] = set()
        # a module counts as loaded before its architectures are registered, and several models may load at once
        self._loading = threading.RLock()
        self._gguf_forms: list[GGUFForm] = []
        self._own_gguf_forms: list[GGUFForm] = []
        for architecture in architectures:
            self.register(architecture, allow_override=True)

    def load_own(self, names: Iterable[str] | None = None) -> None:
        """Registers architectures of this package that are not registered yet.

        Args:
            names: Their names; others are ignored. By default all.
        """
        requested_names = None if names is None else {*names}
        with self._loading:
            for module, own_names in OWN_ARCHITECTURES.items():
                if module in self._own_loaded or (
                    requested_names is not None and requested_names.isdisjoint(own_names)
                ):
                    continue
                self._load_module(module)

    def _load_module(self, module: str) -> None:
        """Registers the architectures of one module of this package."""
        self._own_loaded.add(module)
        own = importlib.import_module(f"max.pipelines.architectures.{module}").ARCHITECTURES
        for architecture in own:
            self._own_gguf_forms += _gguf_forms_of(architecture)
            # one that the user registered stays
            tables = self.architectures, self._embedders
            registered = [table.get(architecture.name) for table in tables]
            if all(other is None or other.task is not architecture.task for other in registered):
                self._register(architecture)

    def load_custom(self, modules: list[str]) -> None:
        """Registers the architectures of a user's modules.

        Args:
            modules: ``module``, ``folder:module``, or the path of a package's folder. Each has a list
                ``ARCHITECTURES``.

        Raises:
            ConfigError: A module cannot be imported, has no such list, or another module of its name is imported.
        """
        for entry in modules:
            folder, _, name = entry.rpartition(":")
            root = Path(folder).expanduser().resolve() if folder else None
            if root is None and Path(entry).expanduser().is_dir():
                package = Path(entry).expanduser().resolve()
                root, name = package.parent, package.name
            if root is not None and str(root) not in sys.path:
                sys.path.insert(0, str(root))
            try:
                module = importlib.import_module(name)
            except ImportError as error:
                raise ConfigError(
                    f"custom architecture {entry!r} cannot be imported: {error}",
                    "Give a module's name, or the folder that holds it as folder:module.",
                ) from error
            except Exception as error:
                error.add_note(f"raised while the custom architecture {entry!r} was imported")
                raise
            origin = getattr(module, "__file__", None)
            if root is not None and origin and not Path(origin).resolve().is_relative_to(root):
                raise ConfigError(
                    f"custom architecture {entry!r}: a module {name!r} is imported already, from {origin}",
                    "Rename the package, or run it in a process of its own.",
                )
            architectures = getattr(module, "ARCHITECTURES", None)
            if not isinstance(architectures, list):
                raise ConfigError(
                    f"custom architecture {entry!r} has no list ARCHITECTURES",
                    "Let the module define ARCHITECTURES = [SupportedArchitecture(...)].",
                )
            for number, architecture in enumerate(architectures):
                if not isinstance(architecture, SupportedArchitecture):
                    raise ConfigError(
                        f"custom architecture {entry!r}: item {number} of ARCHITECTURES is {architecture!r}",
                        "Let the module define ARCHITECTURES = [SupportedArchitecture(...)].",
                    )
                self.register(architecture, allow_override=True)

    def register(
        self, architecture: SupportedArchitecture, *, allow_override: bool = False
    ) -> None:
        """Adds an architecture.

        An architecture for embeddings may share its name with one for text; it is used for models with a modules.json.

        Args:
            architecture: The architecture.
            allow_override: Whether it may replace an architecture of the same name.

        Raises:
            ValueError: The name is registered, and ``allow_override`` is False.
        """
        forms.adapt_architecture(architecture)
        self._register(architecture, allow_override)
        # a class that is registered again has new forms
        others = [form for form in self._gguf_forms if form.class_name != architecture.name]
        self._gguf_forms = _gguf_forms_of(architecture) + others

    def _register(self, architecture: SupportedArchitecture, allow_override: bool = False) -> None:
        registered = self.architectures.get(architecture.name)
        # a class may serve both tasks: the model's files tell which
        if registered is not None and registered.task is not architecture.task:
            if architecture.task is PipelineTask.EMBEDDINGS_GENERATION:
                self._embedders[architecture.name] = architecture
                return
            if registered.task is PipelineTask.EMBEDDINGS_GENERATION:
                self._embedders[architecture.name] = registered
                registered = None
        if registered is not None and not allow_override:
            raise ValueError(
                f"an architecture named {architecture.name} is registered already; "
                "allow_override=True replaces it"
            )
        self.architectures[architecture.name] = architecture

    def reset(self) -> None:
        """Removes all architectures, and clears the caches of configs and tokenizers."""
        self.architectures.clear()
        self._embedders.clear()
        known_config.cache_clear()
        known_tokenizer.cache_clear()
        self._own_loaded.clear()
        self._gguf_forms.clear()
        self._own_gguf_forms.clear()

    def gguf_forms(self, name: str) -> list[GGUFForm]:
        """The forms with llama.cpp's name of an architecture, those of users first."""
        self.load_own(GGUF_CLASSES.get(name, ()))
        forms = (*self._gguf_forms, *self._own_gguf_forms)
        return [form for form in forms if form.name == name]

    def gguf_names(self) -> list[str]:
        """llama.cpp's names of all architectures that have a form."""
        return sorted({*GGUF_CLASSES, *(form.name for form in self._gguf_forms)})

    def gguf_classes(self) -> list[str]:
        """The classes of models that have a form in GGUF files."""
        own = (name for names in GGUF_CLASSES.values() for name in names)
        return sorted({*own, *(form.class_name for form in self._gguf_forms)})

    def get_active_huggingface_config(self, huggingface_repo: HuggingFaceRepo) -> HuggingFaceConfig:
        """The config.json of a model, read once.

        Args:
            huggingface_repo: The model.
        """
        return active_config(huggingface_repo)

    def get_active_tokenizer(self, huggingface_repo: HuggingFaceRepo) -> Any:
        """The tokenizer of a model, loaded once.

        Args:
            huggingface_repo: The model.
        """
        return active_tokenizer(huggingface_repo)

    def retrieve_architecture(
        self, huggingface_repo: HuggingFaceRepo
    ) -> SupportedArchitecture | None:
        """The architecture of a model; None if none fits.

        Args:
            huggingface_repo: The model.
        """
        names = self.get_active_huggingface_config(huggingface_repo).architectures
        self.load_own(names)
        candidates = self.architectures
        # sentence-transformers' file makes a model of text an embedder
        if self._embedders.keys() & {*names} and huggingface_repo.file_exists("modules.json"):
            candidates = {**candidates, **self._embedders}
        return next((candidates[name] for name in names if name in candidates), None)

    def architecture_of(
        self, pipeline_config: PipelineConfig, override: str | None = None
    ) -> SupportedArchitecture:
        """The architecture of a configuration's model.

        Args:
            pipeline_config: The configuration.
            override: The name of an architecture that replaces the model's.

        Raises:
            UserError: No architecture fits; the message has the nearest names.
        """
        self.load_custom(pipeline_config.custom_architectures)
        repo = pipeline_config.model_config.huggingface_model_repo
        config = self.get_active_huggingface_config(repo)
        if override is None:
            architecture, names = self.retrieve_architecture(repo), config.stated_architectures
        else:
            self.load_own([override])
            architecture, names = self.architectures.get(override), [override]
        if architecture is not None:
            return architecture
        model_type = config.get("model_type") if override is None else None
        kind = other_kind(model_type, names)
        if names:
            problem = f"architecture {', '.join(names)} is not supported"
        else:
            problem = "config.json names no architectures"
            problem += f"; its model_type is {model_type!r}" if model_type else ""
        if kind is not None:
            raise UserError(
                f"{repo.repo_id}: {problem}: it is {kind}",
                "Decoders and encoders of text run: `max list` shows their architectures.",
            )
        if not names:
            raise UserError(
                f"{repo.repo_id}: {problem}",
                f"{self._of_kind(str(model_type))} `max list` shows all.",
            )
        raise UserError(
            f"{repo.repo_id}: {problem}",
            f"{self._nearest_names(names)} `max list` shows all; docs/add-a-model.md says how to add one with "
            "--custom-architectures.",
        )

    def _for_task(self, name: str, task: PipelineTask) -> str:
        """A sentence that names what serves a task: the same architecture with other files, or other architectures."""
        if task is PipelineTask.EMBEDDINGS_GENERATION and name in self._embedders:
            return f"The folder of a {name} for embeddings has the modules.json of sentence-transformers."
        self.load_own()
        fitting = sorted(n for n, a in self.architectures.items() if a.task is task)
        return (
            f"Give a model of another architecture, such as {', '.join(fitting[:3])}: `max list` shows the "
            f"{len(fitting)} for {task.value}."
        )

    def _of_kind(self, model_type: str) -> str:
        """A sentence with what ``architectures`` of a config.json may say, by its ``model_type``."""
        own_names = [name for names in OWN_ARCHITECTURES.values() for name in names]
        stem = re.sub("[^a-z0-9]", "", model_type.lower())
        fitting = [
            name
            for name in sorted({*own_names, *self.architectures})
            if re.sub(r"(For[A-Z].*|LMHeadModel|Model)$|_", "", name).lower() == stem
        ]
        if not fitting:
            return (
                'Give it the name of the model\'s class, as "architectures": ["LlamaForCausalLM"].'
            )
        return (
            f'Give it "architectures": ["{fitting[0]}"]'
            + "".join(f', or ["{name}"]' for name in fitting[1:])
            + "."
        )

    def _nearest_names(self, names: list[str]) -> str:
        """A sentence with the supported architectures whose names are nearest, of the same kind first."""
        own_names = (name for names in OWN_ARCHITECTURES.values() for name in names)
        supported = sorted({*own_names, *self.architectures})
        nearest: list[str] = []
        for name in names:
            stem, kind = family_and_task(name)
            # the same task makes long names similar: families are compared
            of_task = {
                family_and_task(other)[0]: other for other in supported if other.endswith(kind)
            }
            nearest += [of_task[each] for each in similar_names(stem, of_task, count=3, cutoff=0.7)]
            if not of_task:
                nearest += similar_names(name, supported, count=3, cutoff=0.9)
        if not nearest:
            return f"{len(supported)} architectures are supported."
        return f"The nearest names are {', '.join(dict.fromkeys(nearest))}."

    def retrieve_pipeline_task(self, pipeline_config: PipelineConfig) -> PipelineTask:
        """The task of a configuration's model.

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
            override_architecture: The name of an architecture that replaces the model's.

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
            chat_template=pipeline_config.retrieve_chat_templates(),
            context_validators=architecture.context_validators,
        )

    def retrieve_factory(
        self,
        pipeline_config: PipelineConfig,
        task: PipelineTask = PipelineTask.TEXT_GENERATION,
        override_architecture: str | None = None,
    ) -> tuple[PipelineTokenizer[Any, Any, Any], Callable[[], PipelineTypes]]:
        """Makes the tokenizer, and a function that makes the pipeline (which is slow).

        Args:
            pipeline_config: The configuration.
            task: The pipeline's task.
            override_architecture: The name of an architecture that replaces the model's.

        Raises:
            ValueError: No architecture fits the model, or it is for another task.
        """
        architecture = self.architecture_of(pipeline_config, override_architecture)
        if architecture.task != task:
            raise UserError(
                f"{architecture.name} is for {architecture.task.value}, not for {task.value}",
                self._for_task(architecture.name, task),
            )
        pipeline_class = architecture.pipeline_cls or get_pipeline_for_task(task, pipeline_config)
        tokenizer = self.retrieve_tokenizer(pipeline_config, override_architecture)

        @rare_collections(keep=True)
        def factory() -> PipelineTypes:
            """Makes the pipeline, with its model loaded."""
            return pipeline_class(
                pipeline_config=pipeline_config,
                pipeline_model=architecture.pipeline_model,
                eos_token_id=tokenizer.eos,
                weight_adapters=architecture.weight_adapters,
                tokenizer=tokenizer,
            )

        return tokenizer, factory

    @rare_collections(keep=True)
    def retrieve(
        self,
        pipeline_config: PipelineConfig,
        task: PipelineTask = PipelineTask.TEXT_GENERATION,
        override_architecture: str | None = None,
    ) -> tuple[PipelineTokenizer[Any, Any, Any], PipelineTypes]:
        """Makes the tokenizer and the pipeline; loads and compiles the model.

        Args:
            pipeline_config: The configuration.
            task: The pipeline's task.
            override_architecture: The name of an architecture that replaces the model's.

        Raises:
            ValueError: No architecture fits the model, or it is for another task.
        """
        tokenizer, factory = self.retrieve_factory(pipeline_config, task, override_architecture)
        return tokenizer, factory()


def _gguf_forms_of(architecture: SupportedArchitecture) -> list[GGUFForm]:
    """The forms that an architecture declares; those of the class that a user's class derives from are not its own."""
    forms: tuple[GGUFForm, ...] = getattr(architecture.pipeline_model, "gguf", ())
    return [form for form in forms if form.class_name == architecture.name]


def get_pipeline_for_task(task: PipelineTask, pipeline_config: PipelineConfig) -> type[Any]:
    """The class of the pipelines of a task.

    Args:
        task: The pipeline's task.
        pipeline_config: The configuration.

    Raises:
        ValueError: No pipeline does the task.
    """
    if task not in PIPELINES:
        raise ValueError(f"there is no pipeline for {task.value} yet; text_generation is one")
    path = PIPELINES[task]
    by_model = pipeline_config.speculative_method is SpeculativeMethod.standalone
    if task is PipelineTask.TEXT_GENERATION and by_model:
        path = WITH_DRAFT_MODEL
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


PIPELINE_REGISTRY = PipelineRegistry([])
"""The registry that pipelines are made from."""
