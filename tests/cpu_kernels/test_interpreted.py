"""Each kernel in the interpreter and compiled with bounds checks, against the kernel compiled without."""

from __future__ import annotations

import copy
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from max._backends.cpu.kernels import library
from max._backends.cpu.kernels.convolution.filters import filter_elements
from max._backends.cpu.kernels.convolution.winograd import PRODUCTS
from max._backends.cpu.kernels.products.dense.coded import coded_bytes
from max._backends.cpu.kernels.products.dense.panels import panel_elements
from max._backends.cpu.kernels.products.quantized.packed import FORMATS
from max._config import flags
from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS, encode
from max.mlir.ops.models.adapters import lora_place_size
from tests.cpu_kernels.harness import interpreted, run
from tests.cpu_kernels.test_attention import make_cache
from tests.cpu_kernels.test_sampling import operands as sampling_operands
from tests.quantized import gptq_weight, random_weight
from tests.tolerance import assert_close

F32, I64 = np.float32, np.int64
BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(3)


def floats(*shape: int, dtype: Any = F32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


CACHE = make_cache([(3, 2), (0, 13)], 4, 2, 16, 4, np.dtype(F32))
LATENT = make_cache([(3, 2), (0, 13)], 4, 1, 16, 4, np.dtype(F32))
PAGED = CACHE.operands(0.3)
SELECTED = np.array([[0, 2, 3], [1, 3, -1], *[[0, -1, -1]] * 12, [0, 7, 12]], np.int32)
NEW_ROWS = floats(15, 32)
# groups of 2, 0 and 17 rows, and one whose results are 0
GROUPS = [
    np.array([0, 2, 2, 19, 21, 21], np.uint32),
    np.array([4, 0, 1, -1, 2], np.int32),
    np.array([17, 4], np.uint32),
]
TURNS = np.arange(12) * np.pi / 6
DIMS = [np.array([1, 0]), np.array([4, 9]), np.array([1, 2])]

# symbol, operands, results, attributes
# offsets, cached tokens and slots of four sequences, and a layer of the states
SLOTS = [np.array(x, np.uint32) for x in ([0, 1, 1, 11], [2, 0, 0], [3, 0, 1])]
LAYER = np.array(1, np.uint32)
HEADS = [(0, 5, -1)] * 4 + [(600, 4, 700)] * 2 + [(10, 8, -1), (0, 0, 800), (-1, 0, -1)]
"""Where the adapter of each row lies: B, its rank, its gain."""

CASES: dict[
    str, tuple[str, list[np.ndarray], list[tuple[Any, tuple[int, ...]]], dict[str, Any]]
] = {
    "matmul few rows": (
        "mo.matmul",
        [floats(5, 35), floats(9, 35)],
        [(F32, (5, 9))],
        {"transpose_b": True},
    ),
    "matmul few rows, columns": ("mo.matmul", [floats(5, 35), floats(35, 9)], [(F32, (5, 9))], {}),
    "matmul": (
        "mo.matmul",
        [floats(18, 35), floats(9, 35)],
        [(F32, (18, 9))],
        {"transpose_b": True},
    ),
    "matmul, columns": ("mo.matmul", [floats(18, 35), floats(35, 9)], [(F32, (18, 9))], {}),
    "matmul bf16": (
        "mo.matmul",
        [floats(18, 35, dtype=BF16), floats(9, 35, dtype=BF16)],
        [(BF16, (18, 9))],
        {"transpose_b": True},
    ),
    "attention": ("mo.attention.ragged.paged", PAGED, [(F32, CACHE.q.shape)], {"mask": "causal"}),
    "cache load": (
        "mo.kv_load.ragged.paged",
        [PAGED[1], PAGED[2], *PAGED[3:5], PAGED[6], np.array(17)],
        [(F32, (17, 32))],
        {"side": 1},
    ),
    "key store": (
        "mo.k_store.ragged.paged",
        [NEW_ROWS, *PAGED[1:5], PAGED[6]],
        [],
        {"side": 0},
    ),
    "latent prefill": (
        "mo.mla.prefill.ragged.paged",
        [
            floats(15, 3, 11),
            floats(9, 3, 7),
            floats(9, 3, 5),
            PAGED[1],
            np.array([0, 4, 9], np.uint32),
            np.array([1, 3], np.uint32),
            *PAGED[2:5],
            *PAGED[6:8],
            floats(15, 3, 5),
            np.abs(floats(15, 3, 2)),
        ],
        [(F32, (15, 3, 5)), (F32, (15, 3, 2))],
        {"causal": True},
    ),
    "latent plan": (
        "mo.latents.plan.ragged",
        PAGED[1:2] + PAGED[3:4],
        [(np.int32, (2,))],
        {"least_rows": 8, "most_cached": 3, "saved": 5, "spent": 2, "count": 12},
    ),
    "gates of streams": (
        "mo.streams.gates",
        [floats(5, 15), floats(15), floats(3)],
        [(np.float32, (5, 3)), (np.float32, (5, 3)), (np.float32, (5, 9))],
        {"hc_mult": 3, "hc_eps": 1e-3, "hc_sinkhorn_iters": 4},
    ),
    "lstm": (
        "mo.lstm",
        [
            floats(3, 6, 2, 4, 19),
            floats(2, 2, 32, 4, 16),
            floats(2, 6, 19),
            floats(2, 6, 19),
            floats(2, 3, 19),
            np.array([3, 0, 2, 1, 3, 2]),
        ],
        [(F32, (3, 2, 6, 19)), (F32, (2, 6, 19)), (F32, (2, 6, 19))],
        {
            "direction": "bidirectional",
            "clip": 0.0,
            "gate": "sigmoid",
            "candidate": "tanh",
            "output": "relu",
            "coupled": False,
            "looks": True,
        },
    ),
    "gru": (
        "mo.gru",
        [
            floats(2, 5, 1, 3, 19),
            floats(1, 2, 32, 3, 16),
            floats(1, 5, 19),
            floats(1, 19),
            np.array([2, 0, 2, 1, 2]),
        ],
        [(F32, (2, 1, 5, 19)), (F32, (1, 5, 19))],
        {
            "direction": "reverse",
            "clip": 0.5,
            "gate": "sigmoid",
            "candidate": "tanh",
            "reset_after": False,
        },
    ),
    "rnn": (
        "mo.rnn",
        [floats(2, 3, 1, 1, 16), floats(1, 1, 16, 1, 16), floats(1, 3, 16), np.array([2, 1, 2])],
        [(F32, (2, 1, 3, 16)), (F32, (1, 3, 16))],
        {"direction": "forward", "clip": 0.0, "candidate": "tanh"},
    ),
    "trees as masks": (
        "mo.trees.masks",
        [
            floats(19, 5),
            np.array([[0, 4, 1], [2, 3, 0]], np.int32),
            floats(2, 3),
            np.array([[0, 1, 0], [1, 0, 0]], np.uint8),
            # bits of four leaves, and of three
            np.array([[~3, ~1, ~4], [~3, ~1, ~0]], np.int64).astype(np.uint32),
            np.array([3, 2], np.int32),
            floats(2, 4, 2),
            np.array([1, 0], np.int32),
        ],
        [(F32, (19, 3))],
        {"outputs": 3},
    ),
    "trees as walks": (
        "mo.trees.walk",
        [
            floats(19, 5),
            np.array([1, 4, 0, 0, 0], np.int32),
            floats(5),
            np.array([1, 0, 0, 0, 0], np.uint8),
            np.array([1, 2, 2, 3, 4], np.int32),
            np.array([4, 3, 2, 3, 4], np.int32),
            np.array([0, 0, 0, 1, 2], np.int32),
            np.array([0, 1], np.int32),
            np.array([2, 1], np.int32),
            floats(3, 2),
            np.array([1, 0], np.int32),
        ],
        [(F32, (19, 3))],
        {"outputs": 3},
    ),
    "token selection": (
        "mo.tokens.select.ragged.paged",
        [floats(15, 4, 16), floats(15, 4), PAGED[1], LATENT.blocks[:, :1], *PAGED[3:5], PAGED[6]],
        [(np.int32, (15, 3))],
        {"count": 3},
    ),
    "attention of selected tokens": (
        "mo.attention.selected.paged",
        [floats(15, 4, 16), SELECTED, PAGED[1], LATENT.blocks[:, :1], *PAGED[3:5], *PAGED[6:8]],
        [(F32, (15, 4, 11))],
        {"value_size": 11},
    ),
    "gated delta rule": (
        "mo.gated_delta.ragged",
        [
            floats(11, 2, 5),
            floats(11, 2, 5),
            floats(11, 4, 9),
            -np.abs(floats(11, 4)),
            RNG.random((11, 4)).astype(F32),
            np.array([0, 1, 1, 11], np.uint32),
            np.array([2, 0, 0], np.uint32),
            np.array([3, 0, 1], np.uint32),
            floats(4, 2, 4, 5, 9),
            np.array(1, np.uint32),
        ],
        [(F32, (11, 4, 9))],
        {"scale": 0.4, "normalized": True},
    ),
    "causal convolution": (
        "mo.causal_conv.ragged",
        [floats(11, 19), floats(4, 19), floats(19), *SLOTS, floats(4, 2, 3, 19), LAYER],
        [(F32, (11, 19))],
        {"activation": "silu"},
    ),
    "scan of Mamba": (
        "mo.selective_scan.ragged",
        [
            floats(11, 19),
            floats(11, 19),
            -np.abs(floats(6, 19)),
            floats(11, 6),
            floats(11, 6),
            floats(19),
            floats(19),
            *SLOTS,
            floats(4, 2, 6, 19),
            LAYER,
        ],
        [(F32, (11, 19))],
        {"low": 0.1, "high": 2.0},
    ),
    "scan of Mamba 2": (
        "mo.ssd.ragged",
        [
            floats(11, 4, 19),
            floats(11, 4),
            -np.abs(floats(4)),
            floats(11, 2, 6),
            floats(11, 2, 6),
            floats(4),
            floats(4),
            *SLOTS,
            floats(4, 2, 4, 6, 19),
            LAYER,
        ],
        [(F32, (11, 4, 19))],
        {"low": 0.1, "high": 2.0},
    ),
    "counts of tokens": (
        "mo.frequencies.update",
        [
            np.array([[5, 2], [-1, 0], [7, 1]], np.int32),
            np.array([0, 2, 3], np.uint32),
            np.array([6, 7], np.int32),
        ],
        [],
        {},
    ),
    "attention over latents": (
        "mo.attention.ragged.paged",
        LATENT.operands(0.3),
        [(F32, (15, 4, 11))],
        {"mask": "causal", "value_size": 11},
    ),
    "cross attention": (
        "mo.attention.ragged.paged",
        [*PAGED, np.array([0, 2, 9], np.uint32)],
        [(F32, CACHE.q.shape)],
        {"mask": "causal", "cross": True},
    ),
    "rows by adapter": (
        "mo.lora.rows.ragged",
        [np.array([1, -1, 0, 1], np.int32), floats(4), np.array([0, 2, 3, 3, 7], np.uint32)],
        [(np.int32, (7,)), (np.int32, (7,)), (F32, (7,)), (np.int32, (1,))],
        {"max_slots": 3},
    ),
    **{
        f"adapters of {kind}": (
            "mo.lora.add",
            [
                floats(9, 70),
                x,
                floats(3, 5 + lora_place_size(6, 37, 70), dtype=dtype),
                np.array([[[0, 0], [5, 1]], [[0, 0], [0, 0]], [[0, 0], [6, 0]]], np.int32),
                RNG.permutation(9).astype(np.int32),
                np.array([0, 0, 0, 0, 0, 1, 2, -1, -1], np.int32),
                floats(9),
                np.array([7], np.int32),
                np.array([3, 0]),
            ],
            [(F32, (9, 70))],
            {"max_rank": 6, "inputs": 37, "site": 1, "offset": 2},
        )
        for kind, x, dtype in (
            ("rows", floats(9, 37), F32),
            ("rows in bfloat16", floats(9, 37, dtype=BF16), BF16),
            ("tokens", RNG.integers(0, 37, (9, 1)), F32),
        )
    },
    **{
        f"products with A of {np.dtype(dtype)}": (
            "mok.project_adapters",
            [
                floats(9, 137, dtype=dtype),
                floats(3, 5 + lora_place_size(6, 137, 70), dtype=dtype),
                np.array([[[0, 0], [5, 1]], [[0, 0], [0, 0]], [[0, 0], [6, 0]]], np.int32),
                RNG.permutation(9).astype(np.int32),
                np.array([0, 0, 0, 0, 0, 1, 2, -1, -1], np.int32),
                floats(9),
                np.array([7], np.int32),
                np.array([3, 0]),
            ],
            [(F32, (9, 8)), (np.int64, (9, 4))],
            {"max_rank": 6, "inputs": 137, "sites": ((2, 1, 70),)},
        )
        for dtype in (F32, BF16)
    },
    # a product, then a pair; adapters of four neighbors, of two, of one, and none
    **{
        f"adapted products of {encoding}": (
            "mok.adapted_products",
            [
                floats(9, 64),
                RNG.integers(0, 60, (5, FORMATS["Q4_0"].group_bytes(64)), np.uint8)
                if encoding == "Q4_0"
                else floats(5, panel_elements(64)),
                floats(9, 24),
                np.array([[at, rank, gain, 900] * 3 for at, rank, gain in HEADS]),
                floats(2, 600),
                floats(9),
            ],
            [(F32, (9, 40)), (F32, (9, 40)), (F32, (9, 40))],
            {
                "encoding": encoding,
                "parts": ((1, 1), (2, 2)),
                "streamed": False,
                "columns": (40, 40, 40),
                "next": (64, 128),
                "next_inputs": 32,
            },
        )
        for encoding in ("rows", "Q4_0")
    },
    "experts' order": (
        "mo.moe.indices",
        [np.array([3, 0, 3, 4, 0])],
        [
            (np.uint32, (5,)),
            (np.uint32, (6,)),
            (np.uint32, (5,)),
            (np.int32, (5,)),
            (np.uint32, (2,)),
        ],
        {"experts": 5},
    ),
    "grouped matmul": (
        "mo.grouped_matmul.ragged",
        [floats(22, 35), floats(5, 9, 35), *GROUPS],
        [(F32, (22, 9))],
        {},
    ),
    **{
        f"grouped {encoding} {kind}": (
            name,
            [
                floats(22, 256),
                np.stack([encode(floats(33, 256), encoding) for _ in range(5)])
                if kind == "in place"
                else RNG.integers(0, 64, (10, FORMATS[encoding].group_bytes(256)), np.uint8),
                *GROUPS,
            ],
            [(F32, (22, 33))],
            {"encoding": encoding, **attributes},
        )
        for encoding in ("Q4_0", "Q4_K", "Q6_K")
        for kind, name, attributes in (
            ("in place", "mo.grouped_qmatmul.ragged", {}),
            ("packed", "mok.grouped_products", {"streamed": True, "parts": ((1, 1),)}),
        )
    },
    **{
        f"grouped panels {np.dtype(dtype)}": (
            "mok.grouped_products",
            [
                floats(22, 35, dtype=dtype),
                floats(15, panel_elements(35), dtype=dtype),
                *GROUPS,
            ],
            [(F32, (22, 40)), (F32, (22, 40))],
            {"encoding": "rows", "streamed": True, "parts": ((2, 2),)},
        )
        for dtype in (F32, BF16)
    },
    "attention with a soft cap and sinks": (
        "mo.attention.ragged.paged",
        [*PAGED, floats(4)],
        [(F32, CACHE.q.shape)],
        {"mask": "causal", "softcap": 0.8, "sinks": True},
    ),
    "attention with biases": (
        "mo.attention.ragged.paged",
        [*PAGED, floats(4)],
        [(F32, CACHE.q.shape)],
        {"mask": "causal_alibi"},
    ),
    **{
        f"dense attention of {rows} rows, {name}": (
            "mok.attention",
            [
                floats(2, 2, rows, 6, dtype=dtype),
                floats(2, *((6, 37) if columns else (37, 6)), dtype=dtype),
                floats(2, 37, 9, dtype=dtype),
                *masks,
            ],
            [(dtype, (2, 2, rows, 9))],
            {"scale": 0.4, "fills": (None, -1e9)[: len(masks)], "columns": columns},
        )
        for rows in (3, 11)
        for name, dtype, columns, masks in (
            ("f32", F32, False, []),
            ("f32 by columns", F32, True, []),
            ("bf16", BF16, False, []),
            (
                "f16 with masks",
                np.float16,
                False,
                [floats(2, 2, rows, 37), RNG.random((2, 2, rows, 37)) > 0.5],
            ),
        )
    },
    "attention of a ragged batch": (
        "mo.attention.ragged",
        [
            *(floats(11, heads, 6) for heads in (4, 2, 2)),
            np.array([0, 3, 3, 11], np.uint32),
            np.array(0.4, np.float32),
        ],
        [(F32, (11, 4, 6))],
        {"mask": "sliding_window", "local_window_size": 4},
    ),
    "dense attention, split": (
        "mok.attention",
        [floats(1, 1, 1, 8), floats(1, 300, 8), floats(1, 300, 8)],
        [(F32, (1, 1, 1, 8))],
        {"scale": 0.4},
    ),
    **{
        f"dense attention of {rows} rows and {keys} keys, rounded": (
            "mok.attention",
            [
                floats(1, 1, rows, 6),
                floats(1, keys, 6),
                floats(1, keys, 9),
                floats(1, 1, rows, keys),
            ],
            [(F32, (1, 1, rows, 9))],
            {
                "scale": 0.4,
                "fills": (None,),
                "roundings": (None, DType.float16, DType.bfloat16),
            },
        )
        for rows, keys in ((2, 37), (23, 37), (11, 520))
    },
    "kv_store": ("mo.kv_store.ragged.paged", [NEW_ROWS, NEW_ROWS + 1, *PAGED[1:7]], [], {}),
    "rope": (
        "mo.rope.ragged.paged",
        [CACHE.q, PAGED[1], floats(20, 12), *PAGED[2:7]],
        [(F32, CACHE.q.shape)],
        {"interleaved": False},
    ),
    "rope interleaved": (
        "mo.rope.ragged.paged",
        [CACHE.q, PAGED[1], floats(20, 16), *PAGED[2:7]],
        [(F32, CACHE.q.shape)],
        {"interleaved": True},
    ),
    "sample top_k": (
        "mo.sample.token",
        sampling_operands(floats(2, 20), top_k=5, top_p=0.8),
        [(I64, (2,))],
        {},
    ),
    "sample top_p": (
        "mo.sample.token",
        sampling_operands(floats(1, 20), top_p=0.8),
        [(I64, (1,))],
        {},
    ),
    "sample allowed": (
        "mo.sample.allowed",
        [
            *sampling_operands(floats(2, 75), top_k=5, top_p=0.8),
            RNG.integers(-(2**31), 2**31, (2, 2)).astype(np.int32),
        ],
        [(I64, (2,))],
        {},
    ),
    "checked counts": ("mo.check.counts", [np.array([2, 0, 3])], [(I64, (3,))], {"what": "n"}),
    "checked offsets": (
        "mo.check.offsets",
        [np.array([0, 2, 5], np.uint32), np.array(5)],
        [(np.uint32, (3,))],
        {"what": "n"},
    ),
    "penalties": (
        "mo.penalties",
        [
            floats(1, 9),
            np.array([2, 3], np.int32),
            np.array([1, 2], np.int32),
            np.array([0, 2], np.uint32),
            floats(1),
            floats(1),
            floats(1) + 4,
        ],
        [(F32, (1, 9))],
        {},
    ),
    "step ready": (
        "mo.step.ready",
        [np.array([2]), np.array([3]), np.zeros((2, 3), np.int32)],
        [(np.uint8, (1,))],
        {},
    ),
    "step not ready": (
        "mo.step.ready",
        [np.array([3]), np.array([3]), np.zeros((2, 3), np.int32)],
        [(np.uint8, (1,))],
        {},
    ),
    "next_step": (
        "mo.next_step.ragged.paged",
        [
            np.array([7, 9]),
            np.array([3, 2**64 - 1], np.uint64),
            np.array([[5, -1, 2], [9, -1, -1]]),
            np.zeros(1, np.uint8),
            np.array([1, 2]),
            np.array([30, 4], np.uint32),
            np.array([[1, 30]], np.uint32),
            np.zeros(2, np.uint64),
            np.zeros((4, 2), np.int64),
            np.array([2]),
            np.ones(1, np.uint8),
        ],
        [],
        {},
    ),
    "next_round": (
        "mo.next_round.ragged.paged",
        [
            np.array([7, 9, 3, 5, 5, 6]),
            np.array([3, 2**64 - 1], np.uint64),
            np.array([[5, -1, 2], [9, -1, -1]]),
            np.array([60, 11]),
            np.array([50]),
            np.zeros(1, np.uint8),
            np.array([1, 7, 8, 2, 5, 5]),
            np.array([30, 4], np.uint32),
            np.array([[3, 30]], np.uint32),
            np.zeros(6, np.uint64),
            np.zeros(4, np.int64),
            np.zeros(2, np.uint32),
            np.array([[2, 0]], np.uint32),
            np.zeros(2, np.uint32),
            np.array([[1, 0]], np.uint32),
            np.zeros(2, np.uint64),
            np.array([2]),
            np.full((4, 6), -1),
            np.array([1]),
            np.ones(1, np.uint8),
        ],
        [],
        {},
    ),
    "next_text_round": (
        "mo.next_text_round.ragged.paged",
        [
            np.array([7, 9, 3, 0, 0, 4, 0, 6, 5]),
            np.array([3, 2**64 - 1, 8], np.uint64),
            np.array([[5, -1, 2], [9, -1, -1], [8, 8, 8]]),
            np.array([0, 3, 4, 6], np.uint32),
            np.array(
                [
                    [0, 0, 0, 7, 9, 3, 1, 2, 0, 0, 0],
                    [-1] * 11,
                    [0, 0, 6, 5, 2, 0, 0, 0, 0, 0, 0],
                ]
            ),
            np.zeros(1, np.uint8),
            np.array([1, 7, 9, 2, 5, 6]),
            np.array([30, 4, 50], np.uint32),
            np.array([[3, 50]], np.uint32),
            np.zeros(9, np.uint64),
            np.full((4, 9), -1),
            np.array([1]),
            np.ones(1, np.uint8),
        ],
        [],
        {},
    ),
    "gather": ("mo.gather", [floats(4, 5), np.array([3, -1])], [(F32, (2, 5))], {"axis": 0}),
    "gather_nd": (
        "mo.gather_nd",
        [floats(4, 5, 3), np.array([[3, -1], [0, 2]])],
        [(F32, (2, 3))],
        {"batch_dims": 0},
    ),
    "scatter": (
        "mo.scatter",
        [floats(4, 5), floats(2, 5), np.array([[0, 1, 2, 3, 0]] * 2)],
        [(F32, (4, 5))],
        {"axis": 0},
    ),
    "scatter_nd": (
        "mo.scatter_nd",
        [floats(4, 5), floats(3, 5), np.array([[0], [2], [0]])],
        [(F32, (4, 5))],
        {},
    ),
    "scatter_reduce": (
        "mo.scatter_reduce",
        [floats(4, 5), floats(6, 5), RNG.integers(-4, 4, (6, 5))],
        [(F32, (4, 5))],
        {"axis": 0, "reduction": "add"},
    ),
    "scatter_nd_reduce": (
        "mo.scatter_nd_reduce",
        [floats(4, 5), floats(3, 5), np.array([[0], [2], [0]])],
        [(F32, (4, 5))],
        {"reduction": "max"},
    ),
    "cumsum": (
        "mo.cumsum",
        [floats(3, 4, 5)],
        [(F32, (3, 4, 5))],
        {"axis": 1, "exclusive": False, "reverse": True},
    ),
    "top_k": ("mo.top_k", [floats(2, 9)], [(F32, (2, 4)), (I64, (2, 4))], {"k": 4, "axis": -1}),
    "bottom_k": (
        "mo.bottom_k",
        [floats(2, 9)],
        [(F32, (2, 4)), (I64, (2, 4))],
        {"k": 4, "axis": -1},
    ),
    "argmax": ("mo.argmax", [floats(2, 19)], [(I64, (2, 1))], {"axis": 1}),
    "argmin": ("mo.argmin", [floats(3, 4)], [(I64, (1, 4))], {"axis": 0}),
    "pad": (
        "mo.pad",
        [floats(2, 3)],
        [(F32, (4, 6))],
        {"low": (1, 2), "high": (1, 1), "mode": "constant", "value": 2.5},
    ),
    "concat": ("mo.concat", [floats(2, 3), floats(2, 1)], [(F32, (2, 4))], {"axis": 1}),
    "range": ("mo.range", [np.array(2), np.array(9), np.array(3)], [(I64, (3,))], {}),
    "argsort": (
        "mo.argsort",
        [RNG.integers(0, 9, (2, 40, 2))],
        [(I64, (2, 40, 2))],
        {"axis": 1, "ascending": True},
    ),
    "argsort of several runs": (
        "mo.argsort",
        [RNG.integers(0, 99, 2100)],
        [(I64, (2100,))],
        {"axis": 0, "ascending": False},
    ),
    "nonzero": (
        "mo.nonzero",
        [np.eye(5, 7, dtype=bool), np.array(5)],
        [(I64, (5, 2))],
        {},
    ),
    "conv": (
        "mo.conv",
        [floats(1, 5, 14, 6), floats(3, 2, 3, 4)],
        [(F32, (1, 3, 14, 4))],
        {"stride": (2, 1), "dilation": (1, 2), "padding": (1, 1, 0, 2), "groups": 2},
    ),
    "conv of volumes": (
        "mo.conv",
        [floats(2, 3, 4, 5, 3), floats(2, 2, 2, 3, 5)],
        [(F32, (2, 2, 3, 4, 5))],
        {"stride": (1, 1, 1), "dilation": (1, 1, 1), "padding": (0,) * 6, "groups": 1},
    ),
    **{
        f"pack_filter {np.dtype(dtype)}": (
            "mok.pack_filter",
            [floats(2, 1, 3, 10, dtype=dtype)],
            [(dtype, (2, filter_elements((2, 1), 3, DType.from_numpy(np.dtype(dtype)))))],
            {"groups": 2},
        )
        for dtype in (F32, BF16)
    },
    **{
        f"packed_conv {np.dtype(dtype)}, padding {padding}": (
            "mok.packed_conv",
            [
                floats(1, 5, 6, 4, dtype=dtype),
                floats(
                    2, filter_elements((3, 2), 4, DType.from_numpy(np.dtype(dtype))), dtype=dtype
                ),
            ],
            [(dtype, (1, 3 + padding, 5, 35))],
            {
                "stride": (1, 1),
                "dilation": (1, 1),
                "padding": (padding, 0, 0, 0),
                "groups": 1,
                "taps": (3, 2),
                "columns": 35,
            },
        )
        for dtype in (F32, BF16, np.float16)
        for padding in (0, 1)
    },
    "pack_int8_filter": (
        "mok.pack_int8_filter",
        [RNG.integers(-128, 128, (2, 1, 4, 35)).astype(np.int8)],
        [(np.int8, (2, (8 + 4) * 32))],
        {},
    ),
    **{
        f"int8_conv of {channels} channels": (
            "mok.int8_conv",
            [
                RNG.integers(-128, 128, (1, 3, 4, channels)).astype(np.int8),
                RNG.integers(-128, 128, (1, (2 * channels + 4) * 32)).astype(np.int8),
            ],
            [(np.int32, (1, 4, 2, 5))],
            {
                "stride": (1, 2),
                "dilation": (1, 1),
                "padding": (1, 1, 0, 0),
                "groups": 1,
                "taps": (2, 1),
                "columns": 5,
                "fill": -3,
            },
        )
        for channels in (4, 192)
    },
    "winograd_filter": (
        "mok.winograd_filter",
        [floats(3, 3, 2, 5)],
        [(F32, (1, PRODUCTS * 2 * 32))],
        {},
    ),
    **{
        f"winograd_conv {dilation}": (
            "mok.winograd_conv",
            [floats(1, 5, 6, 3), floats(1, PRODUCTS * 3 * 32)],
            [(F32, (1, 5, 5, 4))],
            {
                "stride": (1, 1),
                "dilation": (dilation, dilation),
                "padding": (dilation, dilation, dilation, dilation - 1),
                "groups": 1,
                "taps": (3, 3),
                "columns": 4,
            },
        )
        for dilation in (1, 2)
    },
    "conv depthwise": (
        "mo.conv",
        [floats(1, 5, 9, 6), floats(3, 2, 1, 6)],
        [(F32, (1, 5, 8, 6))],
        {"stride": (1, 1), "dilation": (1, 1), "padding": (1, 1, 0, 0), "groups": 6},
    ),
    "conv_transpose": (
        "mo.conv_transpose",
        [floats(1, 3, 8, 3), floats(3, 2, 3, 5)],
        [(F32, (1, 6, 17, 5))],
        {
            "stride": (2, 2),
            "dilation": (1, 2),
            "padding": (1, 0, 0, 0),
            "output_padding": (0, 0),
        },
    ),
    "resize nearest": (
        "mo.resize",
        [floats(1, 2, 3, 4)],
        [(F32, (1, 2, 5, 3))],
        {"mode": "nearest"},
    ),
    "resize": ("mo.resize", [floats(1, 2, 3, 9)], [(F32, (1, 2, 5, 18))], {"mode": "bicubic"}),
    "roi_align": (
        "mo.roi_align",
        [floats(2, 4, 5, 19), np.array([[1, 0.5, -1, 4, 3.5], [0, 2, 2, 9, 9]], np.float32)],
        [(F32, (2, 2, 3, 19))],
        {
            "output_height": 2,
            "output_width": 3,
            "spatial_scale": 0.5,
            "sampling_ratio": 0,
            "aligned": True,
            "mode": "AVG",
        },
    ),
    "nms": (
        "mo.nms",
        [
            RNG.uniform(0, 4, (2, 19, 4)).astype(np.float32),
            RNG.uniform(0, 1, (2, 3, 19)).astype(np.float32),
            np.array(4),
            np.array(0.4, np.float32),
            np.array(0.2, np.float32),
        ],
        [(I64, (2, 3, 19))],
        {},
    ),
    "fold": (
        "mo.fold",
        [floats(1, 12, 24)],
        [(F32, (1, 2, 5, 14))],
        {
            "kernel": (3, 2),
            "stride": (2, 2),
            "dilation": (1, 3),
            "padding": (1, 1, 2, 2),
        },
    ),
    "irfft": (
        "mo.irfft",
        [floats(2, 6, 2), np.stack([np.cos(TURNS), np.sin(TURNS)], -1).astype(F32)],
        [(F32, (2, 12))],
        {"n": 12, "axis": 1, "normalization": "backward"},
    ),
    **{
        f"dequantize {name}": (
            "mo.dequantize",
            [random_weight(np.random.default_rng(1), 2, form.elements, name)],
            [(F32, (2, form.elements))],
            {"encoding": name},
        )
        for name, form in BLOCK_FORMATS.items()
    },
    **{
        f"pack {name}": (
            "mok.pack",
            [random_weight(np.random.default_rng(2), 3, form.super_block, name)],
            [(np.uint8, (1, form.group_bytes(form.super_block)))],
            {"encoding": name},
        )
        for name, form in FORMATS.items()
    },
    **{
        f"packed_matmul {name}, {rows} rows": (
            "mok.packed_matmul",
            [
                floats(rows, form.super_block),
                RNG.integers(0, 60, (1, form.group_bytes(form.super_block)), np.uint8),
            ],
            [(F32, (rows, 5))],
            {"encoding": name, "columns": 5, "streamed": rows == 3},
        )
        for name, form in FORMATS.items()
        for rows in ((3, 33) if name in ("Q4_0", "Q6_K") else (3,))
    },
    **{
        f"pack {way} {np.dtype(dtype)}": (
            "mok.pack",
            [floats(*shape, dtype=dtype)],
            [(dtype, (2, panel_elements(32)))],
            {"encoding": way},
        )
        for dtype in (F32, BF16)
        for way, shape in (("rows", (34, 32)), ("columns", (32, 33)))
    },
    "code bfloat16": (
        "mok.code",
        [floats(2, panel_elements(32), dtype=BF16)],
        [(np.uint8, (2, coded_bytes(panel_elements(32), DType.bfloat16)))],
        {"encoding": "coded bfloat16"},
    ),
    **{
        f"packed_matmul {np.dtype(dtype)}, {rows} rows": (
            "mok.packed_matmul",
            [floats(rows, 34, dtype=dtype), floats(1, panel_elements(34), dtype=dtype)],
            [(F32, (rows, 5))],
            {"encoding": "rows", "columns": 5, "streamed": rows == 3},
        )
        for dtype in (F32, BF16, np.float16)
        for rows in (3, 9)
    },
    **{
        f"norm and packed_matmul {encoding} {np.dtype(dtype)}, {rows} rows": (
            "mok.packed_matmul",
            [
                floats(rows, inner, dtype=dtype),
                RNG.integers(0, 60, (1, FORMATS["Q4_0"].group_bytes(inner)), np.uint8)
                if encoding == "Q4_0"
                else floats(1, panel_elements(inner), dtype=dtype),
                floats(inner, dtype=dtype),
            ],
            [(dtype, (rows, 5))],
            {"encoding": encoding, "columns": 5, "streamed": False, "norm": (1e-5, 0.5, first)},
        )
        for encoding, dtype, rows, inner, first in (
            ("Q4_0", F32, 3, 64, True),
            ("Q4_0", F32, 65, 64, True),
            ("rows", BF16, 2, 34, False),
            ("rows", F32, 130, 34, False),
        )
    },
    # several tiles, panels and K blocks, and an odd depth of pairs
    **{
        f"packed_matmul {np.dtype(dtype)}, [{rows}, {inner}], {columns} columns": (
            "mok.packed_matmul",
            [
                floats(rows, inner, dtype=dtype),
                floats(-(-columns // 32), panel_elements(inner), dtype=dtype),
            ],
            [(F32, (rows, columns))],
            {"encoding": "rows", "columns": columns, "streamed": False},
        )
        for dtype, rows, inner, columns in (
            (F32, 29, 290, 70),
            (F32, 53, 8, 33),
            (BF16, 14, 33, 65),
            (BF16, 41, 34, 31),
            (np.float16, 29, 262, 34),
        )
    },
    # three products with a result each, then two products summed in one part
    **{
        f"packed_products of {encoding} {np.dtype(dtype)}, {rows} rows": (
            "mok.packed_products",
            [
                floats(rows, inner, dtype=dtype),
                RNG.integers(0, 60, (6, FORMATS["Q4_0"].group_bytes(inner)), np.uint8)
                if encoding == "Q4_0"
                else floats(6, panel_elements(inner), dtype=dtype),
            ],
            [(F32, (rows, 5)), (BF16, (rows, 33)), (F32, (rows, 40)), (F32, (rows, 40))],
            {"encoding": encoding, "parts": ((1, 1), (1, 1), (2, 2)), "streamed": False},
        )
        for encoding, dtype, rows, inner in (
            ("Q4_0", F32, 3, 64),
            ("Q4_0", F32, 33, 32),
            ("rows", F32, 3, 35),
            ("rows", F32, 14, 290),
            ("rows", BF16, 9, 34),
        )
    },
    "quantize Q8_0": ("mo.quantize", [floats(2, 32)], [(np.uint8, (2, 34))], {"encoding": "Q8_0"}),
    **{
        f"quantize {encoding}": (
            "mo.quantize",
            [floats(1, 512)],
            [(np.uint8, (1, 2 * BLOCK_FORMATS[encoding].bytes))],
            {"encoding": encoding},
        )
        for encoding in ("Q4_K", "Q5_K", "Q6_K")
    },
    # weights are the same in each row
    **{
        f"quantize {encoding} weighted": (
            "mo.quantize",
            [floats(1, columns), np.abs(floats(columns))],
            [
                (
                    np.uint8,
                    (
                        1,
                        columns // BLOCK_FORMATS[encoding].elements * BLOCK_FORMATS[encoding].bytes,
                    ),
                )
            ],
            {"encoding": encoding},
        )
        for encoding, columns in (("Q4_0", 64), ("Q4_K", 256), ("Q6_K", 256))
    },
    "quantize Q4_0": ("mo.quantize", [floats(2, 32)], [(np.uint8, (2, 18))], {"encoding": "Q4_0"}),
    "qmatmul": (
        "mo.qmatmul",
        [floats(3, 64), encode(floats(5, 64), "Q8_0")],
        [(F32, (3, 5))],
        {"encoding": "Q8_0"},
    ),
    "qmatmul_gptq": (
        "mo.qmatmul_gptq",
        [floats(5, 16), *gptq_weight(RNG, 16, 24, 4, 8, True)[0]],
        [(F32, (5, 24))],
        {"bits": 4, "group_size": 8},
    ),
    "max_pool": (
        "mo.max_pool",
        [floats(1, 5, 6, 3)],
        [(F32, (1, 3, 3, 3))],
        {
            "kernel": (3, 2),
            "stride": (2, 2),
            "dilation": (1, 1),
            "padding": (1, 1, 0, 0),
            "ceil_mode": False,
        },
    ),
    "avg_pool": (
        "mo.avg_pool",
        [floats(1, 5, 6, 3)],
        [(F32, (1, 3, 4, 3))],
        {
            "kernel": (3, 2),
            "stride": (2, 2),
            "dilation": (1, 1),
            "padding": (1, 1, 1, 1),
            "ceil_mode": True,
            "count_boundary": True,
        },
    ),
    "random": (
        "mo.random",
        [np.array(-3, np.int64)],
        [(F32, (3, 7))],
        {"distribution": "uniform", "stream": 2},
    ),
    "store_slice_dynamic": (
        "mo.buffer_store_slice_dynamic",
        [floats(3, 5), floats(5, 9), *DIMS],
        [],
        {},
    ),
    "slice_dynamic": ("mo.slice_dynamic", [floats(5, 9), *DIMS], [(F32, (3, 5))], {}),
}


def test_every_kernel_has_a_case() -> None:
    assert {case[0] for case in CASES.values()} == set(library.CPU_KERNELS.families)


@pytest.mark.parametrize("name", CASES)
def test_interpreted(name: str) -> None:
    symbol, operands, results, attributes = CASES[name]
    ours, theirs = copy.deepcopy(operands), copy.deepcopy(operands)
    compiled = run(symbol, ours, results, attributes)
    plain = interpreted(symbol, theirs, results, attributes)
    for a, b in zip([*compiled, *ours], [*plain, *theirs], strict=True):
        assert_close(a, b)


def check_bounds(name: str, level: int) -> None:
    """No check of a level fails, and results are those of the code without checks."""
    symbol, operands, results, attributes = CASES[name]
    ours, theirs = copy.deepcopy(operands), copy.deepcopy(operands)
    compiled = run(symbol, ours, results, attributes)
    with flags.override(MAX_KERNEL_CHECK=level):
        checked = run(symbol, theirs, results, attributes)
    for a, b in zip([*compiled, *ours], [*checked, *theirs], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_bounds(name: str) -> None:
    """The second level has the checks of the first; LLVM takes a quarter of the time, as it does not optimize them."""
    check_bounds(name, 2)


FIRST_LEVEL = (
    "matmul", "attention", "gated delta rule", "packed_matmul Q4_0, 3 rows", "conv", "top_k",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [name if name in FIRST_LEVEL else pytest.param(name, marks=pytest.mark.long) for name in CASES],
)
def test_bounds_of_optimized_code(name: str) -> None:
    check_bounds(name, 1)
