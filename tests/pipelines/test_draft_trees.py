"""Trees of drafts: several continuations verified in one step, with the texts and the cache of plain decoding."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max.driver import CPU, Tensor
from max.dtype import DType
from max.interfaces import RequestID, SamplingParams
from max.nn.kv_cache.cache_params import CacheGroup, KVCacheParams
from max.pipelines import TextContext
from max.pipelines.core.draft_tree import (
    ancestor_bits,
    chain_of,
    check_tree,
    depths_of,
    grown_tree,
    part_of_tree,
    path_outcomes,
    right_path,
    sibling_ranks,
)
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.drafts.drafted_rows import DraftedRows
from max.pipelines.generation.drafts.lengths import DraftLengths
from max.pipelines.generation.drafts.lookup import LookupDrafter
from max.pipelines.generation.drafts.recent_answers import RecentAnswersDrafter
from max.pipelines.generation.engine import Engine
from max.pipelines.kv_cache.manager import PagedKVCacheManager
from max.pipelines.models.blocks.attention import AttentionForm, QueryGrowth
from max.pipelines.models.blocks.block import Block
from max.pipelines.models.blocks.mixer import Mixer
from max.pipelines.models.blocks.rope import RopeConfig
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.inputs import ModelOutputs
from tests.pipelines.test_drafts import (
    context,
    distribution,
    generated,
    kinds_of_requests,
    pipeline_of,
    requests,
)


def random_tree(draw: np.random.Generator, count: int, vocabulary: int = 9):
    """Distinct siblings; parents come first."""
    tokens, parents = [], []
    for index in range(count):
        parent = int(draw.integers(-1, index)) if index else -1
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        tokens.append(int(draw.choice([t for t in range(vocabulary + count) if t not in taken])))
        parents.append(parent)
    return tokens, parents


def path_to(parents, index: int) -> list[int]:
    """The indices up to a token."""
    return [] if index == -1 else [*path_to(parents, parents[index]), index]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 20), count=st.integers(0, 14), certain=st.integers(1, 4))
def test_a_random_tree(seed: int, count: int, certain: int) -> None:
    draw = np.random.default_rng(seed)
    tokens, parents = random_tree(draw, count)
    check_tree(tokens, parents)
    paths = [path_to(parents, index) for index in range(count)]
    assert depths_of(parents) == [len(path) for path in paths]
    rows = [{*range(own + 1)} for own in range(certain)]
    rows += [{*range(certain), *(certain + index for index in path)} for path in paths]
    assert ancestor_bits(certain, parents) == [sum(1 << row for row in own) for own in rows]
    chains = [[tokens[index] for index in path] for path in paths]
    # each token by the tokens up to it, however the tree is numbered
    grown, grown_parents = grown_tree(chains)
    assert sorted([[grown[i] for i in path_to(grown_parents, n)] for n in range(count)]) == sorted(
        chains
    )
    kept = sorted({*itertools.chain(*(path for path in paths if draw.random() < 0.4))})
    part, part_parents = part_of_tree(tokens, parents, kept)
    assert [[part[i] for i in path_to(part_parents, n)] for n in range(len(part))] == [
        chains[i] for i in kept
    ]
    # what the model chooses: often one of the children
    chosen = []
    for row in range(-1, count):
        children = [t for t, p in zip(tokens, parents, strict=True) if p == row]
        chosen.append(int(draw.choice([*children, 99])))
    right, row = [], -1
    while True:
        found = [
            i
            for i, (t, p) in enumerate(zip(tokens, parents, strict=True))
            if p == row and t == chosen[row + 1]
        ]
        if not found:
            break
        (row,) = found
        right.append(row)
    assert right_path(tokens, parents, chosen) == right
    first, others = [0, 0], [0, 0]
    for row, following in zip([-1, *right], [*right, None], strict=True):
        children = [i for i, p in enumerate(parents) if p == row]
        for rank, child in enumerate(children):
            kind = others if rank else first
            kind[0] += 1
            kind[1] += child == following
            if child == following:
                break
    assert path_outcomes(parents, right) == (tuple(first), tuple(others))


def test_bad_trees_are_refused() -> None:
    one = context([1, 2, 3])
    for parents in ([0], [-2], [-1, 1], [-1, 2], [-1]):
        with pytest.raises(ValueError, match="parent"):
            one.set_draft(
                [5, 6][: max(len(parents), 2) if parents == [-1] else len(parents)], parents
            )
    with pytest.raises(ValueError, match="drafted token 2 is the second 5 after token -1"):
        one.set_draft([5, 6, 5], [-1, 0, -1])
    with pytest.raises(ValueError, match="65 new tokens with a tree; expected at most 64"):
        one.set_draft(range(62), [*chain_of(61), -1])
    one.set_draft(range(61), [*chain_of(60), -1])
    assert one.draft_parents[-2:] == (58, -1) and one.active_length == 64
    one.set_draft(range(62), chain_of(62))
    assert one.draft_parents == chain_of(62), "a chain may have more rows"
    one.set_draft((7, 8, 9), (-1, -1, 1))
    for forget in (one.reset, lambda: one.update(4), lambda: one.set_draft(())):
        forget()
        assert one.draft_parents == ()
        one.set_draft((7, 8, 9), (-1, -1, 1))
    one.to_generation_output()
    one.update(6)
    one.set_draft((7, 8), (-1, -1))
    one.truncate(4)
    assert one.draft_parents == ()


def test_a_model_without_trees_refuses_one() -> None:
    params = KVCacheParams(DType.float32, 1, 4, page_size=4)
    cache = PagedKVCacheManager(
        params, num_layers=1, num_pages=4, max_batch_size=1, max_seq_len=16, devices=[CPU()]
    )
    one = context([1, 2])
    cache.claim(one.request_id)
    one.set_draft([3, 4], [-1, -1])
    cache.alloc(one)
    with pytest.raises(ValueError, match="the model verifies no trees"):
        cache.get_runtime_inputs([one])
    assert cache.get_runtime_inputs([context([1])][:0]).ancestors is None


@pytest.mark.parametrize(
    "dtype", [DType.float32, DType.bfloat16, DType.int8, DType.float8_e4m3fn], ids=str
)
def test_the_right_branch_is_moved(dtype: DType) -> None:
    """Over the borders of pages, in both groups of layers, bit by bit."""
    params = KVCacheParams(
        dtype, 3, 4, page_size=5, verifies_trees=True, groups=(CacheGroup(1, 1, 8, None),)
    )
    cache = PagedKVCacheManager(
        params, num_layers=2, num_pages=[7, 7], max_batch_size=2, max_seq_len=30, devices=[CPU()]
    )
    draw = np.random.default_rng(3)
    one, other = context(range(8)), context(range(6))
    for each in (other, one):
        cache.claim(each.request_id)
    one.set_draft(range(9), [-1, 0, 1, -1, 3, 4, 4, 6, -1])
    cache.alloc(other)
    cache.alloc(one)
    inputs = cache.get_runtime_inputs([other, one])
    assert inputs.ancestors.to_numpy().tolist() == [0] * 6 + ancestor_bits(8, one.draft_parents)
    assert [*inputs][-1] is inputs.ancestors
    all_blocks = (cache.blocks, *cache.group_blocks)
    wanted = []
    for blocks in all_blocks:
        memory = blocks.device.memory.read(blocks._ptr, blocks.num_elements * dtype.size_in_bytes)
        memory[:] = draw.integers(0, 256, len(memory), dtype=np.uint8)
        wanted.append(memory.reshape(*blocks.shape[:5], -1).copy())
    for table, content in zip(cache.pages.tables(one.request_id), wanted, strict=True):
        before = content.copy()
        # the right ones of the tree are the drafted tokens 3, 4, 6, 7
        for target, source in enumerate((3, 4, 6, 7)):
            (old, place), (new, to) = divmod(8 + source, 5), divmod(8 + target, 5)
            content[table[new], :, :, to] = before[table[old], :, :, place]
    cache.keep_branch(one.request_id, 8, [3, 4, 6, 7])
    cache.keep_branch(one.request_id, 8, [0, 1, 2])
    cache.keep_branch(one.request_id, 8, [])
    for blocks, content in zip(all_blocks, wanted, strict=True):
        memory = blocks.device.memory.read(blocks._ptr, blocks.num_elements * dtype.size_in_bytes)
        assert np.array_equal(memory.reshape(content.shape), content)


class EveryBranch(DraftLengths):
    """Drafts always, and random parts of trees: tests do not depend on the times of steps."""

    def may_draft(self, requests):
        return True

    def length(self, request_id, requests, drafted, room, kind=0):
        return min(self.most, room)

    def kept_of_tree(self, request_id, requests, drafted, room, parents, kind=0):
        # by depth first, so that branches get room beside the first continuation
        depths = depths_of(parents)
        order = sorted(range(len(parents)), key=lambda index: (depths[index] > 3, depths[index]))
        return sorted(order[: min(self.most, room)])


class BranchingDrafter(LookupDrafter):
    """Knows what follows, and proposes it as the first, the second or the third of several continuations, with wrong
    tokens at random places of each."""

    def __init__(self, texts: dict[str, list[int]], seed: int) -> None:
        super().__init__()
        self.texts, self.draw = texts, np.random.default_rng(seed)
        self.made: dict[RequestID, list[list[int]]] = {}

    def propose(self, context, most):
        known = self.texts[context.request_id.value][len(context.generated_tokens) :][:most]
        chains = []
        for number in range(3):
            wrong = self.draw.random(len(known)) < 0.3
            chains.append(
                [(t + 1 + number) % 4096 if w else t for t, w in zip(known, wrong, strict=True)]
            )
        first, *self.made[context.request_id] = chains
        return first

    def alternatives(self, context, most):
        return self.made[context.request_id]


def branching(pipeline):
    """Lets a pipeline draft trees in each step."""
    for replica in pipeline.replicas:
        replica.drafts.lengths = EveryBranch(replica.drafts.most)
    return pipeline


@pytest.fixture(scope="module")
def plain():
    return pipeline_of(0)


@pytest.fixture(scope="module")
def drafting():
    return branching(pipeline_of(12))


def taken_branches(monkeypatch) -> list[list[int]]:
    """Collects the right tokens of trees that are no beginnings of them."""
    found, keep = [], PagedKVCacheManager.keep_branch

    def watched(self, request_id, begin, tokens):
        if list(tokens) != list(range(len(tokens))):
            found.append(list(tokens))
        keep(self, request_id, begin, tokens)

    monkeypatch.setattr(PagedKVCacheManager, "keep_branch", watched)
    return found


def by_name(texts: list[list[int]]) -> dict[str, list[int]]:
    return {f"{number}": tokens for number, tokens in enumerate(texts)}


@pytest.mark.parametrize("seed", range(2))
def test_texts_are_those_without_drafts(plain, drafting, seed: int, monkeypatch) -> None:
    """Greedy and sampled requests of several texts, token by token."""
    moved = taken_branches(monkeypatch)
    expected = generated(plain, requests(plain, seed))
    drafts = drafting.replicas[0].drafts
    monkeypatch.setattr(drafts, "_drafter", BranchingDrafter(by_name(expected), seed))
    before = drafts.accepted, drafts.verified
    assert generated(drafting, requests(drafting, seed)) == expected
    assert len(moved) > 5
    # more than a chain with 0.3 wrong tokens, 1 / 0.3 - 1, would get
    assert (drafts.accepted - before[0]) / (drafts.verified - before[1]) > 2.4


@pytest.mark.parametrize("seed", range(2))
def test_texts_by_look_up(plain, drafting, seed: int, monkeypatch) -> None:
    moved = taken_branches(monkeypatch)
    expected = generated(plain, requests(plain, seed))
    assert generated(drafting, requests(drafting, seed)) == expected
    assert moved


def test_each_kind_of_request_gets_the_tokens_without_drafts(plain, drafting, monkeypatch) -> None:
    """Penalties, filters, biases, log-probabilities; those with grammars are drafted along one continuation."""
    logged: dict[str, list] = {}
    outputs = TextContext.to_generation_output

    def recorded(self):
        output = outputs(self)
        logged.setdefault(self.request_id.value, []).extend(output.log_probabilities or ())
        return output

    monkeypatch.setattr(TextContext, "to_generation_output", recorded)
    expected = generated(plain, kinds_of_requests(plain, np.random.default_rng(0)))
    expected_logs, logged = logged, {}
    moved = taken_branches(monkeypatch)
    drafts = drafting.replicas[0].drafts
    monkeypatch.setattr(drafts, "_drafter", BranchingDrafter(by_name(expected), 1))
    assert generated(drafting, kinds_of_requests(drafting, np.random.default_rng(0))) == expected
    assert moved
    for name, entries in expected_logs.items():
        assert len(logged[name]) == len(entries)
        for one, other in zip(logged[name], entries, strict=True):
            np.testing.assert_allclose(
                one.token_log_probabilities, other.token_log_probabilities, atol=2e-4
            )


@pytest.mark.parametrize(
    "values",
    [
        dict(enable_in_flight_batching=True, prefill_chunk_size=32),
        dict(kv_cache_page_size=16),
        dict(kv_cache_format="q8_0"),
    ],
    ids=["chunks", "preemption", "8 bits"],
)
def test_texts_in_other_configurations(plain, values, monkeypatch) -> None:
    moved, eight_bits = taken_branches(monkeypatch), "kv_cache_format" in values
    other = pipeline_of(0, **values) if eight_bits else plain
    expected = generated(other, requests(other, 7))
    pipeline = branching(pipeline_of(12, **values))
    pipeline.replicas[0].drafts._drafter = BranchingDrafter(by_name(expected), 5)
    few = "kv_cache_page_size" in values
    if few:
        for pool in pipeline.kv_managers[0].pages.pools:
            for _ in range(pool.num_pages - 12):
                pool._free.popitem()
            pool._users = [1 if page not in pool._free else 0 for page in range(pool.num_pages)]
    engine, contexts = Engine(pipeline, limits_of(pipeline)), requests(pipeline, 7)
    for one in contexts:
        engine.submit(one)
    while not engine.idle:
        engine.step()
    assert [one.generated_tokens.tolist() for one in contexts] == expected
    assert moved
    assert not few or engine.scheduler.preemptions > 0


def test_prefixes_that_trees_wrote_are_reused(plain, monkeypatch) -> None:
    """A second turn begins with the pages of the first answer, whose branches were moved."""
    moved = taken_branches(monkeypatch)
    values = dict(kv_cache_page_size=16, enable_prefix_caching=True)
    expected = generated(plain, requests(plain, 3))
    pipeline = branching(pipeline_of(12, **values))
    drafts = pipeline.replicas[0].drafts
    drafts._drafter = BranchingDrafter(by_name(expected), 5)
    first = requests(pipeline, 3)
    assert generated(pipeline, first) == expected and moved

    def second() -> list[TextContext]:
        texts = [np.append(one.all_tokens, [5, 6]) for one in first]
        params = SamplingParams(top_k=1)
        return [
            TextContext(
                request_id=RequestID(f"{number}"), tokens=text, max_length=len(text) + 8,
                sampling_params=params, ignore_eos=True,
            )
            for number, text in enumerate(texts)
        ]  # fmt: skip

    found, opening = [], pipeline.kv_manager.pages.opening
    drafts.enabled = False
    answers = generated(plain, second())
    again = second()
    engine = Engine(pipeline, limits_of(pipeline))
    for one in again:
        engine.submit(one)
    while not engine.idle:
        engine.step()
        found += [opening(one.request_id)[1] for one in again if not one.is_done]
    assert max(found) >= 32
    assert [one.generated_tokens.tolist() for one in again] == answers


def rows_of_cache(pipeline, one: TextContext) -> np.ndarray:
    """Keys and values of the processed tokens of a request, in all layers."""
    cache = pipeline.replicas[0].cache
    (table,) = cache.pages.tables(one.request_id)
    positions, size = np.arange(one.start_idx), cache.page_size
    return cache.blocks.to_numpy()[np.array(table)[positions // size], :, :, positions % size]


def test_the_cache_is_that_of_a_fresh_prompt(plain, drafting, monkeypatch) -> None:
    moved = taken_branches(monkeypatch)

    def request() -> TextContext:
        tokens = np.array(plain.tokenizer.encode_now("one two three four five six seven " * 4))
        return TextContext(
            request_id=RequestID("0"), tokens=tokens, max_length=len(tokens) + 60, ignore_eos=True,
            sampling_params=SamplingParams(top_k=1, ignore_eos=True),
        )  # fmt: skip

    expected, one = generated(plain, [request()]), request()
    drafter = BranchingDrafter(by_name(expected), 2)
    monkeypatch.setattr(drafting.replicas[0].drafts, "_drafter", drafter)
    engine = Engine(drafting, limits_of(drafting))
    engine.submit(one)
    while not one.is_done and (len(one.generated_tokens) < 40 or len(moved) < 3):
        engine.step()
    assert len(moved) >= 3 and not one.is_done
    got = rows_of_cache(drafting, one)
    fresh = context(one.all_tokens[: one.start_idx + 1])
    again = Engine(plain, limits_of(plain))
    again.submit(fresh)
    while not len(fresh.generated_tokens):
        again.step()
    np.testing.assert_allclose(got, rows_of_cache(plain, fresh)[: len(got)], atol=2e-5)
    for pipeline, own, each in ((drafting, engine, one), (plain, again, fresh)):
        own.cancel(each.request_id)
        while not own.idle:
            own.step()
        assert pipeline.kv_managers[0].used_pages == 0


@pytest.mark.parametrize(
    "values", [dict(), dict(temperature=0.7, top_k=4), dict(frequency_penalty=0.8)], ids=str
)
def test_sampled_trees_have_the_distribution_of_the_model(drafting, values) -> None:
    """Chi-square over pairs of tokens of a vocabulary of five, whichever of them the tree has."""
    draw, vocab, count = np.random.default_rng(8), 5, 4000
    # the logits after the text, and after each token
    first, second = (
        draw.normal(0, 1.1, size).astype(np.float32) for size in ((vocab,), (vocab, vocab))
    )
    tokens, parents = (1, 3, 2, 4, 0), (-1, 0, -1, 2, 2)
    contexts = []
    for _ in range(count):
        one = TextContext(
            tokens=np.array([1, 3]), max_length=9,
            sampling_params=SamplingParams(seed=int(draw.integers(2**62)), **values),
        )  # fmt: skip
        one.update(0)
        one.set_draft(tokens, parents)
        contexts.append(one)
    logits = np.stack([first, second[1], second[3], second[2], second[4], second[0]])
    rows = DraftedRows(contexts, None)
    outputs = ModelOutputs(
        Tensor.from_numpy(np.tile(logits, (count, 1))),
        logit_offsets=Tensor.from_numpy((6 * np.arange(count + 1)).astype(np.uint32)),
    )
    rows.choose(outputs, drafting.replicas[0]._sampler, CPU())
    seen, lengths = np.zeros((vocab, vocab)), []
    for row in range(count):
        right = rows.accept(row)
        own = rows.tokens(row)
        lengths.append(len(own))
        assert len(own) == len(right) + 1
        # only children of the root have a token after them here
        if len(own) > 1:
            seen[own[0], own[1]] += 1
        else:
            seen[own[0], :] += 1 / vocab
    params = SamplingParams(seed=0, **values)
    shares = distribution(first, [0], params)
    expected = np.stack(
        [
            count
            * shares[t]
            * (
                distribution(second[t], [0, t], params)
                if t in (1, 2)
                else np.full(vocab, 1 / vocab)
            )
            for t in range(vocab)
        ]
    )
    assert {1, 2, 3} == {*lengths}
    likely = expected > 5
    statistic = ((seen - expected)[likely] ** 2 / expected[likely]).sum()
    freedom = likely.sum() - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def measured(row_cost: float = 0.0) -> tuple[DraftLengths, RequestID]:
    """Lengths that know the times of steps of one request, a number of milliseconds more for each drafted token."""
    lengths, key = DraftLengths(8), RequestID()
    for drafted in (0, 0, 0, *range(1, 9)):
        for _ in range(4):
            lengths.step([key], drafted, drafted, 0.01 * (1 + row_cost * drafted))
    lengths.may_draft(1)
    lengths._credit, lengths._run, lengths._after = 1.0, 0, None
    return lengths, key


def test_a_tree_is_as_wide_as_its_chances() -> None:
    """A branch of seven tokens and one of six: both begin where the first one is mostly wrong."""
    parents = [-1, 0, 1, 2, 3, 4, 5, -1, 7, 8, 9, 10, 11]
    for right, wide in ((7, False), (0, True)):
        lengths, key = measured(row_cost=0.05)
        for _ in range(40):
            path = list(range(right)) if right else [7]
            lengths.record_tree(key, parents[:8], path)
        kept = lengths.kept_of_tree(key, 1, 0, 8, parents)
        assert len(kept) <= 8 and (7 in kept) is wide and kept == sorted(kept)
        assert all(parents[index] in (-1, *kept) for index in kept)
    lengths, key = measured(row_cost=0.9)
    assert lengths.kept_of_tree(key, 1, 0, 8, parents) == [], "a token costs as much as a step"
    lengths, key = measured()
    assert lengths.kept_of_tree(key, 1, 0, 0, parents) == [], "there is no room"
    lengths._credit = 0.0
    assert lengths.kept_of_tree(key, 1, 0, 8, parents) == [], "drafts have lost what they may"


def test_other_continuations_of_a_look_up() -> None:
    drafter = LookupDrafter()
    tokens = [1, 2, 5, 6, 9, 1, 2, 7, 8, 9, 3, 2, 4, 4, 9, 1, 2, 5, 6, 0, 1, 2]
    one = context(tokens)
    first = list(drafter.propose(one, 2))
    others = [list(other) for other in drafter.alternatives(one, 2)]
    assert first == [5, 6] and [7, 8] in others and [4, 4] in others
    assert others.index([7, 8]) < others.index([4, 4]), "after two equal tokens before after one"
    assert len({map(tuple, others)}) <= 3 and len({*map(tuple, others)}) == len(others)
    drafter.forget(one.request_id)
    assert drafter.alternatives(one, 2) == [] and not drafter._others


def test_other_continuations_in_recent_answers() -> None:
    drafter = RecentAnswersDrafter()
    for end in ([11, 12], [13, 14], [15, 16]):
        before = context([50])
        for token in (1, 2, 3, 4, *end):
            before.update(token)
        drafter.learn(before)
    one = context([7, 1, 2, 3, 4])
    assert list(drafter.propose(one, 4)) == [15, 16]
    assert [list(other) for other in drafter.alternatives(one, 4)] == [[13, 14], [11, 12]]
    drafter.forget(one.request_id)
    assert drafter.alternatives(one, 4) == []


def test_ranks_of_siblings() -> None:
    assert sibling_ranks([-1, 0, -1, -1, 0, 1]) == [0, 0, 1, 2, 1, 0]


@pytest.mark.parametrize(
    ("changes", "follows"),
    [
        (dict(), True),
        (dict(window=64), False),
        (dict(window=64, chunked=True), False),
        (dict(alibi_slopes=(0.5, 0.25)), False),
        (dict(query_growth=QueryGrowth(0.1, 4)), False),
        (dict(shared_with=0), False),
    ],
    ids=str,
)
def test_the_rule_for_models(changes: dict[str, Any], follows: bool) -> None:
    """Trees are for layers whose positions only the kernels count, and whose keys are all in reach."""
    form = replace(AttentionForm(2, 1, 16, RopeConfig()), **changes)
    config = DecoderConfig(
        hidden_size=32, vocab_size=9, norm_eps=1e-5, max_position_embeddings=128, max_seq_len=128,
        blocks=(Block(AttentionForm(2, 1, 16, RopeConfig()), None), Block(form, None)),
    )  # fmt: skip
    assert form.follows_trees is config.follows_trees is follows
    if follows:
        assert not replace(config, learned_positions=128).follows_trees
        assert not replace(config, stored_states=(1,)).follows_trees
        blocks = (*config.blocks, Block(Mixer(), None))
        assert not replace(config, blocks=blocks).follows_trees
