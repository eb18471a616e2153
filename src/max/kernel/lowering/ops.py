"""The table of ops that bind a value, with their lowering functions."""

from __future__ import annotations

from collections.abc import Callable

from max._abi import Context
from max.kernel.ir.nodes import Let
from max.kernel.lowering.arithmetic import (
    absolute,
    binary,
    copysign,
    count_zeros,
    extremum,
    floordiv,
    fma,
    invert,
    libm,
    lower_plain,
    neg,
    scale,
    shift,
)
from max.kernel.lowering.conversions import bitcast, cast
from max.kernel.lowering.dots import (
    dot_bf16,
    dot_i8,
    dot_i16,
    narrow_dot_i8,
    narrow_signed_dot_i8,
    pair_dot_i8,
    signed_dot_i8,
)
from max.kernel.lowering.lanes import extract, insert, lookup, permute, select, shuffle, splat
from max.kernel.lowering.memory import (
    address,
    arg,
    atomic_add,
    gather,
    gep,
    load,
    masked_load,
    opaque,
    read_slot,
)
from max.kernel.lowering.reductions import mask_reduce, reduce, reduce_extremum
from max.kernel.lowering.types import llvm_type
from max.kernel.lowering.workers import context_value
from max.kernel.lowering.writer import Writer


def lower_let(w: Writer, s: Let) -> None:
    """Lowers one binding."""
    OPS.get(s.op, lower_plain)(w, s)


OPS: dict[str, Callable[[Writer, Let], None]] = {
    "read": read_slot,
    "load": load,
    "masked_load": masked_load,
    "gather": gather,
    "masked_gather": gather,
    "gep": gep,
    "arg": arg,
    "ctx": lambda w, s: w.alias(s, context_value(w, Context(s.attr), llvm_type(s.ref.type))),
    "address": address,
    "splat": splat,
    "extract": extract,
    "insert": insert,
    "shuffle": shuffle,
    "select": select,
    "cast": cast,
    "bitcast": bitcast,
    "neg": neg,
    "not": invert,
    "abs": absolute,
    "fma": fma,
    "min": extremum,
    "max": extremum,
    "floordiv": floordiv,
    "mod": floordiv,
    "shr": shift,
    "shl": shift,
    "copysign": copysign,
    "scale": scale,
    "reduce_add": reduce,
    "reduce_mul": reduce,
    "reduce_max": reduce_extremum,
    "reduce_min": reduce_extremum,
    "any": lambda w, s: mask_reduce(w, s, "or"),
    "all": lambda w, s: mask_reduce(w, s, "and"),
    "ctlz": lambda w, s: count_zeros(w, s, "ctlz"),
    "cttz": lambda w, s: count_zeros(w, s, "cttz"),
    "lookup": lookup,
    "permute": permute,
    "dot_bf16": dot_bf16,
    "dot_i8": dot_i8,
    "narrow_dot_i8": narrow_dot_i8,
    "signed_dot_i8": signed_dot_i8,
    "narrow_signed_dot_i8": narrow_signed_dot_i8,
    "pair_dot_i8": pair_dot_i8,
    "dot_i16": dot_i16,
    "atomic_add": atomic_add,
    "opaque": opaque,
    "libm": libm,
    "ult": lambda w, s: binary(w, s, "icmp ult"),
    "uge": lambda w, s: binary(w, s, "icmp uge"),
    "udiv": lambda w, s: binary(w, s, "udiv"),
    "umod": lambda w, s: binary(w, s, "urem"),
}
