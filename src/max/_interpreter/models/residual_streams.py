"""The weights that mix residual streams, in NumPy."""

from __future__ import annotations

import numpy as np

from max._interpreter.core import Array, register


@register("mo.streams.gates")
def _gates(
    projection: Array,
    base: Array,
    scale: Array,
    hc_mult: int,
    hc_eps: float,
    hc_sinkhorn_iters: int,
) -> tuple[Array, ...]:
    parts = np.split(projection.astype(np.float64), [hc_mult, 2 * hc_mult], axis=1)
    bases = np.split(base.astype(np.float64), [hc_mult, 2 * hc_mult])
    logits = [part * factor + of for part, factor, of in zip(parts, scale, bases, strict=True)]
    # no overflow for large magnitudes
    pre, post = (0.5 * (1 + np.tanh(0.5 * part)) for part in logits[:2])
    mix = logits[2].reshape(-1, hc_mult, hc_mult)
    mix = np.exp(mix - mix.max(axis=2, keepdims=True))
    mix = mix / mix.sum(axis=2, keepdims=True) + hc_eps
    # Sinkhorn: columns and rows in turn; the softmax above was the first pass over rows
    for step in range(2 * hc_sinkhorn_iters - 1):
        mix = mix / (mix.sum(axis=1 if step % 2 == 0 else 2, keepdims=True) + hc_eps)
    return pre + hc_eps, 2 * post, mix.reshape(-1, hc_mult * hc_mult)
