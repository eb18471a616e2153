"""Dropping the cached prefixes of one tenant: later requests have another salt, and find none of the earlier pages."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["PrefixEpochs"]

_MOST_TENANTS = 10_000


class PrefixEpochs:
    """For each tenant, how often its cached prefixes were dropped."""

    def __init__(self) -> None:
        self._epochs: dict[str, int] = {}
        self._first = 0

    def of(self, tenant: str) -> int:
        """The number of a tenant, which is a part of its salt.

        Args:
            tenant: As `RequestContext.tenant` has it.
        """
        return self._epochs.get(tenant, self._first)

    def drop(self, tenant: str) -> None:
        """Drops the cached prefixes of a tenant; those of all, if very many tenants have done so.

        Args:
            tenant: As `RequestContext.tenant` has it; not empty.
        """
        if tenant not in self._epochs and len(self._epochs) >= _MOST_TENANTS:
            # above every number in use: no earlier salt comes back
            self._first = max(self._epochs.values()) + 1
            self._epochs.clear()
            return
        self._epochs[tenant] = self.of(tenant) + 1

    def all(self) -> tuple[int, dict[str, int]]:
        """The number of tenants that are not listed, and the numbers of the others."""
        return self._first, dict(self._epochs)

    def set_all(self, first: int, of_tenants: Mapping[str, int]) -> None:
        """Takes the numbers of another process, as :meth:`all` returns them.

        Args:
            first: The number of tenants that are not listed.
            of_tenants: The numbers of the others.
        """
        self._first, self._epochs = first, dict(of_tenants)
