"""Cases of ops of shapes, positions and reductions."""

from __future__ import annotations

import torch

from tests.importers.torch_cases.case import Case, Draw, case


@case("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
def view(draw, name):
    x = draw.any(*draw.choice([(2, 3, 5), (6, 5), (30,)]))
    return Case([x, draw.choice([[5, 6], [-1], [3, -1, 2], [1, 30, 1]])])


@case("aten.view.dtype")
def view_dtype(draw):
    return Case([draw.floats(*draw.shape()), torch.float32])


@case("aten.permute.default")
def permute(draw):
    shape = draw.shape()
    return Case([draw.any(*shape), [int(a) for a in draw.rng.permutation(len(shape))]])


@case("aten.transpose.int")
def transpose(draw):
    shape = draw.shape(1)
    return Case([draw.any(*shape), draw.axis(len(shape)), draw.axis(len(shape))])


@case("aten.t.default")
def t(draw):
    return Case([draw.any(*draw.shape(0, 2))])


@case("aten.unsqueeze.default")
def unsqueeze(draw):
    shape = draw.shape()
    return Case([draw.any(*shape), draw.axis(len(shape) + 1)])


@case("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default")
def squeeze(draw, name):
    x = draw.any(*draw.choice([(1, 3, 1), (1, 1), (2, 1)]))
    if name.endswith("default"):
        return Case([x])
    return Case([x, draw.axes(x.ndim) if name.endswith("dims") else draw.axis(x.ndim)])


@case("aten.expand.default")
def expand(draw):
    shape = draw.shape()
    own = draw.broadcast(shape)
    lead = len(shape) - len(own)
    sizes = [
        -1 if i >= lead and own[i - lead] == s and draw.bool() else s for i, s in enumerate(shape)
    ]
    return Case([draw.any(*own), sizes])


@case("aten.repeat.default")
def repeat(draw):
    shape = draw.shape(0, 3)
    return Case([draw.any(*shape), [draw.int(1, 3) for _ in range(len(shape) + draw.int(0, 1))]])


def several(draw: Draw, rank: int, axis: int, same: bool) -> list[torch.Tensor]:
    shape = [draw.choice([1, 2, 3]) for _ in range(rank)]
    parts = []
    for _ in range(draw.int(1, 4)):
        if not same:
            shape[axis] = draw.int(0, 4)
        parts.append(draw.floats(*shape) if draw.bool() else draw.ints(*shape))
    return parts


@case("aten.cat.default")
def cat(draw):
    rank = draw.int(1, 4)
    axis = draw.axis(rank)
    tensors = several(draw, rank, axis, False)
    return Case([[*tensors, draw.floats(0)] if draw.bool() else tensors, axis])


@case("aten.stack.default")
def stack(draw):
    rank = draw.int(0, 3)
    return Case([several(draw, rank, 0, True), draw.axis(rank + 1)])


@case("aten.split_with_sizes.default", "aten.split_with_sizes_copy.default")
def split_with_sizes(draw, name):
    return Case([draw.any(2, 6, 3), draw.choice([[1, 2, 3], [6], [0, 6], [4, 2]]), 1])


@case("aten.split.Tensor")
def split(draw):
    return Case([draw.any(2, 7, 3), draw.int(1, 8), draw.axis(3)])


@case("aten.unbind.int")
def unbind(draw):
    return Case([draw.any(2, 5, 3), draw.axis(3)])


@case("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_(draw, name):
    shape = draw.shape(1)
    start = draw.choice([None, 0, 1, 3, -2, -9])
    end = draw.choice([None, 2, 5, -1, 100, (1 << 63) - 1])
    return Case([draw.any(*shape), draw.axis(len(shape)), start, end, draw.choice([1, 1, 2, 3])])


@case("aten.select.int", "aten.select_copy.int")
def select(draw, name):
    x = draw.any(3, 5, 4)
    return Case([x, draw.axis(3), draw.int(-3, 2)])


@case("aten.flip.default")
def flip(draw):
    x = draw.any(2, 5, 3)
    return Case([x, draw.choice([[], [0], [-1, 1], [0, 1, 2]])])


@case("aten.roll.default")
def roll(draw):
    x = draw.any(2, 5, 3)
    return Case([x, *draw.choice([([4],), ([-7],), ([1, 2], [0, 1]), ([-3], [-1])])])


@case("aten.constant_pad_nd.default")
def constant_pad(draw):
    pad = draw.choice([[1, 2], [0, 1, 2, 0], [-1, 2], [0, 0], [1, 1, 1, 1, 0, 2]])
    return Case([draw.any(3, 5, 4), pad, draw.choice([0, 1])])


@case(
    *(f"aten.{kind}_pad{n}d.default" for kind in ("reflection", "replication") for n in (1, 2, 3))
)
def pad(draw, name):
    n = int(name.split("_pad")[1][0])
    x = draw.floats(*(2, 3, 5, 4, 6)[: n + draw.int(1, 2)])
    return Case([x, [draw.int(0, 1) for _ in range(2 * n)]])


@case("aten.pixel_shuffle.default")
def pixel_shuffle(draw):
    return Case([draw.floats(*draw.choice([(2, 8, 3, 5), (4, 3, 2), (2, 1, 12, 2, 2)])), 2])


@case("aten.tril.default", "aten.triu.default")
def triangle(draw, name):
    return Case([draw.any(*draw.choice([(3, 5), (2, 4, 4), (5, 2)])), draw.int(-4, 4)])


@case("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(draw, name):
    axes = draw.choice([(0, 1), (1, 2), (-1, 0), (2, -2)])
    return Case([draw.any(4, 3, 5), draw.int(-2, 2), *axes])


@case("aten.unfold.default")
def unfold(draw):
    return Case([draw.any(2, 7, 5), draw.axis(3) % 2 - 2, draw.int(1, 3), draw.int(1, 3)])


# positions -----------------------------------------------------------------------------------------


@case("aten.embedding.default")
def embedding(draw):
    return Case([draw.floats(9, 5), draw.ints(*draw.shape(), low=0, high=8)])


@case("aten.index_select.default")
def index_select(draw):
    axis = draw.axis(3)
    return Case([draw.any(4, 5, 4), axis, draw.ints(draw.int(0, 6), low=0, high=3)])


@case("aten.gather.default")
def gather(draw):
    return Case([draw.any(4, 5, 4), draw.axis(3), draw.ints(3, 2, 4, low=0, high=3)])


@case("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(draw, name):
    def at(*shape: int) -> torch.Tensor:
        return draw.ints(*shape, low=-4, high=3)

    indices = draw.choice([
        [at(3)], [None, at(2, 3)], [at(3), at(3)], [at(3, 1), None, at(2)], [None, at(5), at(1)],
        [at(), at(2), at(3, 1)], [None, None, at(2, 2)],
    ])  # fmt: skip
    if name == "aten.index.Tensor" and draw.int(0, 3) == 0:
        indices = draw.choice([[draw.bools(4)], [draw.bools(4, 5)], [None, draw.bools(5), None]])
    return Case([draw.any(4, 5, 4), indices])


@case("aten.nonzero.default")
def nonzero(draw):
    return Case([draw.any(*draw.shape(1, 3))])


def scattered(draw: Draw) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]:
    """Positions that differ along the axis, so that the order of writes does not matter."""
    x = draw.floats(4, 5, 6)
    axis = draw.axis(3)
    index = torch.argsort(draw.floats(4, 5, 6), axis)[:3, :4, :2]
    return x, axis, index, draw.floats(4, 5, 6)


@case("aten.scatter.src", "aten.scatter_add.default")
def scatter(draw, name):
    return Case(list(scattered(draw)))


@case("aten.scatter.value")
def scatter_value(draw):
    return Case([*scattered(draw)[:3], 2.5])


@case("aten.scatter_reduce.two", "aten.scatter.reduce")
def scatter_reduce(draw, name):
    names = ["add", "multiply"] if name.endswith("reduce") else ["sum", "prod", "amax", "amin"]
    return (
        Case([*scattered(draw)], {"reduce": draw.choice(names)})
        if name.endswith("reduce")
        else Case([*scattered(draw), draw.choice(names)])
    )


@case("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(draw, name):
    x = draw.floats(4, 5, 6)
    line = torch.from_numpy(draw.rng.permutation(4)[:3])
    indices, shape = draw.choice([
        ([line], (3, 5, 6)), ([None, line], (4, 3, 6)), ([line, None, line], (3, 5)),
        ([line[:, None], line], (3, 3, 6)), ([None, line, line], (4, 3)),
    ])  # fmt: skip
    if draw.int(0, 3) == 0 and name == "aten.index_put.default":
        return Case([x, [draw.bools(4, 5)], torch.tensor(2.5)])
    return Case([x, indices, draw.floats(*draw.broadcast(shape)), draw.bool()])


@case("aten.index_add.default")
def index_add(draw):
    index = draw.ints(3, low=0, high=3)
    return Case(
        [draw.floats(2, 4, 3), 1, index, draw.floats(2, 3, 3)], {"alpha": draw.choice([1, 2])}
    )


@case("aten.slice_scatter.default")
def slice_scatter(draw):
    x = draw.floats(3, 7, 4)
    start, end, step = draw.choice([(0, 7, 1), (1, 4, 1), (-3, None, 1), (0, 7, 2), (1, 6, 3)])
    return Case([x, torch.zeros_like(x[:, start:end:step]) + 9, 1, start, end, step])


@case("aten.select_scatter.default")
def select_scatter(draw):
    return Case([draw.floats(3, 5, 4), draw.floats(3, 4), 1, draw.int(-5, 4)])


@case("aten.masked_scatter.default")
def masked_scatter(draw):
    return Case([draw.floats(3, 5), draw.bools(3, 5), draw.floats(15)])


# reductions ----------------------------------------------------------------------------------------


@case(*(f"aten.{name}" for name in ("sum.dim_IntList", "mean.dim", "amax.default", "amin.default")))
def reduced(draw, name):
    shape = draw.shape(1, empty=False)
    x = draw.floats(*shape)
    if not name.startswith("aten.mean") and draw.bool():
        x = draw.any(*shape)
    return Case([x, draw.axes(len(shape)), draw.bool()])


@case(*(f"aten.{name}.default" for name in ("sum", "max", "min", "any", "all", "prod")))
def reduced_whole(draw, name):
    return Case([draw.any(*draw.shape(empty=False))], rtol=1e-3)


@case("aten.mean.default")
def mean(draw):
    return Case([draw.floats(*draw.shape(empty=False))])


@case("aten.prod.dim_int")
def prod(draw):
    shape = draw.shape(1)
    return Case([draw.floats(*shape), draw.axis(len(shape)), draw.bool()])


@case("aten.any.dim", "aten.all.dim", "aten.any.dims", "aten.all.dims")
def logical(draw, name):
    shape = draw.shape(1)
    axes = draw.axes(len(shape)) if name.endswith("dims") else draw.axis(len(shape))
    return Case([draw.any(*shape), axes, draw.bool()])


@case("aten.max.dim", "aten.min.dim")
def with_index(draw, name):
    shape = draw.shape(1, empty=False)
    return Case([draw.floats(*shape), draw.axis(len(shape)), draw.bool()])


@case("aten.argmax.default", "aten.argmin.default")
def arg(draw, name):
    shape = draw.shape(1, empty=False)
    return Case([draw.floats(*shape), draw.choice([None, draw.axis(len(shape))]), draw.bool()])


@case("aten.var.correction", "aten.std.correction", "aten.var_mean.correction")
def variance(draw, name):
    shape = (3, *draw.shape(1, 3, empty=False))
    kwargs = {"correction": draw.choice([0, 1, None]), "keepdim": draw.bool()}
    return Case([draw.floats(*shape), draw.choice([[0], None, [0, -1]])], kwargs)


@case("aten.logsumexp.default")
def logsumexp(draw):
    shape = draw.shape(1, empty=False)
    return Case([draw.floats(*shape, high=90), draw.axes(len(shape)), draw.bool()])


@case("aten.linalg_vector_norm.default")
def vector_norm(draw):
    order = draw.choice([2, 1, 0, 3, float("inf"), -float("inf"), 0.5])
    return Case([draw.floats(3, 5, 4), order, draw.choice([None, [1], [0, -1]]), draw.bool()])


@case("aten.cumsum.default", "aten.cumprod.default")
def scan(draw, name):
    shape = draw.shape(0)
    return Case([draw.any(*shape), draw.axis(len(shape))], rtol=1e-3)


@case("aten.topk.default")
def topk(draw):
    axis = draw.axis(3)
    return Case([draw.floats(4, 7, 5), draw.int(0, 4), axis, draw.bool()])


@case("aten.sort.default")
def sort(draw):
    return Case([draw.floats(4, 7, 5), draw.axis(3), draw.bool()])


@case("aten.sort.stable")
def sort_stable(draw):
    x = draw.ints(4, 9, low=0, high=3)
    return Case([x], {"stable": True, "dim": draw.axis(2), "descending": draw.bool()})


@case("aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default")
def softmax(draw, name):
    shape = draw.shape(0)
    args = [draw.floats(*shape), draw.axis(len(shape))]
    if "safe" in name:
        args[0] = torch.where(draw.bools(*shape), args[0], torch.full_like(args[0], -float("inf")))
        # a row with a NaN is not a masked one
        args[0] = torch.where(draw.floats(*shape) > 1, torch.nan, args[0])
        return Case(args)
    return Case([*args, False])


@case("aten.softmax.int", "aten.log_softmax.int")
def softmax_int(draw, name):
    shape = draw.shape(1)
    return Case([draw.floats(*shape), draw.axis(len(shape))])


@case("aten.item.default", "aten._local_scalar_dense.default")
def item(draw, name):
    return Case([draw.ints(1)], constant=True)


@case("aten.sym_size.int")
def sym_size(draw):
    return Case([draw.any(3, 5), draw.int(-2, 1)])


@case("aten.sym_numel.default")
def sym_numel(draw):
    return Case([draw.any(*draw.shape())])


@case("aten.as_strided.default")
def as_strided(draw):
    x = draw.floats(2, 3, 1, 1)
    return Case([x, [2, 3, 1, 1], [3, 1, 3, 3] if draw.bool() else [3, 1, 1, 1]])


@case("aten.histc.default")
def histc(draw):
    low = draw.int(-3, 1)
    return Case([draw.floats(*draw.shape()), draw.int(1, 7), low, low + draw.int(1, 4)])
