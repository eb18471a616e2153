"""Numbers and integer arrays beside a tensor: which ones a dtype takes, and the dtype of the result."""

from __future__ import annotations

import random

from tests.differential.families import _graph
from tests.differential.program import Family

FORMS = (
    "x + {}",
    "{} - x",
    "x * {}",
    "x > {}",
    "x ** {}",
    "ops.max(x, {})",
    "ops.where(x > x, x, {})",
)
EDGES = (2**7, 2**8, 2**11, 2**15, 65504, 2**16, 2**24, 2**31, 2**53, 2**63, 2**64)
FLOATS = ("0.1", "2.0", "4097.0", "16777217.0", "1e300", "-1e300", "float('inf')", "float('nan')")
TAKEN = ("f16", "bf16", "f32", "f64", "si8", "ui8", "si32", "si64", "ui32")


def programs(seed: int) -> list[str]:
    """All forms with numbers at the edges of what a dtype holds, and drawn ones."""
    draw = random.Random(seed)
    lines: list[str] = []
    for dtype in TAKEN:
        edges = [edge + step for edge in EDGES for step in (-1, 0, 1)]
        numbers = [str(n) for n in draw.sample(edges, 14)] + [
            str(-n) for n in draw.sample(edges, 6)
        ]
        numbers += [str(draw.randrange(2 ** draw.randrange(1, 66))) for _ in range(6)]
        numbers += [
            f"np.int64({draw.choice((3, 257, 2049, 2**24 + 1, 2**53 + 1))})" for _ in range(3)
        ]
        numbers += [
            f"np.array([1, {draw.choice((3, 257, 2049, 2**24 + 1, 2**53 + 1))}])" for _ in range(3)
        ]
        numbers += ["10**30", "-(10**30)", *draw.sample(FLOATS, 5)]
        for number in numbers:
            text = f"({number})" if number.startswith("-") else number
            # NumPy's own operators loop over the elements of its arrays
            forms = [f for f in FORMS if not (f.startswith("{}") and number.startswith("np."))]
            lines.append(f"{dtype}[2]: {draw.choice(forms).format(text)}")
    return list(dict.fromkeys(lines))


FAMILY = Family(programs=programs, run=_graph.run)
