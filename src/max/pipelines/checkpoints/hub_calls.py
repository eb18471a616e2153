"""Calls to the Hugging Face hub, with errors that name a remedy."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from max._lazy import lazy_module
from max.pipelines.core.exceptions import ModelFilesError

if TYPE_CHECKING:
    from urllib import request as urllib_request
else:
    urllib_request = lazy_module("urllib.request")

T = TypeVar("T")


def _fail_if_offline() -> None:
    """Fails at once if there is no network, as huggingface-hub would retry for half a minute.

    Raises:
        OfflineModeIsEnabled: The hub's host name does not resolve, and no proxy is set that might resolve it.
    """
    from huggingface_hub import constants, errors

    host = urlsplit(constants.ENDPOINT).hostname
    # a proxy resolves names itself
    if constants.HF_HUB_OFFLINE or urllib_request.getproxies() or host is None:
        return
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise errors.OfflineModeIsEnabled(f"{host}: {error}") from error


def folder_named(name: str) -> str:
    """A question for the model folder of a name that lies one level below the working folder; empty if none does.

    Args:
        name: The name.
    """
    with contextlib.suppress(OSError):
        for folder in sorted(Path().iterdir()):
            if (folder / name / "config.json").is_file():
                return f"Did you mean {str(folder / name)!r}? "
    return ""


def call_hub(action: Callable[[], T], repo_id: str, revision: str | None) -> T:
    """Runs a call to the hub.

    Args:
        action: The call.
        repo_id: The model that the call is about.
        revision: Its branch, tag or commit.

    Raises:
        ModelFilesError: The call fails, or huggingface-hub is not installed; the error names a remedy.
    """
    try:
        from huggingface_hub import errors
    except ImportError as error:
        raise ModelFilesError(
            f"{repo_id} is no folder, and the package huggingface-hub is not installed",
            "Give a model folder, or pip install huggingface-hub.",
        ) from error
    try:
        _fail_if_offline()
        return action()
    except errors.GatedRepoError as error:
        raise ModelFilesError(
            f"{repo_id} asks for access that this user does not have",
            f"Ask for it at https://huggingface.co/{repo_id}, then run `hf auth login`.",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelFilesError(
            f"{repo_id} is neither a folder nor a model on the Hugging Face hub",
            "Check the name; for a private model run `hf auth login`.",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelFilesError(
            f"{repo_id} has no revision {revision!r}", "Check --huggingface-model-revision."
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise ModelFilesError(
            f"{repo_id} is no folder, is not in the Hugging Face cache, and the hub is not "
            "reachable (or HF_HUB_OFFLINE is set)",
            f"Give the path of a model folder, or get the model while online: `max pull {repo_id}`."
            if "/" in repo_id
            else f"{folder_named(repo_id)}Give the path of a model folder, or a name: `max ls` lists those of this "
            "machine.",
        ) from error
    except errors.HFValidationError as error:
        raise ModelFilesError(
            f"{repo_id!r} is neither a folder nor a name of a model on the Hugging Face hub",
            "Give the path of a model folder, or a name such as owner/model.",
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelFilesError(
            f"{repo_id} cannot be fetched from the Hugging Face hub: {first}",
            "Check the connection, or give the path of a model folder.",
        ) from error
