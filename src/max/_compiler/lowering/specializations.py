"""The specialized kernels of this process, for compilations that request the same ones again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from max import kernel as k
from max._config import dump_log, flags
from max._host.reentry import reentrant_lock

__all__ = ["Specializations", "specializations"]


class Specializations:
    """Kernel IR by request, the least recently requested dropped first.

    A request must determine the IR: the function, its specs, parameters and target, all compared by value or identity.

    Args:
        limit: The maximum of the lengths of the printed IR, summed. The IR itself takes about ten times as many bytes.
    """

    def __init__(self, limit: int = 4 << 20) -> None:
        self._limit = limit
        self._irs: OrderedDict[Hashable, k.KernelIR] = OrderedDict()
        self._length = 0
        self._lock = reentrant_lock()

    def get(self, request: Hashable, specialize: Callable[[], k.KernelIR]) -> k.KernelIR:
        """The IR of a request; `specialize` makes it on a miss.

        A dump of kernels shows each specialization, so that nothing is reused while kernels are dumped.
        """
        if dump_log("kernels"):
            return specialize()
        # checks and plain Python are part of the IR; at a MAX_CHECK of 2 it was verified
        request = (
            request,
            flags.MAX_KERNEL_CHECK,
            flags.MAX_KERNEL_INTERPRET,
            flags.MAX_CHECK >= 2,
        )
        with self._lock:
            ir = self._irs.get(request)
            if ir is not None:
                self._irs.move_to_end(request)
                return ir
        # outside of the lock, as it takes long: two threads may specialize one request
        ir = specialize()
        with self._lock:
            if request not in self._irs:
                self._irs[request] = ir
                self._length += len(ir.text)
            while self._length > self._limit and len(self._irs) > 1:
                _, dropped = self._irs.popitem(last=False)
                self._length -= len(dropped.text)
        return ir


specializations = Specializations()
