"""Decides whether kernels may use AMX: the processor has it, the system grants it, and its products are correct.

The system saves the tile registers of a process only after a request (:func:`max._runtime.platform.request_amx`).
:mod:`max._backends.cpu.runtime.amx_check` verifies products before the first use.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from max import kernel as k
from max._lazy import lazy_module
from max._process import cached_results
from max._runtime import platform

if TYPE_CHECKING:
    from max._backends.cpu.runtime import amx_check
else:
    amx_check = lazy_module("max._backends.cpu.runtime.amx_check")

logger = logging.getLogger("max.runtime")


@cached_results()
def _is_usable(target: k.CPUTarget) -> bool:
    """Whether tile instructions may be used; checked once per target and process."""
    # without the request the first tile instruction raises SIGILL
    if not platform.request_amx():
        logger.info("the system does not grant the registers of AMX; kernels do without")
        return False
    if not amx_check.products_are_right(target):
        logger.warning(
            "AMX gives wrong products on this machine; kernels do without (MAX_CPU_FEATURES=-amx-tile skips this check)"
        )
        return False
    return True


def native_target() -> k.CPUTarget:
    """The machine that runs this process, with AMX where it may be used.

    Raises:
        FlagError: ``MAX_CPU_FEATURES`` names no CPU feature.
    """
    target = k.host_target(tiles=True)
    if target.tile_instructions and not _is_usable(target):
        return target.without_tiles()
    return target
