"""Ops of a decoding step: penalties on logits, the choice of tokens, counts of tokens, the inputs of the next step."""

from __future__ import annotations

from max.dtype import DType
from max.mlir.declare import NamedTypes, declare
from max.mlir.operand import INTEGERS, Operand
from max.mlir.operation import Attrs, Types, define
from max.mlir.types import TensorType

_F32, _I64, _U32, _U64 = (DType.float32,), (DType.int64,), (DType.uint32,), (DType.uint64,)
_BYTES = (DType.uint8,)
_COUNTS = (DType.int32, DType.int64)


def _token_types(types: NamedTypes, attrs: Attrs) -> Types:
    logits = types["logits"]
    return (TensorType.get(DType.int64, logits.shape[:1], logits.device),)


_SAMPLED = (
    # [batch, vocabulary]; the others: [batch]
    Operand("logits", _F32, 2),
    Operand("temperature", _F32, 1),
    Operand("top_k", _I64, 1),
    Operand("top_p", _F32, 1),
    Operand("min_p", _F32, 1),
    Operand("seed", _U64, 1),
)
_TAKES_SAMPLED = (
    "logits f32 `[batch, vocab]`, temperature f32 `[batch]`, top_k si64 `[batch]` "
    "(≤ 0: all), top_p, min_p f32 `[batch]`, seed ui64 `[batch]`"
)

define(
    declare(
        "mo.sample.token",
        _SAMPLED,
        1,
        _token_types,
        takes=_TAKES_SAMPLED,
        gives="si64 `[batch]`",
        doc="temperature 0 or top_k 1 is greedy; ties take the lowest index",
    )
)

define(
    declare(
        "mo.sample.allowed",
        # [batch, words]: what the host writes, so that it is read in its place
        (*_SAMPLED, Operand("allowed", (DType.int32,), 2, is_buffer=True)),
        1,
        _token_types,
        chained=True,
        takes=f"{_TAKES_SAMPLED}; buffer allowed si32 `[batch, words]`; chain",
        gives="si64 `[batch]`, chain",
        doc=(
            "`mo.sample.token` of logits in which those of other tokens are the least finite float; token "
            "t is allowed if bit t % 32 of word t / 32 of its row is 1, and not if the row has no such word"
        ),
    )
)


def _penalty_types(types: NamedTypes, attrs: Attrs) -> Types:
    logits = types["logits"]
    assert isinstance(logits, TensorType)
    return (logits,)


define(
    declare(
        "mo.penalties",
        (
            # [rows, vocabulary]; row i has the tokens and counts from offsets[i] to offsets[i + 1]
            Operand("logits", _F32, 2),
            Operand("tokens", _COUNTS, 1),
            Operand("counts", _COUNTS, 1),
            Operand("offsets", _U32, 1),
            Operand("frequency_penalty", _F32, 1),
            Operand("presence_penalty", _F32, 1),
            Operand("repetition_penalty", _F32, 1),
        ),
        1,
        _penalty_types,
        takes=(
            "logits f32 `[batch, vocab]`, token ids si32 `[n]`, counts si32 `[n]`, offsets "
            "u32 `[batch+1]`, frequency, presence, repetition f32 `[batch]`"
        ),
        gives="logits",
        doc="logits less the penalties of the tokens of each row",
    )
)


def _frequency_types(types: NamedTypes, attrs: Attrs) -> Types:
    op, data, tokens = "frequencies.update", types["data"], types["tokens"]
    if data.shape[1:] != data.with_shape((2,)).shape:
        raise ValueError(f"{op}: data is {data.short}, expected pairs of token and count [n, 2]")
    if data.dtype is not tokens.dtype:
        raise TypeError(f"{op}: tokens is {tokens.short}, data {data.short}; expected one dtype")
    return ()


define(
    declare(
        "mo.frequencies.update",
        (
            Operand("data", _COUNTS, 2, is_buffer=True),
            Operand("offsets", _U32, 1),
            Operand("tokens", INTEGERS, 1),
        ),
        0,
        _frequency_types,
        chained=True,
        takes=(
            "buffer si32 `[n, 2]` (token, count), offsets u32 `[batch+1]`, tokens `[batch]`, chain"
        ),
        gives="chain",
        doc="counts a token of each sequence in its part of data",
    )
)


def _ready_types(types: NamedTypes, attrs: Attrs) -> Types:
    return (TensorType.get(DType.uint8, (1,), types["steps"].device),)


define(
    declare(
        "mo.step.ready",
        (
            Operand("steps", _I64, 1, is_buffer=True),
            Operand("prepared", _I64, 1, is_buffer=True),
            # [batch, words]: what the host prepares, so that it is read after the op
            Operand("allowed", (DType.int32,), 2, is_buffer=True),
        ),
        1,
        _ready_types,
        chained=True,
        takes="buffers steps si64 `[1]`, prepared si64 `[1]`, allowed si32 `[batch, words]`; chain",
        gives="ui8 `[1]`, chain",
        doc=(
            "1 if the host has prepared the table `allowed` of step `steps`, whose number is below "
            "`prepared`; waits for that less than a millisecond; the table is read after it"
        ),
    )
)


def _check_pairs(op: str, types: NamedTypes, *names: str) -> None:
    """Raises unless operands have two elements a row."""
    for name in names:
        pairs = types[name]
        if pairs.shape[1:] != pairs.with_shape((2,)).shape:
            raise ValueError(f"{op}: {name} is {pairs.short}, expected [n, 2]")


def _next_step_types(types: NamedTypes, attrs: Attrs) -> Types:
    _check_pairs("next_step.ragged.paged", types, "max_lengths")
    return ()


define(
    declare(
        "mo.next_step.ragged.paged",
        (
            Operand("next_tokens", _I64, 1),
            Operand("first_seeds", _U64, 1),
            # [batch, n]: the tokens that end each sequence
            Operand("ends", _I64, 2),
            Operand("interrupted", _BYTES, 1),
            Operand("tokens", _I64, 1, is_buffer=True),
            Operand("cache_lengths", _U32, 1, is_buffer=True),
            Operand("max_lengths", _U32, 2, is_buffer=True),
            Operand("seeds", _U64, 1, is_buffer=True),
            # [steps, batch]
            Operand("history", _I64, 2, is_buffer=True),
            Operand("steps", _I64, 1, is_buffer=True),
            Operand("again", _BYTES, 1, is_buffer=True),
        ),
        0,
        _next_step_types,
        chained=True,
        takes=(
            "next tokens si64 `[batch]`, first seeds ui64 `[batch]`, ends si64 `[batch, "
            "n]`, interrupted ui8 `[1]`; buffers tokens si64 `[batch]`, cache_lengths u32 "
            "`[batch]`, max_lengths u32 `[1, 2]`, seeds ui64 `[batch]`, history si64 "
            "`[steps, batch]`, steps si64 `[1]`, again ui8 `[1]`; chain"
        ),
        gives="chain",
        doc=(
            "makes the inputs of the next decoding step; `again` is 1 if the history has "
            "rows left, no token is among the ends of its row, and `interrupted` is 0"
        ),
    )
)


def _next_round_types(types: NamedTypes, attrs: Attrs) -> Types:
    names = ("max_lengths", "pair_max_lengths", "draft_max_lengths")
    _check_pairs("next_round.ragged.paged", types, *names)
    return ()


define(
    declare(
        "mo.next_round.ragged.paged",
        (
            # [batch * width]: after each row of a sequence, its last token and the drafted ones
            Operand("chosen_tokens", _I64, 1),
            Operand("first_seeds", _U64, 1),
            # [batch, n]: the tokens that end each sequence
            Operand("ends", _I64, 2),
            Operand("bounds", _I64, 1),
            Operand("vocabulary", _I64, 1),
            Operand("interrupt", _BYTES, 1),
            Operand("rows", _I64, 1, is_buffer=True),
            Operand("cache_lengths", _U32, 1, is_buffer=True),
            Operand("max_lengths", _U32, 2, is_buffer=True),
            Operand("seeds", _U64, 1, is_buffer=True),
            Operand("pairs", _I64, 1, is_buffer=True),
            Operand("pair_lengths", _U32, 1, is_buffer=True),
            Operand("pair_max_lengths", _U32, 2, is_buffer=True),
            Operand("draft_lengths", _U32, 1, is_buffer=True),
            Operand("draft_max_lengths", _U32, 2, is_buffer=True),
            Operand("draft_seeds", _U64, 1, is_buffer=True),
            Operand("num_drafted", _I64, 1, is_buffer=True),
            # [rounds, batch * width]
            Operand("history", _I64, 2, is_buffer=True),
            Operand("rounds", _I64, 1, is_buffer=True),
            Operand("again", _BYTES, 1, is_buffer=True),
        ),
        0,
        _next_round_types,
        chained=True,
        takes=(
            "chosen_tokens si64 `[batch * width]`, first seeds ui64 `[batch]`, ends si64 `[batch, n]`, bounds si64 "
            "`[batch]`, vocabulary si64 `[1]`, interrupt ui8 `[1]`; buffers rows si64 `[batch * width]`, "
            "cache_lengths u32 `[batch]`, max_lengths u32 `[1, 2]`, seeds ui64 `[batch * width]`, pairs si64 "
            "`[2 * batch]`, pair_lengths u32 `[batch]`, pair_max_lengths u32 `[1, 2]`, draft_lengths u32 `[batch]`, "
            "draft_max_lengths u32 `[1, 2]`, draft_seeds ui64 `[batch]`, num_drafted si64 `[1]`, history si64 "
            "`[rounds, batch * width]`, rounds si64 `[1]`, again ui8 `[1]`; chain"
        ),
        gives="chain",
        doc=(
            "makes the inputs of the next round of drafted tokens: of the rows of a sequence, its last token and the "
            "drafted ones, those are right that are `chosen_tokens` after the row before them; the history has these "
            "and the token chosen after them, then -2; `again` is 1 if it has rows left, no new token ends its "
            "sequence or is none of the draft model's `vocabulary`, the next round stays within `bounds`, and "
            "`interrupt` is 0"
        ),
    )
)


def _next_text_round_types(types: NamedTypes, attrs: Attrs) -> Types:
    _check_pairs("next_text_round.ragged.paged", types, "max_lengths")
    return ()


define(
    declare(
        "mo.next_text_round.ragged.paged",
        (
            # [batch * width]: after the last `width` rows of each sequence
            Operand("chosen_tokens", _I64, 1),
            Operand("first_seeds", _U64, 1),
            # [batch, n]: the tokens that end each sequence
            Operand("ends", _I64, 2),
            Operand("offsets", _U32, 1),
            # [batch, m]: what is drafted of each sequence; -1: nothing is
            Operand("texts", _I64, 2),
            Operand("interrupt", _BYTES, 1),
            Operand("rows", _I64, 1, is_buffer=True),
            Operand("cache_lengths", _U32, 1, is_buffer=True),
            Operand("max_lengths", _U32, 2, is_buffer=True),
            Operand("seeds", _U64, 1, is_buffer=True),
            # [rounds, batch * width]
            Operand("history", _I64, 2, is_buffer=True),
            Operand("rounds", _I64, 1, is_buffer=True),
            Operand("again", _BYTES, 1, is_buffer=True),
        ),
        0,
        _next_text_round_types,
        chained=True,
        takes=(
            "chosen_tokens si64 `[batch * width]`, first seeds ui64 `[batch]`, ends si64 `[batch, n]`, offsets u32 "
            "`[batch + 1]`, texts si64 `[batch, m]`, interrupt ui8 `[1]`; buffers rows si64 `[total]`, cache_lengths "
            "u32 `[batch]`, max_lengths u32 `[1, 2]`, seeds ui64 `[batch * width]`, history si64 `[rounds, batch * "
            "width]`, rounds si64 `[1]`, again ui8 `[1]`; chain"
        ),
        gives="chain",
        doc=(
            "makes the inputs of the next round of tokens that texts draft: of the rows of a sequence (`offsets`), its "
            "last token and the drafted ones, those are right that are `chosen_tokens` after the row before them "
            "(those of a sequence with fewer rows than `width` are at its last places); the history has these and the "
            "token chosen after them, then -2; `again` is 1 if it has rows left, all new tokens are those of `texts` "
            "(or those are -1) and none ends its sequence or is negative, and `interrupt` is 0; each round reads as "
            "many tokens of a text as the sequence has rows"
        ),
    )
)
