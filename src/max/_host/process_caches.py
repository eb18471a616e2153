"""Caches that live as long as the process, in one owner that tests can make anew.

A module keeps its cache under a name of its own and reads it without a detour::

    _signatures: set[Signature] = process_cache(set())

A function keeps its results by its arguments, as with `functools.lru_cache`::

    @cached_results(4096)
    def symbol(name: str) -> DimExpr: ...

What may be found only once, or lives elsewhere, is no cache: tables of ops and kernels, code that programs call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, MutableMapping, MutableSet
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper as CachedFunction  # pyright: ignore[reportPrivateUsage]

__all__ = ["cached_results", "fresh_caches", "process_cache"]

Cache = TypeVar("Cache", bound="MutableMapping[Any, Any] | MutableSet[Any]")
Result = TypeVar("Result")

_caches: list[MutableMapping[Any, Any] | MutableSet[Any]] = []
_functions: list[CachedFunction[Any]] = []


def process_cache(cache: Cache) -> Cache:
    """Registers an empty mapping or set whose entries can be made again, and returns it."""
    _caches.append(cache)
    return cache


def cached_results(
    maxsize: int | None = None,
) -> Callable[[Callable[..., Result]], CachedFunction[Result]]:
    """Keeps the results of a function of a module, if they can be computed again.

    Args:
        maxsize: The number of results that are kept; None keeps all.
    """

    def decorate(function: Callable[..., Result]) -> CachedFunction[Result]:
        cached = functools.lru_cache(maxsize)(function)
        _functions.append(cached)
        return cached

    return decorate


@contextmanager
def fresh_caches() -> Generator[None]:
    """A ``with`` block in which all caches of the process begin empty; afterwards they are as before.

    Results of functions are computed again after the block. No other thread may use the engine meanwhile.
    """
    before = [_contents(cache) for cache in _caches]
    for cache in _caches:
        cache.clear()
    _forget_results()
    try:
        yield
    finally:
        _forget_results()
        # caches of modules that the block has imported begin empty again
        before += [_contents(cache)[:0] for cache in _caches[len(before) :]]
        for cache, entries in zip(_caches, before, strict=True):
            cache.clear()
            for entry in entries:
                if isinstance(cache, MutableMapping):
                    key, value = entry
                    cache[key] = value
                else:
                    cache.add(entry)


def _forget_results() -> None:
    for function in _functions:
        function.cache_clear()


def _contents(cache: MutableMapping[Any, Any] | MutableSet[Any]) -> list[Any]:
    """The entries of a cache, in their order."""
    return list(cache.items()) if isinstance(cache, MutableMapping) else list(cache)
