"""Where a model comes from: the list of its files, with sizes and checksums where these are known."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from huggingface_hub import constants, get_token

from max._version import __version__
from max.graph.weights import gguf_parts, gguf_stem
from max.pipelines.core.exceptions import InputError, ModelFilesError
from max.pipelines.store.names import (
    file_of_tag,
    gguf_models,
    split_tag,
    tag_of,
    without_hub_prefix,
)

TIMEOUT_S = 30.0
_WEIGHTS = (".safetensors", ".gguf")
_BESIDE = (".json", ".jinja", ".model", ".tiktoken", ".txt")
# the files of a folder that is only known by its address
_COMMON = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
    "chat_template.json",     "special_tokens_map.json", "tokenizer.model", "vocab.json", "merges.txt", "SHA256SUMS",
)  # fmt: skip


@dataclass(frozen=True)
class SourceFile:
    """A file of a model to pull.

    Args:
        name: Its name in the model's folder.
        address: A path of this machine, or an ``http`` address.
        size: Its bytes; None: unknown.
        sha256: Its checksum in hexadecimal digits; None: unknown.
        optional: Whether it may be missing.
    """

    name: str
    address: str
    size: int | None = None
    sha256: str | None = None
    optional: bool = False


@dataclass(frozen=True)
class Source:
    """A model to pull.

    Args:
        name: The name that it gets by default.
        address: Where it comes from.
        files: Its files.
    """

    name: str
    address: str
    files: tuple[SourceFile, ...]


def open_source(text: str) -> Source:
    """Lists the files of a source.

    Args:
        text: A folder or a GGUF file, also as ``file://``; an ``http`` address of a GGUF file or of a
            folder; or a name on the Hugging Face hub. ``:Q4_K_M`` after a folder or a name is one GGUF
            file of several.

    Raises:
        ModelFilesError: There is nothing, or the network cannot be reached.
        InputError: It is none of these.
    """
    text = without_hub_prefix(text)
    scheme = urlsplit(text).scheme
    if scheme == "file":
        return _of_path(Path(unquote(urlsplit(text).path)))
    if scheme in ("http", "https"):
        return _of_address(text)
    if Path(text).expanduser().exists():
        return _of_path(Path(text).expanduser().resolve())
    name, tag = split_tag(text)
    if tag is not None and Path(name).expanduser().is_dir():
        return _of_path(Path(name).expanduser().resolve(), tag)
    parts = name.split("/")
    scheme = urlsplit(name).scheme
    if scheme or len(parts) != 2 or not all(parts) or text.startswith((".", "~")):
        raise InputError(
            f"{text!r} is no folder, no file and no name on the hub",
            "Give a path, a file:// or http:// address, or a name such as org/model.",
        )
    return of_hub(text)


def _of_path(path: Path, tag: str | None = None) -> Source:
    """The source of a local folder or GGUF file; a tag is one file of a folder."""
    if path.is_file() and path.suffix == ".gguf":
        parts = [Path(part) for part in gguf_parts(str(path))]
        if missing := [part for part in parts if not part.is_file()]:
            raise ModelFilesError(
                f"{path} is in {len(parts)} parts, and {missing[0].name} is missing",
                "Put all parts into one folder.",
            )
        files = tuple(SourceFile(part.name, str(part), part.stat().st_size) for part in parts)
        return Source(gguf_stem(path.name), str(path), files)
    if not path.is_dir():
        raise ModelFilesError(f"{path} is no folder and no GGUF file", "Give one that exists.")
    files = [entry for entry in sorted(path.iterdir()) if entry.is_file() and _belongs(entry.name)]
    if not any(entry.suffix in _WEIGHTS for entry in files):
        raise ModelFilesError(
            f"{path} has no weights", "A model's folder has *.safetensors or *.gguf files."
        )
    sums = _checksums(path.joinpath("SHA256SUMS"))
    listed = [SourceFile(f.name, str(f), f.stat().st_size, sums.get(f.name)) for f in files]
    return _chosen_file(Source(path.name, str(path), tuple(listed)), tag)


def _chosen_file(source: Source, tag: str | None) -> Source:
    """One GGUF file of a source that has several, with its tag in the name; others as they are."""
    names = {file.name for file in source.files}
    gguf = gguf_models(names)
    if tag is None and (len(gguf) < 2 or any(name.endswith(".safetensors") for name in names)):
        return source
    file = file_of_tag(gguf, tag, source.address)
    parts = gguf_parts(file)
    kept = tuple(each for each in source.files if each.name in parts)
    return Source(f"{source.name}:{tag_of(file)}", source.address, kept)


def _checksums(path: Path) -> dict[str, str]:
    try:
        return parse_checksums(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def parse_checksums(text: str) -> dict[str, str]:
    """The checksums of a file as ``sha256sum`` writes it, by file name.

    Args:
        text: Its text.
    """
    pairs = (line.split(maxsplit=1) for line in text.splitlines())
    return {pair[1].lstrip("*"): pair[0].lower() for pair in pairs if len(pair) == 2}


def _belongs(name: str) -> bool:
    suffix = PurePosixPath(name).suffix
    return not name.startswith(".") and (suffix in _WEIGHTS or suffix in _BESIDE)


def _of_address(address: str) -> Source:
    """The source of an http address: a GGUF file, or a folder with an index of weights."""
    path = PurePosixPath(unquote(urlsplit(address).path))
    if path.suffix == ".gguf":
        address_of = address.removesuffix(quote(path.name)) + "{}"
        if not address.endswith(quote(path.name)):
            return Source(path.stem, address, (SourceFile(path.name, address),))
        files = tuple(
            SourceFile(part, address_of.format(quote(part))) for part in gguf_parts(path.name)
        )
        return Source(gguf_stem(path.name), address, files)
    base = address.rstrip("/")
    sums = _fetched_text(f"{base}/SHA256SUMS", parse_checksums) or {}
    index = _fetched_text(f"{base}/model.safetensors.index.json", json.loads)
    weights = ["model.safetensors"]
    if isinstance(index, dict) and isinstance(index.get("weight_map"), dict):
        weights = ["model.safetensors.index.json", *sorted(set(index["weight_map"].values()))]
    files = [
        SourceFile(
            name, f"{base}/{quote(name)}", sha256=sums.get(name), optional=name != "config.json"
        )
        for name in _COMMON
    ]
    files += [SourceFile(n, f"{base}/{quote(n)}", sha256=sums.get(n)) for n in weights]
    return Source(path.name or "model", address, tuple(files))


def of_hub(name: str) -> Source:
    """A repository of the hub, or of a server that speaks as it does (``HF_ENDPOINT``).

    Args:
        name: Its name, ``owner/model``, or one of its GGUF files, ``owner/model:Q4_K_M``.

    Raises:
        ModelFilesError: There is none, or the hub cannot be reached.
    """
    name, tag = split_tag(name)
    if constants.HF_HUB_OFFLINE:
        raise ModelFilesError(
            f"{name!r} is a name on the hub, and HF_HUB_OFFLINE is set",
            "Unset HF_HUB_OFFLINE, or give a folder or a file.",
        )
    endpoint = constants.ENDPOINT.rstrip("/")
    listed = _fetched_text(f"{endpoint}/api/models/{quote(name)}?blobs=true", json.loads)
    if not isinstance(listed, dict):
        raise ModelFilesError(
            f"the hub has no model {name!r}", "Models that need a token are read with HF_TOKEN."
        )
    files = list(_hub_files(listed, f"{endpoint}/{quote(name)}/resolve/main"))
    safetensors = any(file.name.endswith(".safetensors") for file in files)
    if safetensors and tag is None:  # both: the same weights twice
        files = [file for file in files if not file.name.endswith(".gguf")]
    if not any(file.name.endswith(_WEIGHTS) for file in files):
        raise ModelFilesError(
            f"{name!r} has no *.safetensors or *.gguf files", "Give another model."
        )
    return _chosen_file(Source(name, f"{endpoint}/{name}", tuple(files)), tag)


def _hub_files(listing: dict[str, Any], base: str) -> Iterator[SourceFile]:
    """The files of a hub listing that belong to a model, with sizes and checksums."""
    for entry in listing.get("siblings") or ():
        name = str(entry.get("rfilename", ""))
        if "/" in name or not _belongs(name):
            continue
        lfs = entry.get("lfs") or {}
        yield SourceFile(name, f"{base}/{quote(name)}", entry.get("size"), lfs.get("sha256"))


def http_request(address: str, headers: dict[str, str]) -> Any:
    """Opens an ``http`` address; the token of the hub goes to its endpoint only.

    Args:
        address: The address.
        headers: More headers.

    Raises:
        urllib.error.URLError: It cannot be opened.
    """
    sent = {"User-Agent": f"supremum/{__version__}", **headers}
    endpoint = constants.ENDPOINT.rstrip("/")
    if address.startswith(f"{endpoint}/") and (token := get_token()):
        sent["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(address, headers=sent)
    return urllib.request.urlopen(request, timeout=TIMEOUT_S)


def _fetched_text(address: str, parse: Callable[[str], Any]) -> Any:
    """A small text file, parsed; None where there is none."""
    try:
        with http_request(address, {}) as response:
            return parse(response.read(64 << 20).decode("utf-8"))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403, 404):
            return None
        raise ModelFilesError(f"{address}: status {error.code}", "Try again later.") from error
    except OSError as error:
        raise unreachable_error(address, error) from error
    except ValueError as error:
        raise ModelFilesError(
            f"{address} cannot be read: {error}", "Give another source."
        ) from error


def unreachable_error(address: str, error: OSError) -> ModelFilesError:
    """The error of an address that cannot be reached.

    Args:
        address: The address.
        error: The error of the system.
    """
    reason = getattr(error, "reason", None) or error
    return ModelFilesError(
        f"{urlsplit(address).netloc} cannot be reached: {reason}",
        "Without a network, give a folder or a GGUF file of this machine.",
    )
