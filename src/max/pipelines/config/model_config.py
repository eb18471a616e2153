"""The parts of a pipeline's configuration: model, sampling, profiling; the KV cache is in `kv_cache_config`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from max._lazy import lazy_module
from max._spelling import did_you_mean
from max.driver import Device, DeviceSpec, load_devices, scan_available_devices
from max.dtype import DType
from max.graph.quantization import QuantizationEncoding
from max.graph.weights import Weights, WeightsFormat, first_parts, gguf_parts, load_weights
from max.graph.weights import weights_format as format_of_files
from max.interfaces import SamplingParamsGenerationConfigDefaults
from max.pipelines.checkpoints.composite_config import COMPOSITES, text_weight_name
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.encodings import QUANTIZED_KINDS, SupportedEncoding
from max.pipelines.checkpoints.hub import HuggingFaceRepo, RepoType, download_weight_files
from max.pipelines.checkpoints.huggingface_config import (
    HuggingFaceConfig,
    active_config,
    sampling_defaults,
)
from max.pipelines.checkpoints.model_files import read_json
from max.pipelines.checkpoints.weight_files import (
    ENTRY_READERS,
    bytes_of,
    encoding_of,
    encodings_in,
    read_gguf_entries,
)
from max.pipelines.config.enums import RopeType
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.config.options import StrictConfig, option, options_of
from max.pipelines.core.exceptions import ConfigError, ModelFilesError

if TYPE_CHECKING:
    from max.pipelines.checkpoints import quantized_formats
else:
    quantized_formats = lazy_module("max.pipelines.checkpoints.quantized_formats")

logger = logging.getLogger("max.pipelines")

PLAIN_FLOATS = (SupportedEncoding.float32, SupportedEncoding.float16, SupportedEncoding.bfloat16)
"""Encodings that convert into one another when a model is loaded."""

_NO_GPU = "GPUs are not supported yet"


def parse_devices(value: object) -> list[DeviceSpec]:
    """Parses devices as on the command line: ``cpu``, ``gpu``, ``gpu:0,1``, ``default``.

    Args:
        value: The text, or a ``DeviceSpec`` or a list of them.

    Returns:
        The devices; an empty list for the default.

    Raises:
        ConfigError: The value is none of these.
    """
    if isinstance(value, DeviceSpec):
        return [value]
    if isinstance(value, (list, tuple)):
        return [spec for item in value for spec in parse_devices(item)]
    if isinstance(value, str):
        kind, colon, ids = value.strip().lower().partition(":")
        # gpu:0,gpu:1 is gpu:0,1
        numbers = (
            [part.strip().removeprefix(f"{kind}:") for part in ids.split(",")] if colon else []
        )
        if kind == "default" and not colon:
            return []
        if kind == "cpu" and not colon:
            return [DeviceSpec.cpu()]
        make = {"cpu": DeviceSpec.cpu, "gpu": DeviceSpec.accelerator}.get(kind)
        if make is not None and all(number.isdecimal() for number in numbers):
            if len(set(numbers)) < len(numbers):
                raise ConfigError(f"devices {value!r} has a device twice", "Give each once.")
            return [make(int(number)) for number in numbers or ["0"]]
        suggestion = did_you_mean(kind, ["cpu", "gpu", "default"])
        raise ConfigError(
            f"devices {value!r} is not a device{suggestion}",
            "It must be cpu, gpu, gpu:0, gpu:0,1, or cpu:0,1 for virtual devices of the CPU.",
        )
    raise ConfigError(
        f"device_specs is {value!r}", "It must be a list of max.driver.DeviceSpec, or a text."
    )


@dataclass(kw_only=True)
class SamplingConfig(StrictConfig):
    """The options of the sampling graph."""

    in_dtype: Any = option(
        "The dtype of the logits; float32.", default=None, parse=lambda value: _dtype(value)
    )
    out_dtype: Any = option(
        "The dtype of returned logits; float32.", default=None, parse=lambda value: _dtype(value)
    )
    enable_structured_output: bool = option(
        "Constrain the text to a JSON schema if a request has one.",
        default=False,
        no_effect="a request's schema always applies",
    )
    enable_variable_logits: bool = option(
        "Return logits of more tokens than the last.",
        default=False,
        no_effect="enable_echo returns them",
    )
    enable_min_tokens: bool = option(
        "Forbid end-of-sequence tokens before a request's minimum.",
        default=False,
        no_effect="a request's minimum always applies",
    )
    enable_penalties: bool = option(
        "Apply frequency, presence and repetition penalties.",
        default=False,
        no_effect="a request's penalties always apply",
    )


def _dtype(value: object) -> DType:
    """The dtype of an option, float32 if it is None; raises ConfigError for unknown names."""
    if value is None:
        return DType.float32
    if isinstance(value, DType):
        return value
    try:
        return DType[str(value)]
    except KeyError:
        raise ConfigError(f"{value!r} is not a dtype", "It must be a max.dtype.DType.") from None


def _quantized_kind(value: object) -> str | None:
    """The kind of quantization, or None; raises ConfigError for unknown ones."""
    if value is None or value in QUANTIZED_KINDS:
        return value
    raise ConfigError(
        f"quantize is {value!r}, which does not fit{did_you_mean(str(value), list(QUANTIZED_KINDS))}",
        f"It must be one of {', '.join(QUANTIZED_KINDS)}.",
    )


def _format_to_load(repo: HuggingFaceRepo) -> WeightsFormat | None:
    """The format whose files are loaded, of those that a model has; None if it has no weight files."""
    formats = (WeightsFormat.safetensors, WeightsFormat.gguf, WeightsFormat.pytorch)
    return next((each for each in formats if repo.weight_files.get(each)), None)


@dataclass(kw_only=True)
class ProfilingConfig(StrictConfig):
    """The options of profiling."""

    gpu_profiling: str = option(
        "Marks for a GPU profiler: off, on or detailed.", default="off", no_effect=_NO_GPU
    )


@dataclass
class MAXModelConfigBase:
    """The base of an architecture's config: a dataclass without fields."""


@dataclass(kw_only=True)
class MAXModelConfig(StrictConfig):
    """The model: its files, its encoding, and its devices."""

    model_path: str = option(
        "A model folder in the Hugging Face layout, a GGUF file, or a name on the Hugging Face hub.",
        default="",
    )
    served_model_name: str | None = option(
        "The model's name for clients. Not set: the model's path.", default=None
    )
    weight_path: list[Path] = option(
        "Weight files that replace the model's: paths, or names within the model.",
        default_factory=list,
    )
    quantization_encoding: SupportedEncoding | None = option(
        "The encoding of the weights in computations. Not set: the checkpoint's. Checkpoints of "
        "float32, float16 or bfloat16 are converted.",
        default=None,
    )
    quantize: str | None = option(
        "Quantize the matrices of a float checkpoint when it is loaded: "
        + ", ".join(QUANTIZED_KINDS)
        + ".",
        default=None,
        parse=lambda value: _quantized_kind(value),
    )
    allow_safetensors_weights_fp32_bf6_bidirectional_cast: bool = option(
        "Allow weights to be converted between float32 and bfloat16.",
        default=False,
        no_effect="--quantization-encoding alone converts weights",
    )
    huggingface_model_revision: str = option(
        "The branch, tag or commit of a model on the hub.", default="main"
    )
    huggingface_weight_revision: str = option(
        "The branch, tag or commit of its weights.", default="main"
    )
    trust_remote_code: bool = option("Allow code of a model on the hub to run.", default=False)
    device_specs: Any = option(
        "Where the model runs: cpu, gpu, gpu:0,1; on virtual devices of the CPU with cpu:0,1.",
        default_factory=list,
        parse=parse_devices,
    )
    force_download: bool = option(
        "Download the weights of a model on the hub again, even if they are in the cache.",
        default=False,
    )
    rope_type: RopeType | None = option(
        "Which elements of queries and keys form a rotated pair: normal (neighbors) or neox (half a head "
        "apart). Not set: as in the format of the weights.",
        default=None,
    )
    use_subgraphs: bool = option("Stage equal layers once, as a subgraph.", default=True)
    data_parallel_degree: int = option(
        "Copies of the model that share the requests, each on a device of its own.", default=1
    )
    _kv_cache_config: KVCacheConfig = field(default_factory=KVCacheConfig)
    _known_ends: dict[Any, bool] = field(default_factory=dict)

    pipeline_config: ClassVar[Any] = None
    """The configuration that this is a part of; None: it stands alone."""

    @property
    def architecture_name(self) -> str | None:
        """The name of the model's class in config.json; None without one."""
        return next(iter(self.huggingface_config.architectures), None)

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """The options of the KV cache; the same object as the `PipelineConfig`'s."""
        return self._kv_cache_config

    @kv_cache_config.setter
    def kv_cache_config(self, config: KVCacheConfig) -> None:
        self._kv_cache_config = config

    @property
    def default_device_spec(self) -> DeviceSpec:
        """The first device of the configuration; without one, the first of the machine."""
        return (self.device_specs or scan_available_devices())[0]

    def warn_of_hub_options(self) -> None:
        """Warns of options for models on the hub if the model is a local path."""
        if self.huggingface_model_repo.repo_type == RepoType.online:
            return
        hub = ("huggingface_model_revision", "huggingface_weight_revision", "force_download")
        for name in hub:
            if getattr(self, name) != options_of(MAXModelConfig)[name].default:
                logger.warning("%s has no effect: %s is a local path", name, self.model_path)

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        return self.served_model_name or self.model_path

    @cached_property
    def huggingface_model_repo(self) -> HuggingFaceRepo:
        """The model's files.

        Raises:
            ConfigError: No model is given.
            ModelFilesError: The folder does not exist.
        """
        if not self.model_path:
            raise ConfigError(
                "no model is given", "Give --model with a model folder or a name on the hub."
            )
        return HuggingFaceRepo(
            self.model_path, self.huggingface_model_revision, self.trust_remote_code
        )

    @cached_property
    def huggingface_weight_repo(self) -> HuggingFaceRepo:
        """The files of the weights."""
        return HuggingFaceRepo(
            self.model_path, self.huggingface_weight_revision, self.trust_remote_code
        )

    @cached_property
    def huggingface_config(self) -> HuggingFaceConfig:
        """The model's config.json."""
        return active_config(self.huggingface_model_repo)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The object of the model's generation_config.json; empty without the file."""
        path = self.huggingface_model_repo.file("generation_config.json")
        return {} if path is None else read_json(path)

    @cached_property
    def sampling_params_defaults(self) -> SamplingParamsGenerationConfigDefaults:
        """The model's defaults of sampling parameters."""
        return sampling_defaults(self.generation_config, self._generation_config_file)

    @property
    def generation_keys(self) -> ConfigKeys:
        """The keys of the model's generation_config.json."""
        return ConfigKeys(self.generation_config, file=self._generation_config_file)

    @property
    def _generation_config_file(self) -> str:
        return str(Path(self.model_path) / "generation_config.json")

    @property
    def graph_quantization_encoding(self) -> QuantizationEncoding | None:
        """The packed form of the graph's weights; None for a plain dtype."""
        encoding = self.quantization_encoding
        return None if encoding is None else encoding.quantization_encoding

    def resolve_devices(self) -> None:
        """Sets ``device_specs`` to the CPU if it is empty, with a virtual device for each copy of the model."""
        if not self.device_specs:
            copies = self.data_parallel_degree
            ids = range(copies) if copies > 1 else [-1]
            self.device_specs = [DeviceSpec.cpu(i) for i in ids]

    @cached_property
    def devices(self) -> list[Device]:
        """Where the model runs.

        Raises:
            ConfigError: A device does not exist.
        """
        self.resolve_devices()
        try:
            devices = list(load_devices(self.device_specs))
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise ConfigError(str(error).splitlines()[0], "Give --devices cpu.") from error
        if devices[0].is_host and devices[0].id:
            raise ConfigError(
                f"the first device is cpu:{devices[0].id}; the inputs of a model are on cpu:0",
                "Give --devices cpu, or begin with cpu:0, as in cpu:0,1.",
            )
        return devices

    @property
    def replica_devices(self) -> list[list[Device]]:
        """The devices of each copy of the model.

        Raises:
            ConfigError: There are several copies, and another number of devices; or a device does not exist.
        """
        devices, copies = self.devices, self.data_parallel_degree
        if copies == 1:
            return [devices]
        if copies != len(devices):
            raise ConfigError(
                f"data_parallel_degree is {copies}, and the number of devices is {len(devices)}",
                "Give --devices with a device for each copy, as in cpu:0,1, or leave out --data-parallel-degree.",
            )
        return [[device] for device in devices]

    def checkpoint_encoding(self) -> SupportedEncoding | None:
        """The encoding of the checkpoint; None if it is unknown."""
        if self.weight_path:
            paths = self.weight_paths()
            if paths[0].suffix == ".gguf":
                return self._gguf_encoding(paths)
            read = ENTRY_READERS.get(paths[0].suffix.lower())
            return encoding_of([e for p in paths for e in read(p)]) if read is not None else None
        section = self.huggingface_config.quantization
        stated_dtype = self.huggingface_config.checkpoint_dtype
        if (
            section is not None
            and section.get("quant_method") in quantized_formats.CONVERTED_METHODS
        ):
            # blocks take the place of the weights, and the others are of the stated dtype
            plain = SupportedEncoding.of_dtype(stated_dtype) if stated_dtype else None
            return plain if plain in PLAIN_FLOATS else SupportedEncoding.bfloat16
        names = self._weight_names()
        repo = self.huggingface_weight_repo
        weights_format = _format_to_load(repo)
        if weights_format == WeightsFormat.gguf and repo.folder is not None:
            (name,) = names  # `_weight_names` gives one GGUF file
            # that of a model on the hub may not be on this machine yet
            if (repo.folder / name).is_file():
                return self._gguf_encoding([repo.folder / name])
        # of a model with files in several formats, or several GGUF files, only these are loaded
        stored = [] if weights_format is None else repo.encodings_of(weights_format, names)
        encoding = SupportedEncoding.of_dtype(stated_dtype) if stated_dtype else None
        return encoding if encoding in stored or not stored else stored[0]

    def _gguf_encoding(self, paths: list[Path]) -> SupportedEncoding | None:
        """The encoding of GGUF files: the requested one if any tensor has it, as files mix encodings."""
        entries = [entry for path in paths for entry in read_gguf_entries(path)]
        requested = self.quantization_encoding
        is_stored = requested not in PLAIN_FLOATS and requested in encodings_in(entries)
        return requested if is_stored else encoding_of(entries)

    @property
    def weights_format(self) -> WeightsFormat:
        """The format of the weight files.

        Raises:
            ModelFilesError: The model has no weight files.
        """
        paths = self.weight_paths()
        try:
            return format_of_files(paths)
        except ValueError as error:
            raise ModelFilesError(
                str(error).removeprefix("weights_format: "), "Check --weight-path."
            ) from error

    def weight_paths(self) -> list[Path]:
        """The weight files on this machine; files on the hub are downloaded.

        Raises:
            ModelFilesError: The model has no weight files, or a file is missing.
        """
        repo = self.huggingface_weight_repo
        if self.weight_path:
            paths: list[Path] = []
            for path in self.weight_path:
                inside = path.expanduser() if path.expanduser().is_file() else repo.file(str(path))
                if inside is None:
                    problem = "is a folder" if path.expanduser().is_dir() else "does not exist"
                    raise ModelFilesError(
                        f"weight file {path} {problem}",
                        "Give the path of a file with --weight-path, once for each file.",
                    )
                paths.append(inside)
            return [Path(path) for path in first_parts(map(str, paths))]
        names = self._weight_names()
        if not names:
            raise ModelFilesError(
                f"{self.model_path} has no weight files",
                "The folder must hold *.safetensors; give --weight-path where they are elsewhere.",
            )
        files = [part for name in names for part in gguf_parts(name)]
        if (folder := repo.folder) is not None:
            is_local = repo.repo_type == RepoType.local
            # a local model that lacks a part or a file is an error when the file is opened
            if is_local or (
                not self.force_download and all((folder / name).is_file() for name in files)
            ):
                return [folder / name for name in names]
        paths = download_weight_files(
            self.model_path, files, self.huggingface_weight_revision, self.force_download
        )
        return [Path(path) for path in first_parts(map(str, paths))]

    def _weight_names(self) -> list[str]:
        """The names of the model's weight files: safetensors, else the GGUF file of the encoding."""
        repo = self.huggingface_weight_repo
        weights_format = _format_to_load(repo)
        if weights_format is None:
            return []
        names = repo.weight_files[weights_format]
        if weights_format != WeightsFormat.gguf:
            return names
        encoding = self.quantization_encoding
        fitting = [n for n in names if SupportedEncoding.parse_from_file_name(n) == encoding]
        if len(names) > 1 and len(fitting) != 1:
            raise ModelFilesError(
                f"{self.model_path} has {len(names)} GGUF files",
                "Give the one to take with --weight-path.",
            )
        return fitting or names

    def weights_size(self, quantize: str | None = None) -> int:
        """The bytes of the weights in memory, of all copies; of composite checkpoints only the text model is loaded.

        Args:
            quantize: What float matrices would be quantized to; the configuration's by default.
        """
        kind = quantize or self.quantize
        composite = not COMPOSITES.keys().isdisjoint(self.huggingface_config.architectures)
        total = 0
        for path in self.weight_paths():
            read = ENTRY_READERS.get(path.suffix.lower())
            if read is not None and self.quantization_encoding is not None:
                entries = read(path)
                if composite:
                    entries = [e for e in entries if text_weight_name(e.name) is not None]
                total += bytes_of(entries, self.quantization_encoding, kind)
            else:
                total += path.stat().st_size
        return total * self.data_parallel_degree

    def has_weight(self, ends: tuple[str, ...]) -> bool:
        """Whether a weight has a name that ends in one of some texts; the answer is kept.

        Args:
            ends: The ends of names.
        """
        paths = self.weight_paths()
        key = (ends, *paths)
        if key not in self._known_ends:
            readers = ((ENTRY_READERS.get(path.suffix.lower()), path) for path in paths)
            self._known_ends[key] = any(
                entry.name.endswith(ends)
                for read, path in readers
                if read is not None
                for entry in read(path)
            )
        return self._known_ends[key]

    def load_weights(self) -> Weights:
        """Opens the weight files.

        Raises:
            ModelFilesError: A file is missing, cut off or broken.
        """
        _ = self.weights_format  # raises the error for an unknown format
        return load_weights(self.weight_paths())
