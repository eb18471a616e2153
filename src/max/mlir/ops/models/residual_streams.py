"""Ops on mixed residual streams."""

from __future__ import annotations

from max.dtype import DType
from max.mlir.declare import NamedTypes, declare
from max.mlir.operand import Operand
from max.mlir.operation import Attrs, Types, define
from max.mlir.types import TensorType

_F32 = (DType.float32,)


def _gate_types(types: NamedTypes, attrs: Attrs) -> Types:
    """The weights of the streams in the input of a layer, of its output in the streams, and the mixing matrix."""
    op, mult = "streams.gates", attrs["hc_mult"]
    for name in ("hc_mult", "hc_sinkhorn_iters"):
        if attrs[name] < 1:
            raise ValueError(f"{op}: {name} is {attrs[name]}, expected 1 or more")
    projection = types["hc_proj"]
    for name, size in (
        # a number for the input and one for the output of each stream, and a matrix that mixes them
        ("hc_proj", (2 + mult) * mult),
        ("pre_post_comb_b", (2 + mult) * mult),
        ("pre_post_comb_scale", 3),
    ):
        type_ = types[name]
        if type_.shape[-1:] != type_.with_shape((size,)).shape:
            raise ValueError(
                f"{op}: {name} is {type_.short}, expected {size} as the last dimension"
            )
    rows = projection.shape[0]
    return tuple(
        [
            TensorType.get(DType.float32, projection.with_shape((rows, n)).shape, projection.device)
            for n in (mult, mult, mult * mult)
        ]
    )


define(
    declare(
        "mo.streams.gates",
        (
            Operand("hc_proj", _F32, 2),
            Operand("pre_post_comb_b", _F32, 1),
            Operand("pre_post_comb_scale", _F32, 1),
        ),
        3,
        _gate_types,
        attributes={"hc_mult": int, "hc_eps": float, "hc_sinkhorn_iters": int},
        takes=(
            "hc_proj f32 `[n, (2 + m) * m]`, pre_post_comb_b f32 `[(2 + m) * m]`, "
            "pre_post_comb_scale f32 `[3]`"
        ),
        gives=(
            "f32 `[n, m]`, `[n, m]`, `[n, m * m]`: weights of the streams in the input of a"
            " layer, of its output in the streams, their mixing matrix (columns sum to 1)"
        ),
        doc="`hc_mult` (m), `hc_eps`, `hc_sinkhorn_iters`",
    )
)
