"""Sampling of tokens, penalties, and the state of a decoding step, in NumPy."""

from __future__ import annotations

import numpy as np

from max._interpreter.core import Array, register
from max._interpreter.models.attention import check_offsets

__all__ = ["uniform"]


def uniform(seed: int) -> float:
    """A sample in [0, 1): the upper 24 bits of splitmix64's first output for a seed."""
    return (_splitmix64(seed, 1) >> 40) / 2**24


def _splitmix64(seed: int, index: int) -> int:
    """Output number `index`, from 1, of splitmix64 for a seed."""
    mask = (1 << 64) - 1
    # constants of Steele, Lea and Flood, 2014; the increment is 2**64 divided by the golden ratio
    z = (int(seed) + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def _sample_row(
    logits: Array, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> int:
    """Samples the token of one row; the kernel of `mo.sample.token` documents the order of the filters."""
    if not temperature >= 0:
        raise ValueError(f"the temperature is {temperature}, expected 0 or more")
    if not (0 <= top_p <= 1 and 0 <= min_p <= 1):
        raise ValueError(f"top_p is {top_p}, min_p {min_p}; expected 0 to 1")
    if not logits.size:
        raise ValueError("the logits have 0 columns, expected 1 or more")
    if np.isnan(logits).all():
        # no token: mo.next_step ends the sequence on a negative one
        return -1
    scores: Array = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    best = int(np.argmax(scores))
    peak = scores[best]
    if temperature == 0 or top_k == 1 or peak == -np.inf:
        return best
    if peak == np.inf:
        # exp(inf - inf) is NaN: infinite logits share the probability
        weights: Array = (scores == np.inf).astype(np.float64)
    else:
        weights = np.where(scores > -np.inf, np.exp((scores - peak) / temperature), 0.0)
    order = np.argsort(-scores, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        cumulative = np.cumsum(weights[order])
        # the smallest set of most probable tokens whose probability reaches top_p
        count = int(np.count_nonzero(cumulative < top_p * cumulative[-1])) + 1
        order = order[: max(1, count)]
    eligible = np.zeros(len(scores), bool)
    eligible[order] = True
    # the best token has weight 1, so min_p needs no scaling
    eligible &= (weights >= min_p) & (weights > 0)
    cumulative = np.cumsum(np.where(eligible, weights, 0.0))
    # inverse of the distribution in the order of tokens, not of probabilities
    return int(np.count_nonzero(cumulative <= uniform(seed) * cumulative[-1]))


@register("mo.sample.token")
def _sample(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    seed: Array,
) -> Array:
    rows = zip(logits, temperature, top_k, top_p, min_p, seed, strict=True)
    tokens = [
        _sample_row(row, float(t), int(k), float(p), float(m), int(n))
        for row, t, k, p, m, n in rows
    ]
    return np.array(tokens, np.int64)


@register("mo.sample.allowed")
def _sample_allowed(logits: Array, *inputs: Array) -> Array:
    *parameters, words = inputs
    if len(words) != len(logits):
        raise ValueError(f"allowed has {len(words)} rows for {len(logits)} of logits")
    bits = (words[:, :, None] >> np.arange(32)) & 1
    flags = bits.reshape(len(words), 32 * words.shape[1])[:, : logits.shape[1]].astype(bool)
    # tokens past the words are not allowed
    allowed = np.zeros(logits.shape, bool)
    allowed[:, : flags.shape[1]] = flags
    return _sample(np.where(allowed, logits, np.finfo(np.float32).min), *parameters)


@register("mo.step.ready")
def _step_ready(steps: Array, prepared: Array, allowed: Array) -> Array:
    if not len(steps) == len(prepared) == 1:
        raise ValueError("steps and prepared have one element each")
    return np.array([prepared[0] > steps[0]], np.uint8)


@register("mo.next_step.ragged.paged")
def _next_step(
    next_tokens: Array,
    first_seeds: Array,
    ends: Array,
    interrupted: Array,
    tokens: Array,
    cache_lengths: Array,
    max_lengths: Array,
    seeds: Array,
    history: Array,
    steps: Array,
    again: Array,
) -> None:
    step = int(steps[0])
    if not 0 <= step < len(history):
        raise IndexError(f"step {step} of {len(history)}, the rows of the history")
    rows = {len(x) for x in (next_tokens, first_seeds, ends, tokens, cache_lengths, seeds)}
    if rows != {history.shape[1]} or max_lengths.shape[1] != 2:
        raise ValueError(f"operands of {rows} rows for a history of {history.shape[1]}")
    if not len(interrupted) == len(steps) == len(again) == 1:
        raise ValueError("interrupted, steps and again have one element each")
    if (cache_lengths == np.iinfo(cache_lengths.dtype).max).any():
        raise ValueError(f"cache_lengths are {cache_lengths}: one is the maximum of its type")
    history[step] = tokens[:] = next_tokens
    cache_lengths += np.uint32(1)
    max_lengths[0, 1] += np.uint32(1)
    for row, (first, length) in enumerate(zip(first_seeds, cache_lengths, strict=True)):
        seeds[row] = _splitmix64(first, int(length) + 2)
    steps[0] = step + 1
    ended = bool(interrupted[0]) or bool(
        (ends == next_tokens[:, None]).any() or (next_tokens < 0).any()
    )
    again[0] = not ended and step + 1 < len(history)


def _round_sizes(
    rounds: Array, history: Array, cache_lengths: Array, num_rows: int
) -> tuple[int, int, int]:
    """The number of a round, that of sequences, and that of rows of each."""
    number, batch = int(rounds[0]), len(cache_lengths)
    if not 0 <= number < len(history):
        raise IndexError(f"round {number} of {len(history)}, the rows of the history")
    if not batch or not num_rows or num_rows % batch:
        raise ValueError(f"{num_rows} rows of {batch} sequences, expected a multiple")
    width = num_rows // batch
    if (cache_lengths.astype(np.int64) + width > np.iinfo(np.uint32).max).any():
        raise ValueError(f"cache_lengths are {cache_lengths}: one is near the maximum of its type")
    return number, batch, width


@register("mo.next_round.ragged.paged")
def _next_round(
    chosen_tokens: Array,
    first_seeds: Array,
    ends: Array,
    bounds: Array,
    vocabulary: Array,
    interrupt: Array,
    rows: Array,
    cache_lengths: Array,
    max_lengths: Array,
    seeds: Array,
    pairs: Array,
    pair_lengths: Array,
    pair_max_lengths: Array,
    draft_lengths: Array,
    draft_max_lengths: Array,
    draft_seeds: Array,
    num_drafted: Array,
    history: Array,
    rounds: Array,
    again: Array,
) -> None:
    number, batch, width = _round_sizes(rounds, history, cache_lengths, len(rows))
    if {len(chosen_tokens), len(rows), len(seeds), history.shape[1]} != {len(rows)}:
        raise ValueError(f"operands of other numbers of rows than {len(rows)}")
    of_requests = (first_seeds, ends, bounds, pair_lengths, draft_lengths, draft_seeds)
    if {len(pairs) // 2, *map(len, of_requests)} != {batch} or len(pairs) % 2:
        raise ValueError(f"operands of other numbers of sequences than {batch}")
    if any(len(x) != 1 for x in (vocabulary, interrupt, num_drafted, rounds, again)):
        raise ValueError(
            "vocabulary, interrupt, num_drafted, rounds and again have one element each"
        )
    # [batch, width]: a drafted token is right if it is chosen after the row before it, as those before it are
    given, wanted = rows.reshape(batch, width), chosen_tokens.reshape(batch, width)
    equal: Array = given[:, 1:] == wanted[:, :-1]
    right: Array = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
    new = np.where(np.arange(width) <= right[:, None], wanted, -2)
    history[number] = new.reshape(-1)
    last = wanted[np.arange(batch), right]
    pairs.reshape(batch, 2)[:] = np.stack([given[np.arange(batch), right], last], axis=1)
    given[:, 0] = last
    cache_lengths += (right + 1).astype(np.uint32)
    lengths: list[int] = cache_lengths.tolist()
    pair_lengths[:], draft_lengths[:] = [n - 1 for n in lengths], lengths
    max_lengths[0, 1] = draft_max_lengths[0, 1] = max(lengths)
    pair_max_lengths[0, 1] = max(lengths) - 1
    for row, (first, length) in enumerate(zip(first_seeds, lengths, strict=True)):
        draft_seeds[row] = _splitmix64(first, length + 2)
        for place in range(width):
            seeds[row * width + place] = _splitmix64(first, length + 2 + place)
    num_drafted[0], rounds[0] = 0, number + 1
    ended = bool(interrupt[0]) or any(
        set(a) & set(b) for a, b in zip(ends.tolist(), new.tolist(), strict=True)
    )
    ended |= bool((last < 0).any() or (last >= vocabulary[0]).any())
    ended |= any(n + width > bound for n, bound in zip(lengths, bounds.tolist(), strict=True))
    again[0] = not ended and number + 1 < len(history)


@register("mo.next_text_round.ragged.paged")
def _next_text_round(
    chosen_tokens: Array,
    first_seeds: Array,
    ends: Array,
    offsets: Array,
    texts: Array,
    interrupt: Array,
    rows: Array,
    cache_lengths: Array,
    max_lengths: Array,
    seeds: Array,
    history: Array,
    rounds: Array,
    again: Array,
) -> None:
    number, batch, width = _round_sizes(rounds, history, cache_lengths, len(chosen_tokens))
    if {len(seeds), history.shape[1]} != {len(chosen_tokens)}:
        raise ValueError(f"operands of other numbers of rows than {len(chosen_tokens)}")
    if {len(offsets) - 1, *map(len, (first_seeds, ends, texts))} != {batch}:
        raise ValueError(f"operands of other numbers of sequences than {batch}")
    if any(len(x) != 1 for x in (interrupt, rounds, again)):
        raise ValueError("interrupt, rounds and again have one element each")
    if texts.shape[1] < len(history) * width - 1:
        raise ValueError(f"texts of {texts.shape[1]} tokens, expected {len(history) * width - 1}")
    bounds = offsets.astype(np.int64)
    counts: list[int] = np.diff(bounds).tolist()
    if bounds[0] or bounds[-1] != len(rows) or min(counts) < 1 or max(counts) > width:
        raise ValueError(f"offsets are {offsets} of {len(rows)} rows, 1 to {width} a sequence")
    ended, history[number] = bool(interrupt[0]), -2
    for row, count in enumerate(counts):
        # of a sequence with fewer rows the last places count
        end, first = (row + 1) * width, int(bounds[row])
        wanted, given = chosen_tokens[end - count : end], rows[first : first + count]
        differ = np.flatnonzero(given[1:] != wanted[:-1])
        right = int(differ[0]) if differ.size else count - 1
        new = wanted[: right + 1]
        history[number, row * width : row * width + right + 1] = new
        done = number * count
        expected = texts[row, done + count - 1] if number + 1 < len(history) else -1
        ended |= bool(np.isin(new, ends[row]).any() or new[-1] < 0 or right + 1 < count)
        ended |= bool(expected >= 0 and new[-1] != expected)
        cache_lengths[row] += right + 1
        length = int(cache_lengths[row])
        given[0] = new[-1]
        if number + 1 < len(history):
            given[1:] = texts[row, done + count : done + 2 * count - 1]
        for place in range(count):
            seeds[end - count + place] = _splitmix64(first_seeds[row], length + 2 + place)
    max_lengths[0, 1] = max(cache_lengths.tolist())
    rounds[0] = number + 1
    again[0] = not ended and number + 1 < len(history)


@register("mo.penalties")
def _penalties(
    logits: Array,
    tokens: Array,
    counts: Array,
    offsets: Array,
    frequency: Array,
    presence: Array,
    repetition: Array,
) -> Array:
    check_offsets("offsets", offsets, len(logits), len(tokens), exact=False)
    if not len(frequency) == len(presence) == len(repetition) == len(logits):
        raise ValueError(f"penalties of other numbers of rows than {len(logits)}")
    if len(counts) != len(tokens):
        raise ValueError(f"{len(counts)} counts of {len(tokens)} tokens")
    out = logits.astype(np.float32, copy=True)
    for row in range(len(out)):
        for i in range(int(offsets[row]), int(offsets[row + 1])):
            token, count = int(tokens[i]), int(counts[i])
            if not 0 <= token < out.shape[1]:
                raise IndexError(f"token {token} is out of range for {out.shape[1]} logits")
            if count <= 0:
                continue
            logit = out[row, token]
            # both lower the logit if the penalty is greater than 1
            logit = logit / repetition[row] if logit > 0 else logit * repetition[row]
            out[row, token] = logit - frequency[row] * np.float32(count) - presence[row]
    return out


@register("mo.frequencies.update")
def _update_frequencies(data: Array, offsets: Array, tokens: Array) -> None:
    check_offsets("offsets", offsets, len(tokens), len(data), exact=False)
    for row, token in enumerate(tokens):
        pairs = data[int(offsets[row]) : int(offsets[row + 1])]
        # pairs: [pairs, 2] of token and count, a view of the buffer
        used = (pairs[:, 0] >= 0) & (pairs[:, 1] > 0)
        (at,) = np.nonzero(used & (pairs[:, 0] == token))
        (free,) = np.nonzero(~used)
        if len(at):
            pairs[at[0], 1] += 1
        elif len(free):
            pairs[free[0]] = token, 1
        else:
            raise ValueError(f"row {row} has no free pair for token {token}")
