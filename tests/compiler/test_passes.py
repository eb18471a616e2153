"""Each pass on a small module; golden files hold the MLIR text after the pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from max._backends import BackendOptions, Backends, backends_for
from max._backends.cpu.backend import CPUBackend
from max._backends.cpu.passes.packed_ops import GroupedProductsOp
from max._compiler import mok
from max._compiler.pipeline import optimize, steps
from max.dtype import DType
from max.mlir import ModuleOp, print_module, verify_module
from tests.devices.fake import fake_devices

F = "f32, cpu:0"
X = f"!mo.tensor<[n, 8], {F}>"
XT = f"!mo.tensor<[8, n], {F}>"
ROW = f"!mo.tensor<[n, 1], {F}>"
VEC = f"!mo.tensor<[8], {F}>"
ONE = f"!mo.tensor<[], {F}>"
W = f"!mo.tensor<[16, 8], {F}>"
WT = f"!mo.tensor<[8, 16], {F}>"
QKV = f"!mo.tensor<[b, n, 64], {F}>"
HEADS = f"!mo.tensor<[b, n, 8, 8], {F}>"
Q = f"!mo.tensor<[b, n, 4, 8], {F}>"
KV = f"!mo.tensor<[b, n, 2, 8], {F}>"
APART = f"!mo.tensor<[b, n, 2, 1, 8], {F}>"
SPREAD = f"!mo.tensor<[b, n, 2, 2, 8], {F}>"
QT = f"!mo.tensor<[b, 4, n, 8], {F}>"
KT = f"!mo.tensor<[b, 4, 8, n], {F}>"
TESTS = "!mo.tensor<[b, 4, n, n], bool, cpu:0>"
SCORES = f"!mo.tensor<[b, 4, n, n], {F}>"
MASK = f"!mo.tensor<[b, 1, 1, n], {F}>"
OUT = f"!mo.tensor<[b, n, 32], {F}>"
Y = f"!mo.tensor<[n, 16], {F}>"
I8, I32 = "!mo.tensor<[n, 40], si8, cpu:0>", "!mo.tensor<[n, 64], si32, cpu:0>"


HALVES = ", ".join(["0.5"] * 8)
IMAGE, LAST = f"!mo.tensor<[n, 8, h, w], {F}>", f"!mo.tensor<[n, h, w, 8], {F}>"
FILTER = f"!mo.tensor<[3, 3, 8, 8], {F}>"
STEPS = "stride = array<i64: 1, 1>, dilation = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64"
ROWS, EXPERTS = "!mo.tensor<[n, 48], f32, cpu:0>", "!mo.tensor<[3, 48, 48], f32, cpu:0>"
STARTS, IDS = "!mo.tensor<[4], ui32, cpu:0>", "!mo.tensor<[3], si32, cpu:0>"


def grouped(name: str, rows: str, weight: str) -> str:
    """A product of groups of rows with the weights of their experts."""
    types = f"({ROWS}, {EXPERTS}, {STARTS}, {IDS}, !mo.tensor<[2], ui32, cpu:0>) -> {ROWS}"
    return f"%{name} = mo.grouped_matmul.ragged(%{rows}, %{weight}, %s, %i, %t) : {types}\n"


def graph(inputs: str, outputs: str, body: str) -> str:
    return f"builtin.module {{ mo.graph @g({inputs}) -> ({outputs}) {{ {body} }} }}"


SOURCES: dict[str, tuple[str, str]] = {
    "drop_unused_ops": (
        "drop-unused-ops",
        graph(
            f"%x: {X}",
            X,
            f"""
            %a = mo.slice(%x) {{start = #mo.shape<[5, 0]>, stop = #mo.shape<[6, 8]>, step = #mo.shape<[1, 1]>}} : ({X})
                -> !mo.tensor<[1, 8], {F}>
            %b = mo.neg(%x) : ({X}) -> {X}
            mo.output(%b) : ({X}) -> ()""",
        ),
    ),
    "resolve_sizes": (
        "resolve-sizes",
        graph(
            f"%x: {X}",
            f"!mo.tensor<[rest + rows, 8], {F}>",
            f"""
            %a = mo.slice(%x) {{start = #mo.shape<[2, 0]>, stop = #mo.shape<[n, 8]>, step = #mo.shape<[1, 1]>}} : ({X})
                -> !mo.tensor<[rest, 8], {F}>
            %b = mo.rebind(%x) {{message = ""}} : ({X}) -> !mo.tensor<[rows, 8], {F}>
            %c = mo.concat(%a, %b) {{axis = 0 : i64}} : (!mo.tensor<[rest, 8], {F}>, !mo.tensor<[rows, 8], {F}>)
                -> !mo.tensor<[rest + rows, 8], {F}>
            mo.output(%c) : (!mo.tensor<[rest + rows, 8], {F}>) -> ()""",
        ),
    ),
    "insert_checks": (
        "insert-checks",
        graph(
            f"%x: {X}, %y: !mo.tensor<[m, 8], {F}>",
            f"!mo.tensor<[n - 2, 8], {F}>, !mo.tensor<[1, 8], {F}>, !mo.tensor<[2, 8], {F}>, {X}",
            f"""
            %a = mo.slice(%x) {{start = #mo.shape<[2, 0]>, stop = #mo.shape<[n, 8]>, step = #mo.shape<[1, 1]>}} : ({X})
                -> !mo.tensor<[n - 2, 8], {F}>
            %b = mo.reduce_max(%x) {{axis = 0 : i64}} : ({X}) -> !mo.tensor<[1, 8], {F}>
            %c = mo.slice(%x) {{start = #mo.shape<[n - 2, 0]>, stop = #mo.shape<[n, 8]>, step = #mo.shape<[1, 1]>}}
                : ({X}) -> !mo.tensor<[2, 8], {F}>
            %d = mo.rebind(%y) {{message = "as long as x"}} : (!mo.tensor<[m, 8], {F}>) -> {X}
            mo.output(%a, %b, %c, %d)
                : (!mo.tensor<[n - 2, 8], {F}>, !mo.tensor<[1, 8], {F}>, !mo.tensor<[2, 8], {F}>, {X}) -> ()""",
        ),
    ),
    "expand_collectives": (
        "expand-collectives",
        graph(
            "%x: !mo.tensor<[n, 8], bf16, cpu:0>, %y: !mo.tensor<[n, 8], bf16, cpu:1>, "
            "%s: !mo.buffer<[4], ui8, cpu:0>, %t: !mo.buffer<[4], ui8, cpu:1>",
            "!mo.tensor<[2 * n, 8], bf16, cpu:0>, !mo.tensor<[2 * n, 8], bf16, cpu:1>",
            """
            %c = mo.chain_create() : () -> !mo.chain
            %a, %b, %d = mo.allreduce(%x, %y, %s, %t, %c)
                : (!mo.tensor<[n, 8], bf16, cpu:0>, !mo.tensor<[n, 8], bf16, cpu:1>, !mo.buffer<[4], ui8, cpu:0>,
                !mo.buffer<[4], ui8, cpu:1>, !mo.chain)
                -> (!mo.tensor<[n, 8], bf16, cpu:0>, !mo.tensor<[n, 8], bf16, cpu:1>, !mo.chain)
            %e, %f, %g = mo.allgather(%a, %b, %s, %t, %d) {axis = 0 : i64}
                : (!mo.tensor<[n, 8], bf16, cpu:0>, !mo.tensor<[n, 8], bf16, cpu:1>, !mo.buffer<[4], ui8, cpu:0>,
                !mo.buffer<[4], ui8, cpu:1>, !mo.chain)
                -> (!mo.tensor<[2 * n, 8], bf16, cpu:0>, !mo.tensor<[2 * n, 8], bf16, cpu:1>, !mo.chain)
            mo.output(%e, %f) : (!mo.tensor<[2 * n, 8], bf16, cpu:0>, !mo.tensor<[2 * n, 8], bf16, cpu:1>) -> ()""",
        ),
    ),
    "canonicalize_views": (
        "canonicalize",
        graph(
            f"%x: {X}",
            f"{X}, {X}",
            f"""
            %a = mo.transpose(%x) {{perm = array<i64: 1, 0>}} : ({X}) -> {XT}
            %b = mo.transpose(%a) {{perm = array<i64: 1, 0>}} : ({XT}) -> {X}
            %c = mo.cast(%b) : ({X}) -> {X}
            %d = mo.reshape(%c) : ({X}) -> !mo.tensor<[n * 8], {F}>
            %e = mo.reshape(%d) : (!mo.tensor<[n * 8], {F}>) -> {X}
            %f = mo.slice(%e) {{start = #mo.shape<[0, 0]>, stop = #mo.shape<[n, 8]>, step = #mo.shape<[1, 1]>}} : ({X})
                -> {X}
            %g = mo.neg(%f) : ({X}) -> {X}
            mo.output(%f, %g) : ({X}, {X}) -> ()""",
        ),
    ),
    "canonicalize_matmul": (
        "canonicalize",
        graph(
            f"%x: {X}, %w: {W}",
            Y,
            f"""
            %t = mo.transpose(%w) {{perm = array<i64: 1, 0>}} : ({W}) -> {WT}
            %y = mo.matmul(%x, %t) : ({X}, {WT}) -> {Y}
            mo.output(%y) : ({Y}) -> ()""",
        ),
    ),
    "canonicalize_pow": (
        "canonicalize",
        graph(
            f"%x: {X}",
            X,
            f"""
            %c = mo.constant() {{value = #mo.dense<f32, [], [2.0]>}} : () -> {ONE}
            %b = mo.broadcast_to(%c) : ({ONE}) -> {X}
            %y = mo.pow(%x, %b) : ({X}, {X}) -> {X}
            mo.output(%y) : ({X}) -> ()""",
        ),
    ),
    "fold_constants": (
        "fold-constants",
        graph(
            f"%x: {X}",
            X,
            f"""
            %c = mo.constant() {{value = #mo.dense<bf16, [], [2.0]>}} : () -> !mo.tensor<[], bf16, cpu:0>
            %d = mo.cast(%c) : (!mo.tensor<[], bf16, cpu:0>) -> {ONE}
            %e = mo.mul(%d, %d) : ({ONE}, {ONE}) -> {ONE}
            %b = mo.broadcast_to(%e) : ({ONE}) -> {X}
            %y = mo.mul(%x, %b) : ({X}, {X}) -> {X}
            mo.output(%y) : ({X}) -> ()""",
        ),
    ),
    "merge_equal_ops": (
        "merge-equal-ops",
        graph(
            f"%x: {X}",
            X,
            f"""
            %a = mo.exp(%x) : ({X}) -> {X}
            %b = mo.exp(%x) : ({X}) -> {X}
            %c = mo.softmax(%a) {{axis = 1 : i64}} : ({X}) -> {X}
            %d = mo.softmax(%b) {{axis = 0 : i64}} : ({X}) -> {X}
            %y = mo.add(%c, %d) : ({X}, {X}) -> {X}
            mo.output(%y) : ({X}) -> ()""",
        ),
    ),
    "push_views": (
        "push-views",
        graph(
            f"%x: {X}, %v: {VEC}",
            XT,
            f"""
            %n = mo.neg(%v) : ({VEC}) -> {VEC}
            %b = mo.broadcast_to(%n) : ({VEC}) -> {X}
            %a = mo.add(%x, %b) : ({X}, {X}) -> {X}
            %t = mo.transpose(%a) {{perm = array<i64: 1, 0>}} : ({X}) -> {XT}
            %y = mo.exp(%t) : ({XT}) -> {XT}
            mo.output(%y) : ({XT}) -> ()""",
        ),
    ),
    "drop_dead_ops": (
        "drop-dead-ops",
        graph(
            f"%x: {X}",
            X,
            f"""
            %a = mo.exp(%x) : ({X}) -> {X}
            %b = mo.neg(%a) : ({X}) -> {X}
            mo.output(%a) : ({X}) -> ()""",
        ),
    ),
    "move_channels": (
        "move-channels",
        graph(
            f"%x: {IMAGE}, %w: {FILTER}, %v: {FILTER}",
            f"{IMAGE}, !mo.tensor<[n, 8, 1, w], {F}>",
            f"""
            %b = mo.constant() {{value = #mo.dense<f32, [8], [{HALVES}]>}} : () -> {VEC}
            %a = mo.transpose(%x) {{perm = array<i64: 0, 2, 3, 1>}} : ({IMAGE}) -> {LAST}
            %c = mo.conv(%a, %w) {{{STEPS}}} : ({LAST}, {FILTER}) -> {LAST}
            %d = mo.transpose(%c) {{perm = array<i64: 0, 3, 1, 2>}} : ({LAST}) -> {IMAGE}
            %e = mo.reshape(%b) : ({VEC}) -> !mo.tensor<[8, 1, 1], {F}>
            %f = mo.broadcast_to(%e) : (!mo.tensor<[8, 1, 1], {F}>) -> {IMAGE}
            %g = mo.add(%d, %f) : ({IMAGE}, {IMAGE}) -> {IMAGE}
            %h = mo.relu(%g) : ({IMAGE}) -> {IMAGE}
            %i = mo.transpose(%h) {{perm = array<i64: 0, 2, 3, 1>}} : ({IMAGE}) -> {LAST}
            %j = mo.conv(%i, %v) {{{STEPS}}} : ({LAST}, {FILTER}) -> {LAST}
            %k = mo.transpose(%j) {{perm = array<i64: 0, 3, 1, 2>}} : ({LAST}) -> {IMAGE}
            %l = mo.add(%k, %h) : ({IMAGE}, {IMAGE}) -> {IMAGE}
            %m = mo.reduce_max(%l) {{axis = 2 : i64}} : ({IMAGE}) -> !mo.tensor<[n, 8, 1, w], {F}>
            mo.output(%l, %m) : ({IMAGE}, !mo.tensor<[n, 8, 1, w], {F}>) -> ()""",
        ),
    ),
    "move_channels_behind_reshapes": (
        "move-channels",
        graph(
            f"%x: {LAST}",
            f"{LAST}, !mo.tensor<[n, 2, 4, h, w], {F}>",
            f"""
            %a = mo.transpose(%x) {{perm = array<i64: 0, 3, 1, 2>}} : ({LAST}) -> {IMAGE}
            %b = mo.reshape(%a) : ({IMAGE}) -> !mo.tensor<[n, 8, h*w], {F}>
            %c = mo.relu(%b) : (!mo.tensor<[n, 8, h*w], {F}>) -> !mo.tensor<[n, 8, h*w], {F}>
            %d = mo.reshape(%c) : (!mo.tensor<[n, 8, h*w], {F}>) -> {IMAGE}
            %e = mo.transpose(%d) {{perm = array<i64: 0, 2, 3, 1>}} : ({IMAGE}) -> {LAST}
            %f = mo.reshape(%d) : ({IMAGE}) -> !mo.tensor<[n, 2, 4, h, w], {F}>
            mo.output(%e, %f) : ({LAST}, !mo.tensor<[n, 2, 4, h, w], {F}>) -> ()""",
        ),
    ),
    "split_concats": (
        "split-concats",
        graph(
            f"%x: {X}, %v: {VEC}",
            f"{X}, {X}",
            f"""
            %l = mo.slice(%x) {{start = #mo.shape<[0, 0]>, stop = #mo.shape<[n, 4]>, step = #mo.shape<[1, 1]>}} : ({X})
                -> !mo.tensor<[n, 4], {F}>
            %r = mo.slice(%x) {{start = #mo.shape<[0, 4]>, stop = #mo.shape<[n, 8]>, step = #mo.shape<[1, 1]>}} : ({X})
                -> !mo.tensor<[n, 4], {F}>
            %n = mo.neg(%r) : (!mo.tensor<[n, 4], {F}>) -> !mo.tensor<[n, 4], {F}>
            %h = mo.concat(%n, %l) {{axis = 1 : i64}} : (!mo.tensor<[n, 4], {F}>, !mo.tensor<[n, 4], {F}>) -> {X}
            %b = mo.broadcast_to(%v) : ({VEC}) -> {X}
            %s = mo.mul(%h, %b) : ({X}, {X}) -> {X}
            %c = mo.mul(%x, %x) : ({X}, {X}) -> {X}
            %y = mo.add(%c, %s) : ({X}, {X}) -> {X}
            %k = mo.concat(%l, %n) {{axis = 1 : i64}} : (!mo.tensor<[n, 4], {F}>, !mo.tensor<[n, 4], {F}>) -> {X}
            %e = mo.exp(%k) : ({X}) -> {X}
            %z = mo.softmax(%e) {{axis = 1 : i64}} : ({X}) -> {X}
            mo.output(%y, %z) : ({X}, {X}) -> ()""",
        ),
    ),
    "pack_weights": (
        "pack-weights",
        graph(
            "%x: !mo.tensor<[n, 256], f32, cpu:0>, %v: !mo.tensor<[20, 144], ui8, cpu:0>",
            "!mo.tensor<[n, 20], f32, cpu:0>, !mo.tensor<[n, 20], f32, cpu:0>, !mo.tensor<[n, 20], f32, cpu:0>",
            """
            %w = mo.constant.external() {name = "w"} : () -> !mo.tensor<[20, 144], ui8, cpu:0>
            %y = mo.qmatmul(%x, %w) {encoding = "Q4_K"}
                : (!mo.tensor<[n, 256], f32, cpu:0>, !mo.tensor<[20, 144], ui8, cpu:0>)
                -> !mo.tensor<[n, 20], f32, cpu:0>
            %z = mo.qmatmul(%x, %v) {encoding = "Q4_K"}
                : (!mo.tensor<[n, 256], f32, cpu:0>, !mo.tensor<[20, 144], ui8, cpu:0>)
                -> !mo.tensor<[n, 20], f32, cpu:0>
            %n = mo.neg(%x) : (!mo.tensor<[n, 256], f32, cpu:0>) -> !mo.tensor<[n, 256], f32, cpu:0>
            %u = mo.qmatmul(%n, %w) {encoding = "Q4_K"}
                : (!mo.tensor<[n, 256], f32, cpu:0>, !mo.tensor<[20, 144], ui8, cpu:0>)
                -> !mo.tensor<[n, 20], f32, cpu:0>
            mo.output(%y, %z, %u)
                : (!mo.tensor<[n, 20], f32, cpu:0>, !mo.tensor<[n, 20], f32, cpu:0>, !mo.tensor<[n, 20], f32, cpu:0>)
                -> ()""",
        ),
    ),
    "pack_int8": (
        "pack-weights",
        graph(
            f"%x: {I8}, %v: !mo.tensor<[64, 40], si8, cpu:0>",
            f"{I32}, {I32}, {I32}, !mo.tensor<[n, 64], si8, cpu:0>",
            f"""
            %a = mo.constant.external() {{name = "a"}} : () -> !mo.tensor<[64, 40], si8, cpu:0>
            %b = mo.constant.external() {{name = "b"}} : () -> !mo.tensor<[40, 64], si8, cpu:0>
            %p = mo.cast(%x) : ({I8}) -> !mo.tensor<[n, 40], si32, cpu:0>
            %q = mo.cast(%a) : (!mo.tensor<[64, 40], si8, cpu:0>) -> !mo.tensor<[64, 40], si32, cpu:0>
            %r = mo.cast(%b) : (!mo.tensor<[40, 64], si8, cpu:0>) -> !mo.tensor<[40, 64], si32, cpu:0>
            %s = mo.cast(%v) : (!mo.tensor<[64, 40], si8, cpu:0>) -> !mo.tensor<[64, 40], si32, cpu:0>
            %y = mok.matmul(%p, %q) {{transpose_b = true}}
                : (!mo.tensor<[n, 40], si32, cpu:0>, !mo.tensor<[64, 40], si32, cpu:0>) -> {I32}
            %z = mo.matmul(%p, %r) : (!mo.tensor<[n, 40], si32, cpu:0>, !mo.tensor<[40, 64], si32, cpu:0>) -> {I32}
            %u = mok.matmul(%p, %s) {{transpose_b = true}}
                : (!mo.tensor<[n, 40], si32, cpu:0>, !mo.tensor<[64, 40], si32, cpu:0>) -> {I32}
            %t = mo.matmul(%x, %b) : ({I8}, !mo.tensor<[40, 64], si8, cpu:0>) -> !mo.tensor<[n, 64], si8, cpu:0>
            mo.output(%y, %z, %u, %t) : ({I32}, {I32}, {I32}, !mo.tensor<[n, 64], si8, cpu:0>) -> ()""",
        ),
    ),
    # %a and %b are a gated product; %c and %e would be one, but %f has the weight of %c; %d's weight is an input
    "pack_experts": (
        "pack-experts",
        graph(
            f"%x: {ROWS}, %z: {ROWS}, %v: {EXPERTS}, %s: {STARTS}, %i: {IDS}, %t: !mo.tensor<[2], ui32, cpu:0>",
            ", ".join([ROWS] * 4),
            "\n".join(
                f'%w{name} = mo.constant.external() {{name = "w{name}"}} : () -> {EXPERTS}'
                for name in "abce"
            )
            + grouped("a", "x", "wa")
            + grouped("b", "x", "wb")
            + f"%g = mo.mul(%a, %b) : ({ROWS}, {ROWS}) -> {ROWS}\n"
            + grouped("c", "g", "wc")
            + grouped("e", "g", "we")
            + f"%h = mo.mul(%c, %e) : ({ROWS}, {ROWS}) -> {ROWS}\n"
            + grouped("f", "z", "wc")
            + grouped("d", "z", "v")
            + f"mo.output(%g, %h, %f, %d) : ({ROWS}, {ROWS}, {ROWS}, {ROWS}) -> ()",
        ),
    ),
    # %a, %b, %g and %u share x; a product reads %s; %c and %d meet, and %d has another use
    "merge_products": (
        "merge-products",
        graph(
            "%x: !mo.tensor<[n, 32], f32, cpu:0>, %z: !mo.tensor<[n, 32], f32, cpu:0>",
            ", ".join(["!mo.tensor<[n, 64], f32, cpu:0>"] * 2 + ["!mo.tensor<[n, 40], f32, cpu:0>"] * 6),
            "\n".join(
                f"%w{name} = mo.constant.external() {{name = \"w{name}\"}} : () "
                f"-> !mo.tensor<[32, {size}], f32, cpu:0>\n"
                f"%{name} = mo.matmul(%x, %w{name}) "
                f": (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[32, {size}], f32, cpu:0>) "
                f"-> !mo.tensor<[n, {size}], f32, cpu:0>"
                for name, size in {"a": 64, "b": 64, "g": 40, "u": 40, "s": 40, "c": 40, "d": 40}.items()
            )
            + """
            %t = mo.matmul(%z, %ws) : (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[32, 40], f32, cpu:0>)
                -> !mo.tensor<[n, 40], f32, cpu:0>
            %h = mo.silu(%g) : (!mo.tensor<[n, 40], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
            %p = mo.mul(%h, %u) : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>)
                -> !mo.tensor<[n, 40], f32, cpu:0>
            %e = mo.sub(%c, %d) : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>)
                -> !mo.tensor<[n, 40], f32, cpu:0>
            mo.output(%a, %b, %p, %s, %t, %d, %e, %e) : ("""
            + ", ".join(["!mo.tensor<[n, 64], f32, cpu:0>"] * 2 + ["!mo.tensor<[n, 40], f32, cpu:0>"] * 6)
            + ") -> ()",
        ),
    ),
    # %w is coded once; K of %v is no multiple of 32, and %u is not streamed
    "code_weights": (
        "code-weights",
        graph(
            "%x: !mo.tensor<[n, 64], bf16, cpu:0>, %y: !mo.tensor<[n, 48], bf16, cpu:0>",
            ", ".join(["!mo.tensor<[n, 64], bf16, cpu:0>"] * 4),
            "\n".join(
                f"%{name} = mo.constant.external() {{name = \"{name}\"}} : () "
                f"-> !mo.tensor<[64, {size}], bf16, cpu:0>\n"
                f"%p{name} = mok.pack(%{name}) {{encoding = \"rows\"}} "
                f": (!mo.tensor<[64, {size}], bf16, cpu:0>) -> !mo.tensor<[2, 2048], bf16, cpu:0>"
                for name, size in {"w": 64, "v": 48, "u": 64}.items()
            )
            + "\n".join(
                f"\n%{name} = mok.packed_matmul(%{x}, %p{w}) {{encoding = \"rows\", columns = 64 : i64, "
                f"streamed = {streamed}}} : (!mo.tensor<[n, {size}], bf16, cpu:0>, "
                "!mo.tensor<[2, 2048], bf16, cpu:0>) -> !mo.tensor<[n, 64], bf16, cpu:0>"
                for name, x, w, size, streamed in (
                    ("a", "x", "w", 64, "true"),
                    ("b", "a", "w", 64, "true"),
                    ("c", "y", "v", 48, "true"),
                    ("d", "x", "u", 64, "false"),
                )
            )
            + "\nmo.output(%a, %b, %c, %d) : ("
            + ", ".join(["!mo.tensor<[n, 64], bf16, cpu:0>"] * 4)
            + ") -> ()",
        ),
    ),
    "compute_once": (
        "compute-once",
        graph(
            f"%x: {X}",
            Y,
            f"""
            %w = mo.constant.external() {{name = "w"}} : () -> !mo.tensor<[16, 8], bf16, cpu:0>
            %c = mo.cast(%w) : (!mo.tensor<[16, 8], bf16, cpu:0>) -> {W}
            %t = mo.transpose(%c) {{perm = array<i64: 1, 0>}} : ({W}) -> {WT}
            %y = mo.matmul(%x, %t) : ({X}, {WT}) -> {Y}
            mo.output(%y) : ({Y}) -> ()""",
        ),
    ),
    "materialize": (
        "materialize",
        graph(
            f"%x: {X}",
            f"!mo.tensor<[n * 8], {F}>, {X}",
            f"""
            %t = mo.transpose(%x) {{perm = array<i64: 1, 0>}} : ({X}) -> {XT}
            %r = mo.reshape(%t) : ({XT}) -> !mo.tensor<[n * 8], {F}>
            mo.output(%r, %x) : (!mo.tensor<[n * 8], {F}>, {X}) -> ()""",
        ),
    ),
    "fuse_attention": (
        "fuse-attention",
        graph(
            f"%x: {QKV}, %m: {MASK}",
            OUT,
            f"""
            %h = mo.reshape(%x) : ({QKV}) -> {HEADS}
            %q = mo.slice(%h) {{start = #mo.shape<[0, 0, 0, 0]>, stop = #mo.shape<[b, n, 4, 8]>,
                step = #mo.shape<[1, 1, 1, 1]>}} : ({HEADS}) -> {Q}
            %k = mo.slice(%h) {{start = #mo.shape<[0, 0, 4, 0]>, stop = #mo.shape<[b, n, 6, 8]>,
                step = #mo.shape<[1, 1, 1, 1]>}} : ({HEADS}) -> {KV}
            %v = mo.slice(%h) {{start = #mo.shape<[0, 0, 6, 0]>, stop = #mo.shape<[b, n, 8, 8]>,
                step = #mo.shape<[1, 1, 1, 1]>}} : ({HEADS}) -> {KV}
            %k1 = mo.reshape(%k) : ({KV}) -> {APART}
            %k2 = mo.broadcast_to(%k1) : ({APART}) -> {SPREAD}
            %k3 = mo.reshape(%k2) : ({SPREAD}) -> {Q}
            %v1 = mo.reshape(%v) : ({KV}) -> {APART}
            %v2 = mo.broadcast_to(%v1) : ({APART}) -> {SPREAD}
            %v3 = mo.reshape(%v2) : ({SPREAD}) -> {Q}
            %qt = mo.transpose(%q) {{perm = array<i64: 0, 2, 1, 3>}} : ({Q}) -> {QT}
            %kt = mo.transpose(%k3) {{perm = array<i64: 0, 2, 3, 1>}} : ({Q}) -> {KT}
            %vt = mo.transpose(%v3) {{perm = array<i64: 0, 2, 1, 3>}} : ({Q}) -> {QT}
            %s = mo.matmul(%qt, %kt) : ({QT}, {KT}) -> {SCORES}
            %c = mo.constant() {{value = #mo.dense<f32, [], [0.5]>}} : () -> {ONE}
            %cb = mo.broadcast_to(%c) : ({ONE}) -> {SCORES}
            %t = mo.mul(%s, %cb) : ({SCORES}, {SCORES}) -> {SCORES}
            %mb = mo.broadcast_to(%m) : ({MASK}) -> {SCORES}
            %u = mo.add(%t, %mb) : ({SCORES}, {SCORES}) -> {SCORES}
            %p = mo.softmax(%u) {{axis = 3 : i64}} : ({SCORES}) -> {SCORES}
            %o = mo.matmul(%p, %vt) : ({SCORES}, {QT}) -> {QT}
            %ot = mo.transpose(%o) {{perm = array<i64: 0, 2, 1, 3>}} : ({QT}) -> {Q}
            %y = mo.reshape(%ot) : ({Q}) -> {OUT}
            mo.output(%y) : ({OUT}) -> ()""",
        ),
    ),
    "fuse_attention_of_guarded_probabilities": (
        "fuse-attention",
        graph(
            f"%q: {QT}, %k: {QT}",
            QT,
            f"""
            %s = mok.matmul(%q, %k) {{transpose_b = true}} : ({QT}, {QT}) -> {SCORES}
            %p = mo.softmax(%s) {{axis = 3 : i64}} : ({SCORES}) -> {SCORES}
            %n = mo.is_nan(%p) : ({SCORES}) -> {TESTS}
            %z = mo.constant() {{value = #mo.dense<f32, [], [0.0]>}} : () -> {ONE}
            %zb = mo.broadcast_to(%z) : ({ONE}) -> {SCORES}
            %g = mo.select(%n, %zb, %p) : ({TESTS}, {SCORES}, {SCORES}) -> {SCORES}
            %o = mo.matmul(%g, %k) : ({SCORES}, {QT}) -> {QT}
            mo.output(%o) : ({QT}) -> ()""",
        ),
    ),
    "fuse_attention_not_where_probabilities_are_used": (
        "fuse-attention",
        graph(
            f"%q: {QT}, %k: {QT}",
            f"{QT}, {SCORES}",
            f"""
            %s = mok.matmul(%q, %k) {{transpose_b = true}} : ({QT}, {QT}) -> {SCORES}
            %p = mo.softmax(%s) {{axis = 3 : i64}} : ({SCORES}) -> {SCORES}
            %o = mo.matmul(%p, %k) : ({SCORES}, {QT}) -> {QT}
            mo.output(%o, %p) : ({QT}, {SCORES}) -> ()""",
        ),
    ),
    "fuse_elementwise": (
        "drop-dead-views",
        graph(
            f"%x: {X}, %v: {VEC}",
            X,
            f"""
            %b = mo.broadcast_to(%v) : ({VEC}) -> {X}
            %a = mo.add(%x, %b) : ({X}, {X}) -> {X}
            %g = mo.gelu(%a) {{approximate = "tanh"}} : ({X}) -> {X}
            %y = mo.mul(%g, %x) : ({X}, {X}) -> {X}
            mo.output(%y) : ({X}) -> ()""",
        ),
    ),
    "keep_codes_in_floats": (
        "keep-codes-in-floats",
        graph(
            f"%x: {X}",
            X,
            f"""
            %s = mo.constant() {{value = #mo.dense<f32, [], [3.0]>}} : () -> {ONE}
            %l = mo.constant() {{value = #mo.dense<f32, [], [0.0]>}} : () -> {ONE}
            %h = mo.constant() {{value = #mo.dense<f32, [], [255.0]>}} : () -> {ONE}
            %sb = mo.broadcast_to(%s) : ({ONE}) -> {X}
            %lb = mo.broadcast_to(%l) : ({ONE}) -> {X}
            %hb = mo.broadcast_to(%h) : ({ONE}) -> {X}
            %r = mo.round(%x) : ({X}) -> {X}
            %a = mo.add(%r, %sb) : ({X}, {X}) -> {X}
            %b = mo.max(%a, %lb) : ({X}, {X}) -> {X}
            %c = mo.min(%b, %hb) : ({X}, {X}) -> {X}
            %q = mo.cast(%c) : ({X}) -> !mo.tensor<[n, 8], ui8, cpu:0>
            %y = mo.cast(%q) : (!mo.tensor<[n, 8], ui8, cpu:0>) -> {X}
            mo.output(%y) : ({X}) -> ()""",
        ),
    ),
    "fuse_rows": (
        "drop-dead-views",
        graph(
            f"%x: {X}, %r: {X}, %v: {VEC}",
            f"{X}, {X}",
            f"""
            %h = mo.add(%x, %r) : ({X}, {X}) -> {X}
            %m = mo.reduce_mean(%h) {{axis = 1 : i64}} : ({X}) -> {ROW}
            %b = mo.broadcast_to(%m) : ({ROW}) -> {X}
            %c = mo.sub(%h, %b) : ({X}, {X}) -> {X}
            %y = mo.rms_norm(%c, %v) {{epsilon = 1.0e-05 : f64, weight_offset = 0.0 : f64, multiply_before_cast = true}}
                : ({X}, {VEC}) -> {X}
            mo.output(%h, %y) : ({X}, {X}) -> ()""",
        ),
    ),
    "fuse_epilogue": (
        "drop-dead-views",
        graph(
            f"%x: {X}, %w: {W}, %u: {W}",
            Y,
            f"""
            %t = mo.transpose(%w) {{perm = array<i64: 1, 0>}} : ({W}) -> {WT}
            %g = mo.matmul(%x, %t) : ({X}, {WT}) -> {Y}
            %s = mo.silu(%g) : ({Y}) -> {Y}
            %q = mo.transpose(%u) {{perm = array<i64: 1, 0>}} : ({W}) -> {WT}
            %h = mo.matmul(%x, %q) : ({X}, {WT}) -> {Y}
            %y = mo.mul(%s, %h) : ({Y}, {Y}) -> {Y}
            mo.output(%y) : ({Y}) -> ()""",
        ),
    ),
    "fuse_products": (
        "drop-dead-views",
        graph(
            "%x: !mo.tensor<[n, 32], f32, cpu:0>, %z: !mo.tensor<[n, 40], f32, cpu:0>",
            ", ".join(["!mo.tensor<[n, 40], f32, cpu:0>"] * 4),
            "\n".join(
                f"%w{name} = mo.constant.external() {{name = \"w{name}\"}} : () -> !mo.tensor<[32, 40], f32, cpu:0>\n"
                f"%{name} = mo.matmul(%x, %w{name}) "
                f": (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[32, 40], f32, cpu:0>) "
                f"-> !mo.tensor<[n, 40], f32, cpu:0>"
                for name in "abcgu"
            )
            + """
            %n = mo.neg(%a) : (!mo.tensor<[n, 40], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
            %i = mo.add(%n, %z) : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>)
                -> !mo.tensor<[n, 40], f32, cpu:0>
            %j = mo.cumsum(%i) {axis = 1 : i64, exclusive = false, reverse = false} : (!mo.tensor<[n, 40], f32, cpu:0>)
                -> !mo.tensor<[n, 40], f32, cpu:0>
            %k = mo.mul(%b, %j) : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>)
                -> !mo.tensor<[n, 40], f32, cpu:0>
            %h = mo.silu(%g) : (!mo.tensor<[n, 40], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
            %p = mo.mul(%h, %u) : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>)
                -> !mo.tensor<[n, 40], f32, cpu:0>
            mo.output(%i, %k, %c, %p) : ("""
            + ", ".join(["!mo.tensor<[n, 40], f32, cpu:0>"] * 4)
            + ") -> ()",
        ),
    ),
    **{
        name: (
            last,
            graph(
                "%x: !mo.tensor<[n, 40], f32, cpu:0>, %m: !mo.tensor<[2, 900], f32, cpu:0>, "
                "%f: !mo.tensor<[2, 3, 2], si32, cpu:0>, %r: !mo.tensor<[n], si32, cpu:0>, "
                "%s: !mo.tensor<[n], f32, cpu:0>, %c: !mo.tensor<[1], si32, cpu:0>, %p: !mo.tensor<[2], si64, cpu:0>",
                ", ".join(["!mo.tensor<[n, 32], f32, cpu:0>"] * 4),
                "\n".join(
                    f"%w{letter} = mo.constant.external() {{name = \"w{letter}\"}} : () "
                    f"-> !mo.tensor<[40, 32], f32, cpu:0>\n"
                    f"%{letter} = mo.matmul(%x, %w{letter}) "
                    f": (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[40, 32], f32, cpu:0>) "
                    f"-> !mo.tensor<[n, 32], f32, cpu:0>\n"
                    f"%l{letter} = mo.lora.add(%{letter}, %x, %m, %f, %r, %r, %s, %c, %p) "
                    f"{{max_rank = 2 : i64, inputs = 40 : i64, site = {site} : i64, offset = {offset} : i64}}"
                    f" : (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, "
                    f"!mo.tensor<[2, 900], f32, cpu:0>, !mo.tensor<[2, 3, 2], si32, cpu:0>, "
                    f"!mo.tensor<[n], si32, cpu:0>, !mo.tensor<[n], si32, cpu:0>, !mo.tensor<[n], f32, cpu:0>, "
                    f"!mo.tensor<[1], si32, cpu:0>, !mo.tensor<[2], si64, cpu:0>) -> !mo.tensor<[n, 32], f32, cpu:0>"
                    for site, (letter, offset) in enumerate({"a": 0, "b": 224, "q": 448}.items())
                )
                + """
                mo.output(%la, %lb, %lq, %q) : ("""
                + ", ".join(["!mo.tensor<[n, 32], f32, cpu:0>"] * 4)
                + ") -> ()",
            ),
        )
        for name, last in (
            ("attach_adapters", "attach-adapters"),
            ("project_adapters", "project-adapters"),
        )
    },
    "fuse_no_circle": (
        "drop-dead-views",
        graph(
            f"%x: {X}",
            X,
            f"""
            %a = mo.exp(%x) : ({X}) -> {X}
            %c = mo.cumsum(%a) {{axis = 1 : i64, exclusive = false, reverse = false}} : ({X}) -> {X}
            %y = mo.add(%a, %c) : ({X}, {X}) -> {X}
            mo.output(%y) : ({X}) -> ()""",
        ),
    ),
    "place_operands": (
        "place-operands",
        graph(
            "%x: !mo.tensor<[n, 8], f32, cpu:0>, %y: !mo.tensor<[n, 8], f32, gpu:0>",
            "!mo.tensor<[n, 8], f32, gpu:0>, !mo.tensor<[n, 8], f32, cpu:1>, !mo.tensor<[3], si64, gpu:0>",
            """
            %c = mo.constant() {value = #mo.dense<si64, [], [3]>} : () -> !mo.tensor<[], si64, cpu:0>
            %z = mo.constant() {value = #mo.dense<si64, [], [0]>} : () -> !mo.tensor<[], si64, cpu:0>
            %o = mo.constant() {value = #mo.dense<si64, [], [1]>} : () -> !mo.tensor<[], si64, cpu:0>
            %a = mo.transfer(%x) : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, gpu:0>
            %b = mo.add(%a, %y) : (!mo.tensor<[n, 8], f32, gpu:0>, !mo.tensor<[n, 8], f32, gpu:0>)
                -> !mo.tensor<[n, 8], f32, gpu:0>
            %d = mo.transfer(%x) : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:1>
            %r = mo.range(%z, %c, %o)
                : (!mo.tensor<[], si64, cpu:0>, !mo.tensor<[], si64, cpu:0>, !mo.tensor<[], si64, cpu:0>)
                -> !mo.tensor<[3], si64, gpu:0>
            mo.output(%b, %d, %r)
                : (!mo.tensor<[n, 8], f32, gpu:0>, !mo.tensor<[n, 8], f32, cpu:1>, !mo.tensor<[3], si64, gpu:0>)
                -> ()""",
        ),
    ),
}  # fmt: skip


@pytest.fixture
def backends() -> Iterator[Backends]:
    """The CPU, and an accelerator with a memory of its own."""
    with fake_devices(1) as devices:
        all_backends = backends_for(devices, BackendOptions())
        host = all_backends.host
        assert isinstance(host, CPUBackend)
        # those of any machine
        host.packing = replace(host.packing, codings={DType.bfloat16: "coded bfloat16"})
        yield all_backends


@pytest.mark.parametrize("name", SOURCES)
def test_pass(name: str, golden: Callable[[str, str], None], backends: Backends) -> None:
    last, source = SOURCES[name]
    module = mok.parse(source)
    verify_module(module)
    if name == "code_weights":  # small ones, too
        host = backends.host
        assert isinstance(host, CPUBackend)
        host.packing = replace(host.packing, streamed_bytes=1)
    optimize(module, backends, last)
    verify_module(module)
    # a value that a removed op still uses would never be dropped
    users = {use.operation for op in module.walk() for value in op.results for use in value.uses}
    assert users <= {*module.walk()}
    golden(print_module(module), f"passes/{name}.mlir")


@pytest.mark.parametrize("name", SOURCES)
def test_printed_module_parses_back(name: str, backends: Backends) -> None:
    module = mok.parse(SOURCES[name][1])
    optimize(module, backends)
    again: ModuleOp = mok.parse(print_module(module))
    verify_module(again)
    assert again.is_structurally_equivalent(module)
    assert print_module(again) == print_module(module)


@pytest.mark.parametrize(
    ("limit", "streamed"), [(73728, [True, False, False, False]), (73729, [False] * 4)]
)
def test_packed_experts_that_caches_do_not_hold(
    backends: Backends, limit: int, streamed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the limit's bytes: the pair has 9 strips of 2048 floats, each of the others 6."""
    module = mok.parse(SOURCES["pack_experts"][1])
    host = backends.host
    assert isinstance(host, CPUBackend)
    monkeypatch.setattr(host, "packing", replace(host.packing, streamed_bytes=limit))
    optimize(module, backends, "pack-experts")
    products = [op for op in module.walk() if isinstance(op, GroupedProductsOp)]
    assert [op.attr("streamed") for op in products] == streamed


def test_every_pass_has_a_golden_file(backends: Backends) -> None:
    shown = {last for last, _ in SOURCES.values()} | {"fuse"}
    assert shown == {step.name for step in steps(backends)}
