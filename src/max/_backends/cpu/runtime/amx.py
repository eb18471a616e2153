"""Decides whether kernels may use AMX: the processor has it, the system grants it, and its products are correct.

The system saves the tile registers of a process only after a request (`platform.request_amx`).
:mod:`max._backends.cpu.runtime.amx_check` verifies products before the first use.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from max import kernel as k
from max._backends.cpu.runtime import platform
from max._host import machine
from max._host.disk_cache import content_key, default_cache, source_fingerprint
from max._host.process_caches import cached_results
from max._lazy import lazy_module

if TYPE_CHECKING:
    from max._backends.cpu.runtime import amx_check
else:
    amx_check = lazy_module("max._backends.cpu.runtime.amx_check")

logger = logging.getLogger("max.runtime")

_KIND = "amx"
"""The kind of entries of the disk cache."""


@cached_results()
def _is_usable(target: k.CPUTarget) -> bool:
    """Whether tile instructions may be used; checked once per target and process."""
    # without the request the first tile instruction raises SIGILL
    if not platform.request_amx():
        logger.info("the system does not grant the registers of AMX; kernels do without")
        return False
    if not _products_are_right(target):
        logger.warning(
            "AMX gives wrong products on this machine; kernels do without (MAX_CPU_FEATURES=-amx-tile skips this check)"
        )
        return False
    return True


def _products_are_right(target: k.CPUTarget) -> bool:
    """The result of the check; that of a target whose products are right is kept until the system starts again."""
    boot = machine.boot_id()
    key = None
    if boot is not None:
        sources = [source_fingerprint(package) for package in ("kernel", "_backends")]
        key = content_key(boot, target.triple, target.cpu, target.feature_string, *sources)
        # the check stages, compiles and interprets a kernel, which takes as long as the rest of a session
        if default_cache().get(_KIND, key) is not None:
            return True
    right = amx_check.products_are_right(target)
    if right and key is not None:
        default_cache().put(_KIND, key, b"right")
    return right


def native_target() -> k.CPUTarget:
    """The machine that runs this process, with AMX where it may be used.

    Raises:
        FlagError: ``MAX_CPU_FEATURES`` names no CPU feature.
    """
    target = k.host_target(tiles=True)
    if target.tile_instructions and not _is_usable(target):
        return target.without_tiles()
    return target
