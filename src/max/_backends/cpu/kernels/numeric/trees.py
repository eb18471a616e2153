"""Ensembles of decision trees: workers share the rows.

A task is `VECTORS` vectors of rows. Masks: the rows' features lie transposed in scratch memory, a vector of rows for
each; each tree goes over all of its nodes without a branch::

    tree → node → vector of rows:    bits = x[feature] <= limit ? bits : bits & mask

A node costs a load, a comparison and an AND for a vector, whatever leaf the rows reach. Of up to `SINGLE_ROWS` rows
each is taken by itself, with a vector of nodes: one gather of its features, or where two vectors hold the row one
permutation of them, which without NaN needs neither flags nor a check of each node. Walks: each lane goes down the tree
of its own, a gather for each table and level; for trees with more leaves than bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.kernel_call import KernelCall, Operand, view

VECTORS = 4
"""Vectors of rows that share the loads of a node."""
SINGLE_ROWS = 4
"""The most rows of a task that are taken one by one: a row takes about a tenth of the time of a vector of rows."""
MOST_FEATURES = 2048
"""Features of a row whose transposed copies fit the L2 cache."""


class Masks(NamedTuple):
    """The tables of `mo.trees.masks`."""

    features: k.Input
    limits: k.Input
    missing: k.Input
    masks: k.Input
    counts: k.Input
    weights: k.Input
    targets: k.Input


class Walks(NamedTuple):
    """The tables of `mo.trees.walk`."""

    features: k.Input
    limits: k.Input
    missing: k.Input
    yes: k.Input
    no: k.Input
    leaves: k.Input
    roots: k.Input
    depths: k.Input
    weights: k.Input
    targets: k.Input


@k.inline
def check_indices(name: str, indices: k.Value, end: k.Value) -> None:
    """Raises where a lane is outside of `[0, end)`."""
    if k.any((indices < 0) | (indices >= end)):
        low, high = k.reduce_min(indices), k.reduce_max(indices)
        raise IndexError("trees: {} {} to {}, of {}", name, low, high, end)


@k.inline
def add_leaves(
    sums: k.View, leaves: k.View, places: k.Value, first: k.Value, vector: k.Value, width: int
) -> None:
    """Adds the weights `leaves[places]`, `[leaves, values]`, to the sums of a vector of rows."""
    values = leaves.shape[1]
    flat = leaves.reshape(leaves.shape[0] * values)
    for j in range(values):
        more = flat.gather(places * values + j)
        at = vector * width
        sums.store(first + j, at, value=sums.load(first + j, at, width=width) + more)


@k.inline
def mask_rows(sums: k.View, columns: k.View, tables: Masks, vectors: int, width: int) -> None:
    """Adds the leaves of all trees to the sums `[outputs, rows]`; `columns` is `[features, rows]`."""
    features, limits, missing, masks, counts, weights, targets = tables
    dtype = masks.dtype
    for tree in range(masks.shape[0]):
        bits = k.tile(dtype, (vectors,), width=width)
        for v in k.static_range(vectors):
            # at first each leaf may be the one
            bits[v] = k.splat(~k.cast(0, dtype), width)
        count = k.i64(counts[tree])
        if count < 0 or count > masks.shape[1]:
            raise IndexError("trees: {} nodes, of {}", count, masks.shape[1])
        for node in range(count):
            feature = k.i64(features[tree, node])
            if feature < 0 or feature >= columns.shape[0]:
                raise IndexError("trees: feature {}, of {}", feature, columns.shape[0])
            limit = k.splat(limits[tree, node], width)
            mask = k.splat(masks[tree, node], width)
            if missing[tree, node] != 0:
                for u in k.static_range(vectors):
                    some = columns.load(feature, u * width, width=width)
                    # NaN is not greater
                    bits[u] = k.select(some > limit, bits[u] & mask, bits[u])
            else:
                for w in k.static_range(vectors):
                    value = columns.load(feature, w * width, width=width)
                    bits[w] = k.select(value <= limit, bits[w], bits[w] & mask)
        first = k.i64(targets[tree])
        leaves = weights[tree]
        for z in k.static_range(vectors):
            # the first leaf that no node has excluded
            places = k.cast(k.count_trailing_zeros(bits[z]), k.i32)
            check_indices("leaves", places, k.i32(weights.shape[1]))
            add_leaves(sums, leaves, places, first, z, width)


class Row(NamedTuple):
    """A row of features.

    Args:
        x: Its features.
        low: The first vector of them, where two vectors hold all; else None.
        high: The second one.
    """

    x: Any
    low: Any
    high: Any


@k.inline
def features_of(x: k.View, features: int, width: int) -> Any:
    """A row, in vectors if two hold it and the target permutes them by one instruction."""
    if features > 2 * width or x.dtype is not k.f32 or not k.target().permutes(width):
        return Row(x, None, None)
    lanes = k.iota(k.i64, width)
    low = x.load(0, width=width, mask=lanes < features)
    high = k.splat(k.f32(0), width)
    if features > width:
        high = x.load(width, width=width, mask=lanes + width < features)
    return Row(x, low, high)


@k.inline
def and_lanes(v: Any) -> Any:
    """The AND of all lanes."""
    for half in k.unroll((32, 16, 8, 4, 2, 1)):
        if v.width > half:
            low = k.shuffle(v, None, tuple(range(half)))
            v = low & k.shuffle(v, None, tuple(range(half, 2 * half)))
    return v[0]


@k.inline
def nodes_that_fail(
    bits: k.Integer,
    row: Row,
    tables: Masks,
    tree: k.Integer,
    node: k.Integer,
    mask: k.Mask | None,
    width: int,
) -> Any:
    """`bits` and the masks of a vector of nodes whose condition does not hold for a row.

    Args:
        bits: The bits of the leaves so far, a lane for each node.
        row: The row.
        tables: The tables.
        tree: The tree.
        node: The first node.
        mask: The nodes that exist; None: all.
        width: The nodes.
    """
    feature = tables.features.load(tree, node, width=width, mask=mask)
    x = row.x
    if k.any((feature < 0) | (feature >= k.i32(x.shape[0]))):
        low, high = k.reduce_min(feature), k.reduce_max(feature)
        raise IndexError("trees: features {} to {}, of {}", low, high, x.shape[0])
    if row.low is None:
        value = x.gather(feature)
    else:
        value = k.permute(row.low, row.high, feature)
    limit = tables.limits.load(tree, node, width=width, mask=mask)
    missing = tables.missing.load(tree, node, width=width, mask=mask) != 0
    some = tables.masks.load(tree, node, width=width, mask=mask)
    # NaN passes a node with `missing` and fails any other, as in `mask_rows`
    fails = k.select(missing, value > limit, ~(value <= limit))
    return k.select(fails if mask is None else fails & mask, bits & some, bits)


@k.inline
def mask_row(sums: k.View, row: Row, lane: k.Integer, tables: Masks, width: int) -> None:
    """Adds the leaves of all trees of one row to the sums `[outputs, rows]`.

    Args:
        sums: The sums.
        row: The row.
        lane: Its place in the sums.
        tables: The tables.
        width: The nodes of a vector.
    """
    masks, counts, weights, targets = tables[3:]
    dtype = masks.dtype
    # one sum stays in a register: each would wait for the store of the one before
    is_single = sums.shape[0] == 1 and weights.shape[2] == 1
    total = sums[0, lane]
    for tree in range(masks.shape[0]):
        count = k.i64(counts[tree])
        if count < 0 or count > masks.shape[1]:
            raise IndexError("trees: {} nodes, of {}", count, masks.shape[1])
        bits = k.splat(~k.cast(0, dtype), width)
        for node, mask in k.vectors(count, width):
            bits = nodes_that_fail(bits, row, tables, tree, node, mask, width)
        leaf = k.i64(k.count_trailing_zeros(and_lanes(bits)))
        if leaf >= weights.shape[1]:
            raise IndexError("trees: leaf {}, of {}", leaf, weights.shape[1])
        if is_single:
            total = total + weights[tree, leaf, 0]
        else:
            first = k.i64(targets[tree])
            for j in range(weights.shape[2]):
                sums[first + j, lane] = sums[first + j, lane] + weights[tree, leaf, j]
    if is_single:
        sums[0, lane] = total


@k.inline
def clear_leaves(
    bits: k.Integer,
    row: Row,
    tables: Masks,
    tree: k.Integer,
    node: k.Integer,
    mask: Any,
    width: int,
) -> Any:
    """`nodes_that_fail` for a row without NaN in two vectors, and the features, which are not checked."""
    feature = tables.features.load(tree, node, width=width, mask=mask)
    limit = tables.limits.load(tree, node, width=width, mask=mask)
    some = tables.masks.load(tree, node, width=width, mask=mask)
    fails = k.permute(row.low, row.high, feature) > limit
    bits = k.select(fails if mask is None else fails & mask, bits & some, bits)
    # unsigned: a negative feature is a large one
    return bits, k.bitcast(feature, k.u32)


@k.inline
def mask_plain_row(sums: k.View, row: Row, lane: k.Integer, tables: Masks, width: int) -> Any:
    """`mask_row` for one output and a row without NaN in two vectors, whose features no address has.

    Returns:
        Whether all features exist. Otherwise the sum stays as it was, and `mask_row` raises.
    """
    masks, counts, weights = tables.masks, tables.counts, tables.weights
    most = k.splat(k.u32(0), width)
    total = sums[0, lane]
    for tree in range(masks.shape[0]):
        # errors are branches: with a select each tree would wait for its tables
        count = k.i64(counts[tree])
        if count < 0 or count > masks.shape[1]:
            raise IndexError("trees: {} nodes, of {}", count, masks.shape[1])
        bits = k.splat(~k.cast(0, masks.dtype), width)
        if count >= width:
            for node in range(0, count - width, width):
                bits, feature = clear_leaves(bits, row, tables, tree, node, None, width)
                most = k.max(most, feature)
            # the last vector takes some nodes again, which changes nothing
            bits, feature = clear_leaves(bits, row, tables, tree, count - width, None, width)
            most = k.max(most, feature)
        else:
            for node, mask in k.vectors(count, width):
                bits, feature = clear_leaves(bits, row, tables, tree, node, mask, width)
                most = k.max(most, feature)
        leaf = k.i64(k.count_trailing_zeros(and_lanes(bits)))
        if leaf >= weights.shape[1]:
            raise IndexError("trees: leaf {}, of {}", leaf, weights.shape[1])
        total = total + weights[tree, leaf, 0]
    # checked once for all trees: a permutation reads no memory by a feature
    exist = ~k.any(most >= k.u32(row.x.shape[0]))
    if exist:
        sums[0, lane] = total
    return exist


@k.inline
def add_row(
    sums: k.View, x: k.View, features: int, lane: k.Integer, tables: Masks, width: int
) -> None:
    """Adds the leaves of all trees of the row `x` to the sums `[outputs, rows]`."""
    row = features_of(x, features, width)
    done = k.i64(0)
    if row.low is not None and sums.shape[0] == 1 and tables.weights.shape[2] == 1:
        if not k.any(k.isnan(row.low) | k.isnan(row.high)):
            if mask_plain_row(sums, row, lane, tables, width):
                done = k.i64(1)
    if done == 0:
        mask_row(sums, row, lane, tables, width)


@k.inline
def check_targets(targets: k.View, values: k.Value, outputs: k.Value) -> None:
    """Raises where a tree adds to an output that is none."""
    for tree in range(targets.shape[0]):
        if targets[tree] < 0 or k.i64(targets[tree]) + values > outputs:
            raise IndexError("trees: target {}, of {} outputs", targets[tree], outputs)


@k.inline
def store_columns(out: k.View, sums: k.View, start: k.Value, count: k.Integer) -> None:
    """Writes the sums `[outputs, rows]` of `count` rows from `start` on."""
    for i in range(count):
        for j in range(out.shape[1]):
            out[start + i, j] = sums[j, i]


@k.inline
def clear_sums(sums: k.View, width: int) -> None:
    """Sets the sums to 0."""
    zero = k.splat(k.cast(0, sums.dtype), width)
    for output in range(sums.shape[0]):
        for i in range(0, sums.shape[1], width):
            sums.store(output, i, value=zero)


@k.kernel
def tree_masks(
    out: k.Output, x: k.Input, tables: Masks, ctx: k.Context, *, features: int, outputs: int
) -> None:
    """`out[row] = the sum over the trees of the weights of the row's leaf`; see `mo.trees.masks`."""
    width = ctx.target.width(k.f32)
    block = VECTORS * width
    rows = x.shape[0]
    check_size("the result", out.shape[0], rows)
    check_targets(tables.targets, tables.weights.shape[2], outputs)
    for part in ctx.parallel((rows + block - 1) // block):
        columns = ctx.scratch(x.dtype, (features, block))
        sums = ctx.scratch(x.dtype, (outputs, block))
        start = part * block
        count = k.min(rows - start, block)
        clear_sums(sums, width)
        if count <= SINGLE_ROWS:
            for lane in range(count):
                add_row(sums, x[start + lane], features, lane, tables, width)
        else:
            used = k.select(count > width, k.i64(block), k.i64(width))
            for i in range(used):
                # rows behind the last one repeat it
                row = start + k.min(i, count - 1)
                for feature in range(features):
                    columns[feature, i] = x[row, feature]
            if count > width:
                mask_rows(sums, columns, tables, VECTORS, width)
            else:
                mask_rows(sums, columns, tables, 1, width)
        store_columns(out, sums, start, count)


@k.inline
def walk_rows(sums: k.View, x: k.View, rows: Any, tables: Walks, vectors: int, width: int) -> None:
    """Adds the leaves of all trees to the sums; `rows` are the first elements of the lanes' rows in `x`."""
    features, limits, missing, yes, no, leaves, roots, depths, weights, targets = tables
    nodes, flat = k.i32(features.shape[0]), x.reshape(x.shape[0] * x.shape[1])
    for tree in range(roots.shape[0]):
        at = k.tile(k.i32, (vectors,), width=width)
        for v in k.static_range(vectors):
            at[v] = k.splat(roots[tree], width)
            check_indices("nodes", at[v], nodes)
        # a leaf is its own successor: lanes that arrive early stay
        for _ in range(k.i64(depths[tree])):
            for u in k.static_range(vectors):
                here = at[u]
                feature = features.gather(here)
                check_indices("features", feature, k.i32(x.shape[1]))
                value = flat.gather(rows[u] + k.cast(feature, k.i64))
                limit = limits.gather(here)
                absent = k.isnan(value) & (missing.gather(here) != 0)
                holds = (value <= limit) | absent
                following = k.select(holds, yes.gather(here), no.gather(here))
                check_indices("nodes", following, nodes)
                at[u] = following
        first = k.i64(targets[tree])
        for z in k.static_range(vectors):
            places = leaves.gather(at[z])
            check_indices("leaves", places, k.i32(weights.shape[0]))
            add_leaves(sums, weights, places, first, z, width)


@k.kernel
def tree_walk(out: k.Output, x: k.Input, tables: Walks, ctx: k.Context, *, outputs: int) -> None:
    """`out[row] = the sum over the trees of the weights of the row's leaf`; see `mo.trees.walk`."""
    width = ctx.target.width(k.f32)
    block = VECTORS * width
    rows = x.shape[0]
    check_size("the result", out.shape[0], rows)
    check_targets(tables.targets, tables.weights.shape[1], outputs)
    for part in ctx.parallel((rows + block - 1) // block):
        sums = ctx.scratch(x.dtype, (outputs, block))
        start = part * block
        count = k.min(rows - start, block)
        clear_sums(sums, width)
        first = k.tile(k.i64, (VECTORS,), width=width)
        for v in k.static_range(VECTORS):
            lanes = k.splat(start + v * width, width) + k.iota(k.i64, width)
            # lanes past the last row repeat it
            first[v] = k.min(lanes, k.splat(rows - 1, width)) * x.shape[1]
        if count > width:
            walk_rows(sums, x, first, tables, VECTORS, width)
        else:
            walk_rows(sums, x, first, tables, 1, width)
        store_columns(out, sums, start, count)


def _lower_masks(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.trees.masks`."""
    features = operands[0].shape[1]
    if not isinstance(features, int) or features > MOST_FEATURES:
        raise NotImplementedError(
            f"trees.masks of {features} features; up to {MOST_FEATURES} would fit"
        )
    params = {"features": features, "outputs": _outputs(attributes)}
    return KernelCall(tree_masks, _views(operands, results), params)


def _outputs(attributes: Mapping[str, Any]) -> int:
    outputs = attributes["outputs"]
    if outputs > MOST_FEATURES:
        raise NotImplementedError(f"trees of {outputs} outputs; up to {MOST_FEATURES} would fit")
    return outputs


def _views(operands: Sequence[Operand], results: Sequence[Operand]) -> tuple[Any, ...]:
    return (
        view("result", 0, results[0], static=(False, True)),
        view("operand", 0, operands[0], static=(False, True)),
        # the number of values of a leaf is known at compile time
        *(
            view("operand", i, one, static=(*(False for _ in one.shape[1:]), one.dtype.is_float()))
            for i, one in enumerate(operands[1:], 1)
        ),
    )


def _lower_walk(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.trees.walk`."""
    if any(isinstance(one.shape[0], int) and one.shape[0] >= 2**31 for one in operands[1:]):
        raise NotImplementedError("trees.walk of 2^31 nodes; fewer would fit")
    return KernelCall(tree_walk, _views(operands, results), {"outputs": _outputs(attributes)})


LOWERINGS = {"mo.trees.masks": _lower_masks, "mo.trees.walk": _lower_walk}
