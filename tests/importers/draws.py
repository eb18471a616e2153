"""Random choices that the cases of all frameworks make."""

from __future__ import annotations

from typing import Any

import numpy as np


class Draws:
    """A source of random choices."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def int(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def choice(self, items: Any) -> Any:
        return items[self.int(0, len(items) - 1)]

    def bool(self) -> bool:
        return bool(self.int(0, 1))

    def sizes(self, low: int, high: int, empty: bool) -> tuple[int, ...]:
        """A shape of small, odd and sometimes empty axes."""
        sizes = [self.choice([1, 2, 3, 5, 7]) for _ in range(self.int(low, high))]
        if empty and sizes and self.int(0, 9) == 0:
            sizes[self.int(0, len(sizes) - 1)] = 0
        return tuple(sizes)
