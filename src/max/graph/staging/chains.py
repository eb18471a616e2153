"""The order of side effects in a graph: each op with side effects takes a chain and returns the next one."""

# the documented name of chains starts with an underscore
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence

from max import mlir
from max.graph.type import DeviceRef
from max.graph.value import _ChainValue

__all__ = ["Chains", "DeviceChainMap"]


class Chains:
    """The chains of one graph.

    Args:
        stage: Stages an op without operands into the graph, and returns its results.
    """

    def __init__(self, stage: Callable[[str], Sequence[mlir.SSAValue]]) -> None:
        self._stage = stage
        self._current: mlir.SSAValue | None = None
        self._input: mlir.BlockArgument | None = None
        self._ready: _ChainValue | None = None

    def begin(self, chain: mlir.BlockArgument) -> None:
        """Starts with a chain that the graph's callers pass."""
        self._current = self._input = chain

    @property
    def current(self) -> _ChainValue:
        """The chain that the next side effect takes; the first one is created unless callers pass it."""
        if self._current is None:
            self._current = self._stage("mo.chain_create")[0]
        return _ChainValue(self._current)

    @current.setter
    def current(self, chain: _ChainValue) -> None:
        self._current = chain.to_mlir()

    @property
    def ready(self) -> _ChainValue:
        """A chain that waits for nothing and is never advanced."""
        if self._ready is None:
            self._ready = _ChainValue(self._stage("mo.chain_create")[0])
        return self._ready

    @property
    def has_advanced(self) -> bool:
        """Whether the current chain is another one than callers pass."""
        return self._current is not self._input

    def take_input(self) -> mlir.BlockArgument | None:
        """The chain that callers pass, at the first call; None later, and where they pass none."""
        chain, self._input = self._input, None
        return chain


class DeviceChainMap(MutableMapping[DeviceRef, _ChainValue]):
    """The chain of each device. Side effects of all devices have one order: every entry is the graph's chain.

    Args:
        chains: The graph's chains.
    """

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self._devices: dict[DeviceRef, None] = {}

    def __getitem__(self, device: DeviceRef) -> _ChainValue:
        self._devices[device] = None
        return self._chains.current

    def __setitem__(self, device: DeviceRef, chain: _ChainValue) -> None:
        self._devices[device] = None
        self._chains.current = chain

    def __delitem__(self, device: DeviceRef) -> None:
        del self._devices[device]

    def __iter__(self) -> Iterator[DeviceRef]:
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)
