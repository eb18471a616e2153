"""Cases of the ops of layers: products, convolutions, pooling, normalizations."""

from __future__ import annotations

import torch

from tests.importers.torch_cases.case import Case, Draw, case


@case("aten.mm.default", "aten.bmm.default")
def mm(draw, name):
    n, m, k = (draw.int(1, 7) for _ in range(3))
    lead = [] if name.endswith("mm.default") and "bmm" not in name else [draw.int(1, 3)]
    return Case([draw.floats(*lead, n, k), draw.floats(*lead, k, m)])


@case("aten.matmul.default")
def matmul(draw):
    pairs = [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 1, 3, 4), (5, 4, 2))]
    x, y = draw.choice(pairs)
    return Case([draw.floats(*x), draw.floats(*y)])


@case("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default")
def addmm(draw, name):
    n, m, k = (draw.int(1, 7) for _ in range(3))
    factors = draw.choice([{}, {"beta": 0}, {"beta": 2, "alpha": 0.5}])
    if "addmv" in name:
        return Case([draw.floats(n), draw.floats(n, k), draw.floats(k)], factors)
    lead = [2] if "baddbmm" in name else []
    bias = draw.floats(*lead, n, m) if lead or draw.bool() else draw.floats(m)
    return Case([bias, draw.floats(*lead, n, k), draw.floats(*lead, k, m)], factors)


@case("aten.linear.default")
def linear(draw):
    lead, k, n = draw.shape(1, 3), draw.int(1, 7), draw.int(1, 7)
    bias = draw.floats(n) if draw.bool() else None
    return Case([draw.floats(*lead, k), draw.floats(n, k), bias])


@case("aten.mv.default", "aten.dot.default")
def vector(draw, name):
    k = draw.int(1, 7)
    lead = [draw.int(1, 5)] if "mv" in name else []
    return Case([draw.floats(*lead, k), draw.floats(k)])


@case("aten.convolution.default")
def convolution(draw: Draw) -> Case:
    n = draw.int(1, 3)
    groups = draw.choice([1, 1, 2])
    transposed = draw.int(0, 3) == 0
    sizes = [draw.int(5, 8) for _ in range(n)]
    taps = [draw.int(1, 3) for _ in range(n)]
    cin, cout = 2 * groups, 3 * groups
    weight = (cin, cout // groups) if transposed else (cout, cin // groups)
    stride = draw.choice([[1], [2], [draw.int(1, 2) for _ in range(n)]])
    padding = [draw.int(0, 1) if tap > 1 else 0 for tap in taps]
    dilation = [draw.int(1, 2)] * n
    extra = [0] * n
    if transposed and draw.bool():
        stride, extra = [2] * n, [1] * n
    bias = draw.floats(cout) if draw.bool() else None
    x = draw.floats(draw.int(1, 2), cin, *sizes)
    args = [
        x,
        draw.floats(*weight, *taps),
        bias,
        stride,
        padding,
        dilation,
        transposed,
        extra,
        groups,
    ]
    return Case(args, rtol=1e-3)


@case("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default")
def max_pool(draw, name):
    n = 3 if "3d" in name else 2
    x = draw.floats(*(2, 3, 7, 6, 5)[: n + 2])
    args = [x, [draw.int(2, 3)] * n, [draw.int(1, 2)] * n, [draw.int(0, 1)] * n]
    return Case([*args, [1] * n, draw.bool()], only=(0, 1) if draw.bool() else (0,))


@case("aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.avg_pool3d.default")
def avg_pool(draw, name):
    n = int(name.split("avg_pool")[1][0])
    x = draw.floats(*(2, 3, 7, 6, 5)[: n + 2])
    args = [x, [draw.int(2, 3)] * n, [draw.int(1, 2)] * n, [draw.int(0, 1)] * n]
    if draw.int(0, 2) == 0 and n > 1:
        return Case([*args, False, True, 5])
    return Case([*args, draw.bool(), draw.bool()])


@case(
    "aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default", "aten.adaptive_avg_pool1d.default"
)  # fmt: skip
def adaptive_avg_pool(draw, name):
    n = int(name.split("pool")[1][0])
    x = draw.floats(*(2, 3, 7, 6, 5)[: n + draw.int(1, 2)])
    return Case([x, [draw.int(1, 5) for _ in range(n)]])


@case("aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default")
def adaptive_max_pool(draw, name):
    n = int(name.split("pool")[1][0])
    x = draw.floats(*(2, 3, 7, 6, 5)[: n + 2])
    return Case([x, [draw.int(1, 5) for _ in range(n)]], only=(0,))


@case("aten.native_layer_norm.default")
def layer_norm(draw):
    count = draw.int(1, 2)
    x = draw.floats(2, 3, 5)
    shape = list(x.shape[-count:])
    weight = draw.floats(*shape) if draw.bool() else None
    bias = draw.floats(*shape) if draw.bool() else None
    return Case([x, shape, weight, bias, 1e-5], only=(0, 1, 2) if draw.bool() else (0,))


@case("aten.native_group_norm.default")
def group_norm(draw):
    x = draw.floats(*draw.choice([(2, 6, 5), (2, 6, 3, 4), (1, 6, 2, 2, 3)]))
    weight = draw.floats(6) if draw.bool() else None
    bias = draw.floats(6) if draw.bool() else None
    area = x.numel() // (x.shape[0] * 6)
    return Case([x, weight, bias, x.shape[0], 6, area, draw.choice([1, 2, 3, 6]), 1e-5])


@case("aten._native_batch_norm_legit_no_training.default", "aten._native_batch_norm_legit.no_stats")
def batch_norm(draw, name):
    x = draw.floats(*draw.choice([(2, 3, 5), (4, 3), (2, 3, 4, 5)]))
    weight = draw.floats(3) if draw.bool() else None
    bias = draw.floats(3) if draw.bool() else None
    if name.endswith("no_stats"):
        return Case([x, weight, bias, True, 0.1, 1e-5], rtol=1e-3)
    mean, variance = draw.floats(3), draw.floats(3, low=0.2)
    return Case([x, weight, bias, mean, variance, 0.1, 1e-5])


@case(*(f"aten.upsample_{n}.vec" for n in ("linear1d", "bilinear2d", "trilinear3d")))
def upsample_linear(draw, name):
    n = int(name[-6])
    x = draw.floats(*(2, 3, 5, 4, 3)[: n + 2])
    if draw.bool():
        return Case([x, None, draw.bool(), [2.0] * n])
    return Case([x, [draw.int(2, 9) for _ in range(n)], draw.bool(), None])


@case(*(f"aten.upsample_nearest{n}d.vec" for n in (1, 2, 3)))
def upsample_nearest(draw, name):
    n = int(name[-6])
    x = draw.floats(*(2, 3, 5, 4, 3)[: n + 2])
    return Case(
        [x, None, [2.0] * n] if draw.bool() else [x, [draw.int(1, 9) for _ in range(n)], None]
    )


@case("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
def grouped_mm(draw, name):
    groups, k, n = draw.int(1, 4), 4 * draw.int(1, 4), 4 * draw.int(1, 4)
    sizes = [draw.int(0, 5) for _ in range(groups)]
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    rows = sum(sizes)
    if name.startswith("aten") and not rows:
        # torch takes no empty rows
        sizes, rows = [1] * groups, groups
        ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    if name.startswith("aten") and draw.bool():
        return Case([draw.floats(groups, 3, k), draw.floats(groups, k, n)])
    return Case([draw.floats(rows, k), draw.floats(groups, k, n), ends])
