"""The order of rows by expert, for grouped products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.kernel_call import KernelCall, Operand, view


@k.kernel
def expert_order(
    order: k.Output,
    starts: k.Output,
    restore_order: k.Output,
    experts: k.Output,
    stats: k.Output,
    ids: k.Input,
    ctx: k.Context,
    *,
    count: int,
) -> None:
    """Sorts rows by the expert in `ids` `[n]`; rows of one expert keep their order.

    Row `order[p]` is at position `p` of the sorted rows; row `i` is at position `restored[i]`. Group `g` contains the
    rows of expert `experts[g]`, from position `starts[g]` on; only experts with rows form groups. The remaining
    elements of `experts` `[count]` are -1, those of `starts` `[count + 1]` are n. `stats` `[2]` is the maximum number
    of rows of a group, and the number of groups.
    """
    places = ctx.scratch(k.i64, (count,))
    rows = ids.size
    check_size("the order of tokens", order.size, rows)
    check_size("the places of tokens", restore_order.size, rows)
    check_size("expert_start_indices", starts.size, count + 1)
    check_size("expert_usage_stats", stats.size, 2)
    for e in range(count):
        places[e] = 0
        experts[e] = -1
    for i in range(rows):
        expert = k.i64(ids[i])
        if expert < 0 or expert >= count:
            raise IndexError("topk_ids[{}] is {}; there are {} experts", i, ids[i], count)
        places[expert] += 1  # rows of each expert
    groups, first, most = k.i64(0), k.i64(0), k.i64(0)
    for e in range(count):
        size = places[e]
        if size > 0:
            experts[groups] = e
            starts[groups] = first
            # from here on the next position of this expert's rows
            places[e] = first
            first += size
            groups += 1
            most = k.max(most, size)
    for g in range(groups, count + 1):
        starts[g] = rows
    stats[0] = most
    stats[1] = groups
    # in the order of rows: the sort is stable
    for i in range(rows):
        expert = k.i64(ids[i])
        order[places[expert]] = i
        restore_order[i] = places[expert]
        places[expert] += 1


def _lower_order(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    (ids,) = operands
    (count,) = results[3].shape
    args = (
        *(view("result", i, result, static=False) for i, result in enumerate(results)),
        view("operand", 0, ids, static=False),
    )
    return KernelCall(expert_order, args, {"count": count}, serial=True)


LOWERINGS = {"mo.moe.indices": _lower_order}
