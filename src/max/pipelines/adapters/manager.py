"""The adapters of a model: those that are loaded, their slots in memory, and the requests that use them."""

from __future__ import annotations

import threading
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.driver import Tensor
from max.interfaces import RequestID
from max.pipelines.adapters.adapter import Adapter, AdapterError, Array
from max.pipelines.adapters.content_cache import ContentCache
from max.pipelines.adapters.layout import AdapterLayout, AdapterShape
from max.pipelines.adapters.placement import packed_terms, site_terms
from max.pipelines.adapters.reader import read_adapter
from max.pipelines.adapters.terms import AdapterBase
from max.pipelines.core.exceptions import UnknownAdapterError
from max.pipelines.kv_cache.page_tables import OutOfPagesError

__all__ = ["LoRAManager", "OutOfAdapterSlotsError"]

EXPECTED = 16
"""The most adapters whose memory is set aside before the cache gets the rest."""
FEWEST_WAITING = 8
"""Adapters whose contents may wait in memory for a slot, of any size."""
WAITING_BYTES = 256 << 20
"""The bytes that further ones may take together with them."""
KEPT_BYTES = 4 << 30
"""The most bytes of contents in a file without a name, of adapters that have been in a slot or found none."""


class OutOfAdapterSlotsError(OutOfPagesError):
    """All slots hold adapters of running requests.

    Args:
        total: The number of slots.
    """

    def __init__(self, total: int) -> None:
        # not that of OutOfPagesError, whose message speaks of pages
        RuntimeError.__init__(self, f"adapters: all {total} slots are in use by running requests")
        self.needed, self.free, self.total = 1, 0, total


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter as it lies in a slot.

    Args:
        parts: Offsets in the slot, and elements.
        forms: Rank and vectors of each site, int32 ``[sites, 2]``.
    """

    parts: Sequence[tuple[int, Array]]
    forms: npt.NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        """The bytes that its elements take."""
        return sum(values.nbytes for _, values in self.parts)

    @property
    def runs(self) -> npt.NDArray[np.int64]:
        """The first byte of each part in the slot, and its size, ``[parts, 2]``."""
        sizes = [(at * values.itemsize, values.nbytes) for at, values in self.parts]
        return np.array(sizes, np.int64).reshape(-1, 2)

    @property
    def pieces(self) -> list[memoryview]:
        """Its bytes: those of its forms, and of each part."""
        # the buffers of some dtypes cannot be shared as they are
        own = [values.view(np.uint8).data for _, values in self.parts]
        return [self.forms.view(np.uint8).reshape(-1).data, *own]


class _Loaded:
    """An adapter that requests may name.

    Args:
        name: Its name.
        path: Its files.
        digest: The digest of its contents.
        rank: Its greatest rank.
        runs: Where its contents lie in a slot, as `PackedAdapter.runs`.
    """

    def __init__(
        self, name: str, path: Path, digest: str, rank: int, runs: npt.NDArray[np.int64]
    ) -> None:
        self.name, self.path, self.digest, self.rank, self.runs = name, path, digest, rank, runs
        self.slot: int | None = None
        self.packed: PackedAdapter | None = None
        """Its contents, between their reading and their copy to a slot."""
        self.requests: set[RequestID] = set()
        """The requests that have named it and have not ended."""
        self.holders: set[RequestID] = set()
        """Those of them that may be in a batch: the slot is theirs."""
        self.used = 0


class LoRAManager:
    """The adapters of a model.

    Loading and unloading are thread-safe, even while a batch runs: a slot is written only while no request holds it.
    Slots are taken from the adapters that were used least recently.

    Args:
        base: The model.
        layout: Its sites.
        shape: The memory for adapters.
    """

    def __init__(self, base: AdapterBase, layout: AdapterLayout, shape: AdapterShape) -> None:
        self.base, self.layout, self.shape = base, layout, shape
        # pages are mapped on first use: slots without an adapter take no memory
        self.memory = Tensor.zeros((shape.slots, layout.elements), shape.dtype)
        self._memory = self.memory.to_numpy()
        self._forms = np.zeros((shape.slots, layout.count, 2), np.int32)
        self.forms = Tensor.from_numpy(self._forms)
        self._kept = ContentCache(KEPT_BYTES)
        self._lock = threading.RLock()  # guards all below, not the reading of files
        self._by_name: dict[str, _Loaded] = {}
        self._by_slot: list[_Loaded | None] = [None] * shape.slots
        self._by_request: dict[RequestID, _Loaded] = {}
        self._lazy: set[RequestID] = set()
        self._clock = 0

    @property
    def names(self) -> list[str]:
        """The names of the adapters that are loaded."""
        with self._lock:
            return list(self._by_name)

    @property
    def total_bytes(self) -> int:
        """The bytes that adapters of the greatest rank take in all slots, up to `EXPECTED` of them.

        Tables of tokens and experts, which few adapters change, are not counted.
        """
        sizes = {
            site.name: (site.inputs + site.columns)
            for site in self.layout.sites.values()
            if site.expert is None
        }
        # norms have no matrices
        norms = {s.name for s in self.layout.sites.values() if s.norm_offset is not None}
        inner = sum(size for name, size in sizes.items() if "." in name and name not in norms)
        return inner * self.shape.max_rank * self._memory.itemsize * min(self.shape.slots, EXPECTED)

    def load(self, name: str, path: Path) -> None:
        """Reads an adapter, checks it against the model, and makes it available to requests.

        Args:
            name: Its name.
            path: Its folder or file.

        Raises:
            AdapterError: The name is taken by another adapter, or the adapter does not fit.
        """
        adapter, packed = self._read(path)
        with self._lock:
            known = self._by_name.get(name)
            if known is not None and known.digest != adapter.digest:
                raise AdapterError(
                    f"an adapter named {name!r} is loaded",
                    "Unload it first, or choose another name.",
                )
            # the same contents again
            if known is not None:
                return
            loaded = _Loaded(name, path, adapter.digest, adapter.rank, packed.runs)
            self._by_name[name] = loaded
            # the first ones go to memory at once
            if None in self._by_slot:
                loaded.packed = packed
                self._place(loaded)
                return
        self._kept.keep(adapter.digest, packed.pieces)

    def unload(self, name: str) -> Set[RequestID]:
        """Takes an adapter from requests to come; those that have named it go on with it.

        Args:
            name: Its name.

        Returns:
            The requests that still use it, a set that becomes empty as they end; then it is gone from memory.

        Raises:
            UnknownAdapterError: It is not loaded.
        """
        with self._lock:
            loaded = self._by_name.pop(name, None)
            if loaded is None:
                raise self._unknown(name)
            if not loaded.requests:
                self._vacate(loaded)
            return loaded.requests

    def prepare(self, name: str) -> None:
        """Reads an adapter that is in no slot and not kept, so that the next batch finds it; thread-safe.

        Args:
            name: Its name.

        Raises:
            UnknownAdapterError: It is not loaded.
            AdapterError: Its files have changed, or cannot be read any more.
        """
        with self._lock:
            loaded = self._by_name.get(name)
            if loaded is None:
                raise self._unknown(name)
            if loaded.slot is not None or loaded.packed is not None:
                return
            if self._kept.has(loaded.digest) or not self._may_wait():
                return
        packed = self._read_unchanged(loaded)
        with self._lock:
            # a batch may have placed it meanwhile
            if loaded.slot is None:
                loaded.packed = packed
                self._clock += 1
                loaded.used = self._clock

    def attach(self, context: Any) -> None:
        """Binds a new request to the adapter that it names; ``context.adapter`` then identifies the contents.

        Args:
            context: The request.

        Raises:
            UnknownAdapterError: The adapter is not loaded.
        """
        name: str = getattr(context, "adapter", "")
        if not name:
            return
        with self._lock:
            loaded = self._by_name.get(name)
            if loaded is None:
                raise self._unknown(name)
            # prefixes are shared by contents, not by names
            context.adapter = loaded.digest
            loaded.requests.add(context.request_id)
            self._by_request[context.request_id] = loaded

    def detach(self, request_id: RequestID) -> None:
        """Ends the use of an adapter by a request; nothing happens if it uses none."""
        with self._lock:
            loaded = self._by_request.pop(request_id, None)
            self._lazy.discard(request_id)
            if loaded is None:
                return
            loaded.requests.discard(request_id)
            loaded.holders.discard(request_id)
            if not loaded.requests and self._by_name.get(loaded.name) is not loaded:
                self._vacate(loaded)

    def hold(self, context: Any) -> None:
        """Keeps the adapter of a request in a slot until `drop`.

        Args:
            context: The request.

        Raises:
            OutOfAdapterSlotsError: Running requests hold all slots.
            UnknownAdapterError: The adapter of a request that came without `attach` is not loaded.
            AdapterError: Its files have changed, or cannot be read any more.
        """
        if not getattr(context, "adapter", ""):
            return
        key = context.request_id
        with self._lock:
            if key not in self._by_request:
                self.attach(context)
                self._lazy.add(key)
            loaded = self._by_request[key]
            if loaded.slot is None:
                self._place(loaded)
            loaded.holders.add(key)
            self._clock += 1
            loaded.used = self._clock

    def release(self, request_id: RequestID) -> None:
        """Gives up the slot of a request's adapter, which stays in memory until others need it."""
        with self._lock:
            loaded = self._by_request.get(request_id)
            if loaded is not None:
                loaded.holders.discard(request_id)
            if request_id in self._lazy:
                self.detach(request_id)

    def slots(self, batch: Sequence[Any]) -> npt.NDArray[np.int32]:
        """The slot of the adapter of each request, int32 ``[batch]``; -1: none."""
        with self._lock:
            found = [self._by_request.get(context.request_id) for context in batch]
        slots = np.full(len(batch), -1, np.int32)
        for index, loaded in enumerate(found):
            if loaded is not None:
                if loaded.slot is None:
                    raise RuntimeError(f"the adapter {loaded.name!r} is in no slot")
                slots[index] = loaded.slot
        return slots

    def _read(self, path: Path) -> tuple[Adapter, PackedAdapter]:
        """Reads an adapter and checks it against the model."""
        adapter = read_adapter(path, self.shape.max_rank)
        parts: list[tuple[int, Array]] = []
        forms = np.zeros((self.layout.count, 2), np.int32)
        for site, terms in site_terms(adapter, self.base, self.layout):
            parts += packed_terms(site, terms, self._memory.dtype)
            forms[site.index] = terms.rank, terms.has_vectors
        return adapter, PackedAdapter(parts, forms)

    def _read_unchanged(self, entry: _Loaded) -> PackedAdapter:
        """The contents of an adapter, from its files."""
        adapter, packed = self._read(entry.path)
        if adapter.digest != entry.digest:
            raise AdapterError(
                f"the files of the adapter {entry.name!r} have changed since it was loaded",
                "Unload it, and load it again.",
            )
        return packed

    def _may_wait(self) -> bool:
        """Whether the contents of one more adapter may wait for a slot; drops those that no request names any more.

        If requests name all that wait, the step itself reads the files of others.
        """
        waiting = [other for other in self._by_name.values() if other.packed is not None]
        if len(waiting) < FEWEST_WAITING:
            return True
        if sum(other.packed.nbytes for other in waiting if other.packed) < WAITING_BYTES:
            return True
        unnamed = [other for other in waiting if not other.requests]
        if unnamed:  # their requests were cancelled before a batch took them
            min(unnamed, key=lambda other: other.used).packed = None
        return bool(unnamed)

    def _place(self, adapter: _Loaded) -> None:
        """Copies an adapter to a slot: a free one, or that of the adapter that was used least recently."""
        if None in self._by_slot:
            slot = self._by_slot.index(None)
        else:
            idle = [other for other in self._by_slot if other is not None and not other.holders]
            if not idle:
                raise OutOfAdapterSlotsError(self.shape.slots)
            last = min(idle, key=lambda other: other.used)
            assert last.slot is not None
            slot = last.slot
            # read again when a request names it
            self._kept.keep(last.digest, self._pieces(slot, last.runs))
            last.slot = None
            self._by_slot[slot] = None
        if adapter.packed is not None or not self._kept.restore(
            adapter.digest, self._pieces(slot, adapter.runs)
        ):
            packed = adapter.packed or self._read_unchanged(adapter)
            row = self._memory[slot]
            for at, values in packed.parts:
                row[at : at + values.size] = values
            self._forms[slot] = packed.forms
        adapter.packed, adapter.slot, self._by_slot[slot] = None, slot, adapter
        self._clock += 1
        adapter.used = self._clock

    def _pieces(self, slot: int, runs: npt.NDArray[np.int64]) -> list[memoryview]:
        """The bytes of a slot that an adapter has, as `PackedAdapter.pieces`."""
        row = self._memory[slot].view(np.uint8).data
        forms = self._forms[slot].view(np.uint8).reshape(-1).data
        return [forms, *(row[at : at + size] for at, size in runs.tolist())]

    def _vacate(self, adapter: _Loaded) -> None:
        """Removes an adapter from its slot, and its contents where no other one has the same."""
        adapter.packed = None
        if all(other.digest != adapter.digest for other in self._by_name.values()):
            self._kept.forget(adapter.digest)
        if adapter.slot is not None:
            self._by_slot[adapter.slot] = None
            adapter.slot = None

    def _unknown(self, name: str) -> UnknownAdapterError:
        names = ", ".join(sorted(self._by_name)) or "none"
        return UnknownAdapterError(
            f"there is no adapter {name!r}; loaded are: {names}", param="model"
        )
