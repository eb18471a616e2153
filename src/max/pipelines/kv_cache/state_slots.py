"""The slots of recurrent states and their owners. No tensors."""

from __future__ import annotations

from max.interfaces import RequestID
from max.pipelines.kv_cache.page_tables import OutOfPagesError


class OutOfSlotsError(OutOfPagesError):
    """All slots of recurrent states are in use.

    Args:
        total: The number of slots.
    """

    def __init__(self, total: int) -> None:
        RuntimeError.__init__(
            self, f"recurrent states: all {total} slots are in use; a sequence needs one"
        )
        self.needed, self.free, self.total = 1, 0, total


class StateSlots:
    """Allocates slots; the slot freed last is allocated first, as its memory is likely in the processor's caches.

    Args:
        num_slots: The number of slots.

    Raises:
        ValueError: `num_slots` is less than 1.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"StateSlots: {num_slots} slots; expected at least 1")
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._slots: dict[RequestID, int] = {}

    @property
    def free_slots(self) -> int:
        """The number of slots that no sequence owns."""
        return len(self._free)

    def claim(self, request_id: RequestID) -> int:
        """Assigns a free slot to a request.

        Args:
            request_id: The request, which owns no slot.

        Raises:
            OutOfSlotsError: No slot is free.
            ValueError: The request already owns a slot.
        """
        if request_id in self._slots:
            raise ValueError(f"recurrent states: request {request_id} has a slot already")
        if not self._free:
            raise OutOfSlotsError(self.num_slots)
        self._slots[request_id] = slot = self._free.pop()
        return slot

    def slot(self, request_id: RequestID) -> int:
        """The slot of a request.

        Args:
            request_id: The request.

        Raises:
            KeyError: The request owns no slot.
        """
        try:
            return self._slots[request_id]
        except KeyError:
            raise KeyError(f"recurrent states: request {request_id} has no slot") from None

    def release(self, request_id: RequestID) -> None:
        """Frees the slot of a request.

        Args:
            request_id: The request.

        Raises:
            KeyError: The request owns no slot.
        """
        slot = self.slot(request_id)
        del self._slots[request_id]
        self._free.append(slot)

    def check(self) -> None:
        """Checks that every slot is free or has one owner; for tests.

        Raises:
            AssertionError: A slot is lost or counted twice.
        """
        slots = [*self._free, *self._slots.values()]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or doubled"
