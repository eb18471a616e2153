"""Cells: the values behind eager tensors, computed or not, and the calls that compute them."""

# programs read the memory of tensors of the driver
# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from max import driver
from max._host.reentry import reentrant_lock
from max.experimental.programs.signatures import Signature
from max.experimental.programs.value_types import CellType

__all__ = ["Call", "Cell", "Reader", "Unsettled"]


class Reader:
    """A program with a copy of elements of cells."""

    __slots__ = ()

    def drop_copies(self) -> None:
        """Drops the copy, as a cell was written or others may write to its memory from now on."""
        raise NotImplementedError

    def holds(self, storage: driver.Tensor) -> bool:
        """Whether it holds a reference to a storage; it holds one at most."""
        raise NotImplementedError


class _Lease:
    """The owner of memory, for a program that only reads: its references can be counted."""

    __slots__ = ("__weakref__", "_owner")

    def __init__(self, owner: object) -> None:
        self._owner = owner


class _Users:
    """The programs that read the memory of a cell for more than one run."""

    __slots__ = ("leases", "readers")

    def __init__(self) -> None:
        self.readers: list[weakref.ref[Any]] = []
        self.leases: list[weakref.ref[_Lease]] = []


_users_lock = reentrant_lock()


class Cell:
    """A value: in memory, or the result of a call that was recorded.

    Args:
        type: Its type.
        storage: Its memory; None where it is not computed yet.
        call: The call that computes it, or the replay that the call is part of; None where it is in memory.
        index: The number of the result among those of the call. Not set in a replay.

    Attributes:
        tensor_reference: Weakly refers to the tensor on a cell that is not computed; a value without one is not kept.
            Not set in a replay.
        users: The programs that keep copies of the elements. Not set in a replay.
    """

    __slots__ = ("__weakref__", "call", "tensor_reference", "index", "storage", "type", "users")

    def __init__(
        self,
        type: CellType,
        storage: driver.Tensor | None = None,
        call: Call | Unsettled | None = None,
        index: int = 0,
    ) -> None:
        self.type, self.storage, self.call, self.index = type, storage, call, index
        self.tensor_reference: weakref.ref[Any] | None = None
        self.users: _Users | None = None

    def keep(self, storage: driver.Tensor) -> None:
        """Sets the elements, which were computed.

        Raises:
            RuntimeError: Their shape is not the recorded one.
        """
        if self.type.shape != storage.shape:
            raise RuntimeError(
                f"an eager tensor of shape {list(self.type.shape)} was computed with shape {list(storage.shape)}; "
                "please report this"
            )
        self.storage, self.call, self.tensor_reference, self.users = storage, None, None, None

    def _new_users(self) -> _Users:
        if self.users is None:
            self.users = _Users()
        return self.users

    def add_reader(self, reader: Reader) -> None:
        """Adds a program with a copy of the elements."""
        with _users_lock:
            users = self._new_users()
            users.readers = [
                *[each for each in users.readers if each() is not None],
                weakref.ref(reader),
            ]

    def drop_copies(self) -> None:
        """Drops copies of the elements, after a write or after others got access to the memory."""
        if self.users is not None:
            for reader in self.users.readers:
                if (copy := reader()) is not None:
                    copy.drop_copies()

    def borrowed_storage(self) -> driver.Tensor:
        """A driver tensor on the memory, for a program that only reads it and keeps it private."""
        storage = self.storage
        assert storage is not None
        if storage._read_only:
            storage._fixed_address()
        with _users_lock:
            users = self._new_users()
            lease = _Lease(storage._owner)
            users.leases = [
                *[each for each in users.leases if each() is not None],
                weakref.ref(lease),
            ]
        return driver.Tensor._wrap(
            storage._ptr, storage._dtype, storage._shape, None, lease, storage._stream,
            storage._read_only,
        )  # fmt: skip

    def references(self) -> tuple[int, int]:
        """The numbers of references that reading programs hold: to the storage, and to the owner of its memory."""
        storage, users = self.storage, self.users
        if storage is None or users is None:
            return 0, 0
        readers = [copy for each in users.readers if (copy := each()) is not None]
        leases = [each for each in users.leases if each() is not None]
        return sum([copy.holds(storage) for copy in readers]), len(leases)


class Call:
    """A recorded call of an op.

    Args:
        signature: The op, its arguments and types; see `Signature`.
        inputs: The tensors that it reads.
        place: The file and line of the user's program that made the call.

    Attributes:
        error: What its run raised when no value of it was needed; each use of a result raises it.
    """

    __slots__ = ("error", "inputs", "place", "results", "signature")

    def __init__(
        self, signature: Signature, inputs: Sequence[Cell], place: tuple[str, int]
    ) -> None:
        self.signature, self.inputs, self.place = signature, inputs, place
        self.results: tuple[weakref.ref[Cell], ...] = ()
        self.error: Exception | None = None


class Unsettled:
    """The calls of cells that are not yet recorded; see `max.experimental.replay.replays`."""

    __slots__ = ()

    def settle(self) -> None:
        """Records the calls."""
        raise NotImplementedError
