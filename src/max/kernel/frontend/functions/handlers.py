"""The table of all functions of the language, with the handlers that emit them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from max.kernel.frontend.functions import control, dots, elementary, matrix_tiles, python, vectors
from max.kernel.frontend.functions.table import Handler

HANDLERS: Mapping[Any, Handler] = {
    **vectors.FUNCTIONS,
    **elementary.FUNCTIONS,
    **dots.FUNCTIONS,
    **control.FUNCTIONS,
    **python.FUNCTIONS,
    **matrix_tiles.FUNCTIONS,
}
