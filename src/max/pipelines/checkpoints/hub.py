"""The files of models, in a folder or on the Hugging Face hub.

A local path never causes network access; nor does a hub name if ``HF_HUB_OFFLINE`` is set, which the huggingface-hub
package honors.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max._dataclass import dataclass
from max._lazy import lazy_module
from max._spelling import similar_names
from max.graph.weights import WeightsFormat, first_parts, gguf_parts
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.encodings import SupportedEncoding
from max.pipelines.checkpoints.model_files import read_json, remedy_for
from max.pipelines.checkpoints.weight_files import (
    ENTRY_READERS,
    TensorEntry,
    encoding_of,
    read_safetensors_header,
)
from max.pipelines.core.exceptions import ModelFilesError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

    from max.pipelines.checkpoints import hub_calls
else:
    # models in folders need none
    hub_calls = lazy_module("max.pipelines.checkpoints.hub_calls")

_WHOLE = {
    WeightsFormat.safetensors: "model.safetensors",
    WeightsFormat.pytorch: "pytorch_model.bin",
}
"""The name of a model's only weight file; that of the index of shards adds ``.index.json``."""
_FORMATS = {
    ".safetensors": "safetensors",
    ".gguf": "gguf",
    **dict.fromkeys((".pt", ".pth", ".bin"), "pytorch"),
}
_FILES = frozenset((*_FORMATS, ".onnx", ".pt2", ".tflite", ".keras"))
"""The ends of names of files with models."""
_OTHER_TORCH_FILES = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "tokenizer")
"""What the names of files of ``torch.save`` without weights begin with."""


def looks_local(repo_id: str) -> bool:
    """Whether a name that does not exist locally is meant as a path, not as a hub name.

    A name inside an existing folder counts as a path, so that a misspelt ``models/llama`` causes no request to the hub.

    Args:
        repo_id: The name.
    """
    return (
        ("/" in repo_id and Path(repo_id).parent.is_dir())
        or Path(repo_id).is_absolute()
        or repo_id.startswith((".", "~"))
        or repo_id.count("/") > 1  # names on the hub have one at most
        or "\\" in repo_id
        or ("/" not in repo_id and Path(repo_id).suffix in _FILES)
    )


def _path_of(name: str) -> Path:
    """The path that a name stands for; `~user` of an unknown user stays as it is."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


class RepoType(str, Enum):
    """Where the files of a model are stored."""

    online = "online"
    local = "local"


@dataclass(frozen=True)
class HuggingFaceRepo:
    """The files of a model.

    Args:
        repo_id: A folder, a GGUF file, or a name on the hub.
        revision: The branch, tag or commit on the hub.
        trust_remote_code: Whether code from the model's repository may run.
        repo_type: Where the files are stored; by default derived from the name.

    Raises:
        ModelFilesError: The name is a path that does not exist.
    """

    repo_id: str
    revision: str = "main"
    trust_remote_code: bool = False
    repo_type: RepoType | None = None
    _headers: dict[str, list[TensorEntry]] = field(
        default_factory=dict, repr=False, compare=False, hash=False
    )

    def __post_init__(self) -> None:
        folder = _path_of(self.repo_id)
        if self.repo_type is None:
            local = folder.exists() or looks_local(self.repo_id)
            object.__setattr__(self, "repo_type", RepoType.local if local else RepoType.online)
        if self.repo_type == RepoType.local and not folder.is_dir() and not self._is_gguf_file:
            problem = "is a file, not a folder" if folder.is_file() else "does not exist"
            if not folder.exists() and folder.parent.is_dir():
                near = similar_names(folder.name, (p.name for p in folder.parent.iterdir()))
                problem += f"; did you mean {str(folder.parent / near[0])!r}?" if near else ""
            kind = "file" if folder.suffix in _FILES and not folder.exists() else "folder"
            raise ModelFilesError(
                f"model {kind} {self.repo_id} {problem}",
                "Give the path of a model folder (config.json, tokenizer.json, *.safetensors) or of a GGUF file, or "
                "the name of a model on the Hugging Face hub.",
            )

    @property
    def _is_gguf_file(self) -> bool:
        """Whether the model is a single GGUF file, which also contains config and tokenizer."""
        path = _path_of(self.repo_id)
        return self.repo_type == RepoType.local and path.suffix == ".gguf" and path.is_file()

    @cached_property
    def gguf_file(self) -> Path | None:
        """The GGUF file that replaces missing config and tokenizer files: the model itself, or the only one in its
        folder.
        """
        if self._is_gguf_file:
            return _path_of(self.repo_id)
        if self.repo_type == RepoType.online or self.folder is None:
            return None
        paths = first_parts(map(str, self.folder.glob("*.gguf")))
        files = [Path(path) for path in paths]
        # of several files it is not clear which one counts
        return files[0] if len(files) == 1 else None

    @property
    def folder(self) -> Path | None:
        """The folder of a local model; for a hub model, its snapshot in the cache if there is one."""
        if self.repo_type == RepoType.local:
            path = _path_of(self.repo_id)
            return path.parent if self._is_gguf_file else path
        # a snapshot has a config.json; asking for it downloads nothing
        cached = try_to_load_from_cache(self.repo_id, "config.json", self.revision)
        return Path(cached).parent if isinstance(cached, str) else None

    @cached_property
    def info(self) -> ModelInfo:
        """The hub's record of the model.

        Raises:
            ValueError: The model is local.
            ModelFilesError: The hub does not answer.
        """
        if self.repo_type == RepoType.local:
            raise ValueError(f"{self.repo_id} is a folder: the hub knows nothing of it")

        def ask() -> ModelInfo:
            from huggingface_hub import HfApi

            return HfApi().model_info(self.repo_id, revision=self.revision, files_metadata=True)

        return hub_calls.call_hub(ask, self.repo_id, self.revision)

    @cached_property
    def _sizes(self) -> dict[str, int | None]:
        """The names of the model's files, and their sizes in bytes."""
        folder = self.folder
        if self._is_gguf_file:
            parts = map(Path, gguf_parts(str(_path_of(self.repo_id))))
            return {part.name: part.stat().st_size for part in parts if part.is_file()}
        if self.repo_type == RepoType.online:
            try:
                return {file.rfilename: file.size for file in self.info.siblings or []}
            # offline, a model that was downloaded runs with the files that are there
            except ModelFilesError:
                if folder is None:
                    raise
        assert folder is not None
        return {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.relative_to(folder).parts[0].startswith(".")
        }

    @property
    def file_names(self) -> list[str]:
        """The names of the model's files, relative to the model."""
        return sorted(self._sizes)

    def file_exists(self, filename: str) -> bool:
        """Whether the model has a file.

        Args:
            filename: Its name, relative to the model.
        """
        if self._is_gguf_file:
            return filename in self._sizes
        if self.repo_type == RepoType.local:
            assert self.folder is not None
            return (self.folder / filename).is_file()
        return filename in self._sizes

    def size_of(self, filename: str) -> int | None:
        """The bytes of a file; None if unknown.

        Args:
            filename: Its name, relative to the model.
        """
        return self._sizes.get(filename)

    def file(self, filename: str) -> Path | None:
        """The local path of a file, downloaded if needed; None if the model has no such file.

        Args:
            filename: Its name, relative to the model.

        Raises:
            ModelFilesError: The hub does not answer.
        """
        folder = self.folder
        if self._is_gguf_file and filename not in self._sizes:
            return None
        if folder is not None and (folder / filename).is_file():
            return folder / filename
        if self.repo_type == RepoType.local:
            return None

        def fetch() -> Path | None:
            """The path of the downloaded file; None if the repository has no such file."""
            from huggingface_hub import errors, hf_hub_download

            try:
                return Path(hf_hub_download(self.repo_id, filename, revision=self.revision))
            except errors.LocalEntryNotFoundError:
                if folder is not None:
                    return None  # the cached snapshot has no such file
                raise
            except errors.EntryNotFoundError:
                return None

        return hub_calls.call_hub(fetch, self.repo_id, self.revision)

    @cached_property
    def weight_files(self) -> dict[WeightsFormat, list[str]]:
        """The weight files by format; if there is an index, the shards that it names."""
        files: dict[WeightsFormat, list[str]] = {}
        for name in first_parts(sorted(self._sizes)):
            suffix = Path(name).suffix
            # .bin and .pt files may also hold optimizer states or arguments of training
            skip = suffix != ".safetensors" and Path(name).name.startswith(_OTHER_TORCH_FILES)
            if suffix in _FORMATS and "/" not in name and not skip:  # in folders are other forms
                files.setdefault(WeightsFormat[_FORMATS[suffix]], []).append(name)
        for weights_format, whole in _WHOLE.items():
            names = files.get(weights_format, [])
            if whole in names:
                files[weights_format] = [whole]
            elif f"{whole}.index.json" in self._sizes:
                index = self.file(f"{whole}.index.json")
                assert index is not None
                files[weights_format] = self._shards(index)
            elif names:
                # some repositories also contain Meta's original files, or adapters
                own = [n for n in names if not n.startswith(("consolidated", "adapter"))]
                files[weights_format] = own or names
        return files

    def _shards(self, index: Path) -> list[str]:
        """The weight files that an index names, all of which must be in the repository."""
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFilesError(f"{index} has no weight_map", remedy_for(index))
        invalid = [key for key, name in weight_map.items() if not isinstance(name, str)]
        if invalid:
            raise ConfigKeys(weight_map, "weight_map", str(index)).error(
                invalid[0], "the name of a weight file"
            )
        shards = sorted(set(weight_map.values()))
        missing = [name for name in shards if name not in self._sizes]
        if missing:
            raise ModelFilesError(
                f"{self.repo_id} lacks {len(missing)} of {len(shards)} weight files: "
                f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}",
                remedy_for(index),
            )
        return shards

    @property
    def formats_available(self) -> list[WeightsFormat]:
        """The formats of the model's weight files."""
        return list(self.weight_files)

    def safetensors_entries(self, filename: str) -> list[TensorEntry]:
        """The tensors of a safetensors file.

        Args:
            filename: Its name, relative to the model.

        Raises:
            ModelFilesError: The file is missing, truncated or damaged.
        """
        if filename not in self._headers:
            path = self.file(filename)
            if path is None:
                raise ModelFilesError(
                    f"{self.repo_id} has no weight file {filename}", "Check the model's folder."
                )
            self._headers[filename] = read_safetensors_header(path)
        return self._headers[filename]

    def encoding_for_file(self, file: str | Path) -> SupportedEncoding:
        """The encoding of a weight file.

        Args:
            file: Its name, relative to the model.

        Raises:
            ModelFilesError: The encoding is unknown.
        """
        name = str(file)
        if name.endswith(".safetensors"):
            encoding = self._safetensors_encoding([name])
        else:
            encoding = self._file_encoding(name)
        if encoding is None:
            raise ModelFilesError(
                f"the encoding of weight file {name} is not known",
                "Give --quantization-encoding; the encodings are "
                f"{', '.join(SupportedEncoding.__members__)}.",
            )
        return encoding

    def _safetensors_encoding(self, names: list[str]) -> SupportedEncoding | None:
        """The encoding of safetensors files; of files on the hub by the dtype in config.json."""
        if self.repo_type == RepoType.local:
            return encoding_of([e for name in names for e in self.safetensors_entries(name)])
        # config.json states the dtype, which avoids the download of the weights
        path = self.file("config.json")
        values = read_json(path) if path is not None else {}
        return SupportedEncoding.of_dtype(str(values.get("dtype") or values.get("torch_dtype")))

    def _file_encoding(self, name: str) -> SupportedEncoding | None:
        """The encoding with the most bytes; for a file that is not downloaded, the encoding in its name."""
        if self.folder is None or not (self.folder / name).is_file():
            return SupportedEncoding.parse_from_file_name(Path(name).name)
        if name not in self._headers:
            self._headers[name] = ENTRY_READERS[Path(name).suffix.lower()](self.folder / name)
        return encoding_of(self._headers[name])

    @cached_property
    def supported_encodings(self) -> list[SupportedEncoding]:
        """The encodings of the model's weight files, without duplicates."""
        found = (e for each in self.weight_files.items() for e in self.encodings_of(*each))
        return list(dict.fromkeys(found))

    def encodings_of(
        self, weights_format: WeightsFormat, names: list[str]
    ) -> list[SupportedEncoding]:
        """The encodings of weight files of the model in a format, without duplicates.

        Args:
            weights_format: The format.
            names: The files.
        """
        if weights_format == WeightsFormat.safetensors:
            found = [self._safetensors_encoding(names)]
        else:
            # torch files are read where they are the only ones
            whole = weights_format == WeightsFormat.gguf or len(self.weight_files) == 1
            tell = self._file_encoding if whole else SupportedEncoding.parse_from_file_name
            found = [tell(name) for name in names]
        return list(dict.fromkeys(encoding for encoding in found if encoding is not None))

    def files_for_encoding(
        self, encoding: SupportedEncoding, weights_format: WeightsFormat | None = None
    ) -> dict[WeightsFormat, list[Path]]:
        """The weight files that contain an encoding, by format.

        Args:
            encoding: The encoding.
            weights_format: Restricts the result to this format; None: all formats.
        """
        files: dict[WeightsFormat, list[Path]] = {}
        for each, names in self.weight_files.items():
            if weights_format is not None and each != weights_format:
                continue
            if each == WeightsFormat.safetensors:
                fitting = names if self._safetensors_encoding(names) == encoding else []
            else:
                fitting = [n for n in names if self.encoding_for_file(n) == encoding]
            if fitting:
                files[each] = [Path(name) for name in fitting]
        return files


def download_weight_files(
    huggingface_model_id: str,
    filenames: list[str],
    revision: str | None = None,
    force_download: bool = False,
    max_workers: int = 8,
) -> list[Path]:
    """Downloads weight files from the hub; local files are used in place.

    Args:
        huggingface_model_id: The model's name on the hub, or its folder.
        filenames: Names relative to the model, or local paths.
        revision: The branch, tag or commit.
        force_download: Whether to download files that are already in the cache.
        max_workers: The maximum number of concurrent downloads.

    Returns:
        The local paths of the files, in the order of `filenames`.

    Raises:
        ModelFilesError: A download fails.
    """

    def fetch(name: str) -> Path:
        """The path of a weight file: a local one, else a download."""
        for path in (Path(name), Path(huggingface_model_id) / name):
            if path.is_file() and not force_download:
                return path

        def download() -> Path:
            from huggingface_hub import hf_hub_download

            return Path(
                hf_hub_download(
                    huggingface_model_id, name, revision=revision, force_download=force_download
                )
            )

        return hub_calls.call_hub(download, huggingface_model_id, revision)

    with ThreadPoolExecutor(max(1, min(max_workers, len(filenames))), "download") as pool:
        return list(pool.map(fetch, filenames))


def generate_local_model_path(repo_id: str, revision: str) -> str:
    """The folder of a model in the cache of the huggingface-hub package.

    Args:
        repo_id: The model's name on the hub.
        revision: The commit.

    Raises:
        FileNotFoundError: The cache does not contain it.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    name = repo_folder_name(repo_id=repo_id, repo_type="model")
    path = Path(constants.HF_HUB_CACHE) / name / "snapshots" / revision
    if not path.exists():
        raise FileNotFoundError(f"{repo_id} at {revision} is not in the cache: {path}")
    return str(path)


def try_to_load_from_cache(repo_id: str, filename: str, revision: str) -> str | Any | None:
    """The path of a model's file in the cache, without network access.

    Args:
        repo_id: The model's name on the hub.
        filename: The file's name, relative to the model.
        revision: The branch, tag or commit.

    Returns:
        The path; None if the file is not cached; a marker object if the hub is known to lack the file.
    """
    from huggingface_hub import try_to_load_from_cache as load

    return hub_calls.call_hub(lambda: load(repo_id, filename, revision=revision), repo_id, revision)


def validate_hf_repo_access(repo_id: str, revision: str) -> None:
    """Checks that a model exists on the hub and that the user has access.

    Args:
        repo_id: The model's name on the hub.
        revision: The branch, tag or commit.

    Raises:
        ValueError: The model does not exist, the user has no access, or the hub does not answer.
    """

    def ask() -> None:
        from huggingface_hub import HfApi

        HfApi().model_info(repo_id, revision=revision)

    hub_calls.call_hub(ask, repo_id, revision)
