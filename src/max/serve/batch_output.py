"""The file with the answers of a batch: one line a request, also where a run was cut off and a later one goes on."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max._lazy import lazy_module
from max.pipelines.core.exceptions import InputError
from max.serve.batch import BatchRequest

if TYPE_CHECKING:
    import fcntl
else:
    fcntl = lazy_module("fcntl")  # absent on Windows

MARK = ".unfinished"
"""The end of the name of the file that exists beside the answers while some are missing."""


class BatchOutput:
    """The answers of a batch in a file, of which one process writes; a context.

    Beside it a file with the digest of the batch exists until all answers are written. A later run of the same batch
    finds it, keeps the whole lines, and tells which requests they answer.

    Args:
        path: The file of the answers.
        requests: The requests.
        model: What answers them; a run with another model does not go on with the answers.

    Raises:
        InputError: Another process writes the file, or it has answers of a batch that was cut off.
        OSError: It cannot be written.
    """

    def __init__(self, path: Path, requests: Sequence[BatchRequest], model: str) -> None:
        self._path, self._mark = path, path.with_name(path.name + MARK)
        self._requests = requests
        self.answered: set[str] = set()
        """The ``custom_id`` of each request that has an answer."""
        self.failed = 0
        """How many of them have one of another status than 200."""
        # not "w": the file may have the answers of a run that was cut off
        self._file = path.open("ab+")
        try:
            self._lock()
            self._begin(_digest(requests, model))
            self._end()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def unanswered_requests(self) -> list[BatchRequest]:
        """The requests without an answer."""
        return [each for each in self._requests if each.custom_id not in self.answered]

    def write(self, custom_id: str, line: str) -> None:
        """Writes an answer; it is in the file afterwards, also if this process is killed.

        Args:
            custom_id: The request.
            line: The line.
        """
        self._file.write(line.encode())
        self._file.flush()
        self.answered.add(custom_id)
        self._end()

    def _end(self) -> None:
        """Removes the mark, if all answers are written."""
        if len(self.answered) == len(self._requests):
            self._mark.unlink(missing_ok=True)

    def _lock(self) -> None:
        if find_spec("fcntl") is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another process writes {self._path}", "Wait for its end, or give another file."
            ) from error

    def _begin(self, digest: str) -> None:
        if self._mark.exists():
            if self._mark.read_text(encoding="utf-8").strip() != digest:
                raise InputError(
                    f"{self._path} has the answers of a batch that was cut off, and it was another batch or model",
                    f"Run that batch again to go on with it, or delete {self._mark} to lose its answers.",
                )
            self._keep_lines()
            return
        # in this order: an empty file without a mark is a batch that has not begun
        self._file.truncate(0)
        part = self._mark.with_name(self._mark.name + ".part")
        part.write_text(digest, encoding="utf-8")
        part.replace(self._mark)

    def _keep_lines(self) -> None:
        """Reads the whole lines, and removes the rest of one that was being written."""
        self._file.seek(0)
        known = {request.custom_id for request in self._requests}
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            answer: Any = None
            with contextlib.suppress(ValueError, RecursionError):
                answer = json.loads(line)
            name = answer.get("custom_id") if isinstance(answer, dict) else None
            if not isinstance(name, str) or name not in known or name in self.answered:
                raise InputError(
                    f"{self._path}: line {number} answers no request of the batch, or one again",
                    f"The file was changed meanwhile. Delete {self._mark} to begin anew.",
                )
            self.answered.add(name)
            self.failed += answer.get("response", {}).get("status_code") != 200
            end += len(line)
        self._file.truncate(end)


def _digest(requests: Sequence[BatchRequest], model: str) -> str:
    """What tells a batch from others."""
    digest = hashlib.sha256(model.encode("utf-8", "surrogatepass"))
    for request in requests:
        digest.update(json.dumps([request.custom_id, request.url, request.body]).encode())
    return digest.hexdigest()
