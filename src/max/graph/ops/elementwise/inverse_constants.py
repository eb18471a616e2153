"""Constants of inverse functions that are composed of ops."""

from __future__ import annotations

__all__ = ["ARC_TANGENT_P", "ARC_TANGENT_Q", "LARGE"]

ARC_TANGENT_P = (
    -8.750608600031904122785e-1,
    -1.615753718733365076637e1,
    -7.500855792314704667340e1,
    -1.228866684490136173410e2,
    -6.485021904942025371773e1,
)
ARC_TANGENT_Q = (
    1.0,
    2.485846490142306297962e1,
    1.650270098316988542046e2,
    4.328810604912902668951e2,
    4.853903996359136964868e2,
    1.945506571482613964425e2,
)
"""The arc tangent is ``x + x * z * P(z) / Q(z)`` with ``z = x * x`` for ``|x| <= 0.66`` (Cephes, Moshier 1984)."""
LARGE = 1e4
"""Beyond this, 1 is lost beside the square of a float32; of a float64 the formulas lose no digits either."""
