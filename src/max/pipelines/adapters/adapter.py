"""An adapter as its files have it: the low-rank matrices and the whole weights, by the names of the base's modules."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.pipelines.core.exceptions import UserError

__all__ = [
    "Adapter",
    "AdapterError",
    "Array",
    "LowRank",
    "check_finite",
    "digest_of",
    "regular_file",
]

Array = npt.NDArray[np.generic]

MAX_TENSORS = 200_000
"""The most tensors of an adapter's file."""


class AdapterError(UserError):
    """An adapter cannot be read, or does not fit its model; the message names the file and the tensor."""


@dataclass(frozen=True)
class LowRank:
    """The change of one module: ``W + scale * B A``, with DoRA then scaled to rows of the lengths `magnitude`.

    Args:
        tensor: The name of the tensor A in the file, for messages.
        a: ``[rank, inputs]``; of all experts ``[experts, rank, inputs]``.
        b: ``[outputs, rank]``; of all experts ``[experts, outputs, rank]``.
        scale: The factor of the product.
        is_table: Whether the module looks up rows of a table; its inputs are the table's rows.
        magnitude: The lengths of the changed weight's rows (of a table: its columns), ``[outputs]``; None: not DoRA.
        bias: Added to the product with B, before the scale, ``[outputs]``; None: no bias.
    """

    tensor: str
    a: Array
    b: Array
    scale: float
    is_table: bool = False
    magnitude: Array | None = None
    bias: Array | None = None

    @property
    def rank(self) -> int:
        """The rank."""
        return int(self.a.shape[-2])


@dataclass(frozen=True)
class Adapter:
    """An adapter.

    Args:
        path: Its folder or file.
        digest: A digest of its files: equal for equal adapters only.
        modules: The changes by the names of modules, without ``.weight``.
        saved_weights: Whole weights and biases that replace those of the base, by their names.
        is_gguf: Whether the names are those of GGUF files.
        base: The name of the base model, if the files state it.
    """

    path: Path
    digest: str
    modules: Mapping[str, LowRank]
    saved_weights: Mapping[str, Array]
    is_gguf: bool = False
    base: str = ""

    @property
    def rank(self) -> int:
        """The greatest rank of its modules."""
        return max((module.rank for module in self.modules.values()), default=0)


def regular_file(path: Path) -> Path:
    """Checks that a path is a regular file, as reading from a pipe or a device would not end.

    Args:
        path: The path.

    Raises:
        AdapterError: It is missing, or another kind of file.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(mode):
        raise AdapterError(f"{path} is not a regular file")
    return path


def digest_of(paths: Iterable[Path]) -> str:
    """A digest of the contents of files."""
    total = hashlib.blake2b(digest_size=16)
    for path in paths:
        with open(path, "rb") as file:
            # a digest of digests: the borders of files count
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def check_finite(name: str, values: Array) -> None:
    """Raises AdapterError if a tensor has NaN or infinite values."""
    # a sum is finite only if all values are; it may overflow, then all are looked at
    with np.errstate(all="ignore"):
        floats = values.astype(np.float32)
        if not np.isfinite(floats.sum(dtype=np.float64)) and not np.isfinite(floats).all():
            raise AdapterError(f"the tensor {name!r} has NaN or infinite values")
