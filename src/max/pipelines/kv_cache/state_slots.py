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

    A step that verifies drafted tokens changes a state as if all of them were right. Therefore the state is saved in a
    spare slot before, and if a token was wrong the request goes on with this slot: its state is behind the text then,
    and its next step begins where the last one did.

    Args:
        num_slots: The number of slots.
        spares: The number of further slots, for saved states.

    Raises:
        ValueError: `num_slots` is less than 1.
    """

    def __init__(self, num_slots: int, spares: int = 0) -> None:
        if num_slots < 1:
            raise ValueError(f"StateSlots: {num_slots} slots; expected at least 1")
        self.num_slots, self.spares = num_slots, spares
        self._free = list(reversed(range(num_slots)))
        self._free_spares = list(reversed(range(num_slots, num_slots + spares)))
        self._slots: dict[RequestID, int] = {}
        self._saved: dict[RequestID, int] = {}  # the slots of saved states
        self._behind: dict[RequestID, int] = {}

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

    def save(self, request_id: RequestID) -> tuple[int, int]:
        """Takes a spare slot for the state of a request, until :meth:`keep` or :meth:`rewind`.

        Args:
            request_id: The request.

        Returns:
            The slot of the request, whose state the caller copies, and the spare slot.

        Raises:
            KeyError: The request owns no slot.
            OutOfSlotsError: No spare slot is free.
        """
        slot = self.slot(request_id)
        if request_id in self._saved:  # its last step has failed
            self.rewind(request_id, self.behind(request_id))
            slot = self._slots[request_id]
        if not self._free_spares:
            raise OutOfSlotsError(self.spares)
        self._saved[request_id] = spare = self._free_spares.pop()
        return slot, spare

    def saved_slots(self, request_id: RequestID) -> tuple[int, int]:
        """The slot of a request and the spare slot of its saved state.

        Args:
            request_id: The request.

        Raises:
            KeyError: No state is saved.
        """
        return self.slot(request_id), self._saved[request_id]

    def keep(self, request_id: RequestID) -> None:
        """Drops the saved state of a request, if there is one: its own is that of all its processed tokens.

        Args:
            request_id: The request.
        """
        self._behind.pop(request_id, None)
        spare = self._saved.pop(request_id, None)
        if spare is not None:
            self._free_spares.append(spare)

    def rewind(self, request_id: RequestID, behind: int) -> None:
        """Goes back to the saved state of a request.

        Args:
            request_id: The request.
            behind: The number of tokens whose keys are in the pages, and that the state lacks.

        Raises:
            KeyError: No state is saved.
        """
        spare = self._saved.pop(request_id)
        self._free_spares.append(self._slots[request_id])
        self._slots[request_id] = spare
        self._behind[request_id] = behind

    def behind(self, request_id: RequestID) -> int:
        """The number of tokens of a request whose keys are in the pages, and that its state lacks.

        Args:
            request_id: The request.
        """
        return self._behind.get(request_id, 0)

    def release(self, request_id: RequestID) -> None:
        """Frees the slot of a request.

        Args:
            request_id: The request.

        Raises:
            KeyError: The request owns no slot.
        """
        slot = self.slot(request_id)
        self.keep(request_id)
        del self._slots[request_id]
        # a rewound request may own a spare one: any slot may be spare as long as their numbers are right
        self._free.append(slot)

    def check(self) -> None:
        """Checks that every slot is free or has one owner; for tests.

        Raises:
            AssertionError: A slot is lost or counted twice.
        """
        slots = [*self._free, *self._slots.values()]
        assert len(slots) == self.num_slots, "a slot is lost or spare"
        slots += [*self._free_spares, *self._saved.values()]
        assert sorted(slots) == list(range(self.num_slots + self.spares)), (
            "a slot is lost or doubled"
        )
