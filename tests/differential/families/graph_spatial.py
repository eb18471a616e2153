"""Convolutions, pools, resizes, folds, inverse FFTs."""

from __future__ import annotations

from tests.differential.families._graph import Draw, family, line, tensor


def convolutions(draw: Draw) -> list[str]:
    found = []
    for _ in range(110):
        c = draw.choice([3, 4, "c"])
        groups = draw.choice([1, 1, 1, 2, 3])
        per = c // groups if isinstance(c, int) and draw.random() < 0.8 else draw.choice([c, 2, 4])
        image = [draw.choice([1, "b"]), draw.choice([8, 7, "h"]), draw.choice([9, "w"]), c]
        taps = [
            draw.choice([3, 1, 2, "r"]),
            draw.choice([3, 1, 9]),
            per or 1,
            draw.choice([6, 4, "f"]),
        ]
        extra = draw.some(
            [
                "stride=(2, 1)",
                "dilation=(1, 2)",
                "padding=(1, 1, 0, 2)",
                "stride=2",
                "padding=1",
                "padding=(1, 1)",
                "dilation=0",
                "stride=(0, 1)",
                "padding=(-1, 0, 0, 0)",
                "bias=z",
                "stride=(1, 1, 1)",
                "bias=None",
            ],
            draw.choice([0, 0, 1, 2]),
        )
        if groups > 1:
            extra.append(f"groups={groups}")
        dtype = draw.choice(["f32", "bf16", "f32", "si32"])
        other = dtype if draw.random() < 0.9 else draw.choice(["f32", "bf16"])
        if draw.random() < 0.06:
            image = image[1:]
        if draw.random() < 0.06:
            taps = taps[1:]
        found.append(
            line(
                [tensor(dtype, image), tensor(other, taps), tensor(dtype, taps[-1:])],
                f"ops.conv2d({', '.join(['x', 'y', *extra])})",
            )
        )
    for _ in range(70):
        c = draw.choice([3, 4, "c"])
        image = [draw.choice([1, "b"]), draw.choice([8, "h"]), draw.choice([9, "w"]), c]
        taps = [draw.choice([3, 2]), 3, draw.choice([6, "f"]), c if draw.random() < 0.85 else 5]
        extra = draw.some(
            [
                "stride=(2, 1)",
                "dilation=(1, 2)",
                "padding=(1, 1, 0, 2)",
                "stride=2",
                "output_paddings=(1, 0)",
                "bias=z",
                "stride=(0, 1)",
                "output_paddings=(2, 2)",
                "padding=(-1, 0, 0, 0)",
                "padding=(1, 1)",
            ],
            draw.choice([0, 0, 1, 2]),
        )
        dtype = draw.choice(["f32", "bf16", "f32", "si32"])
        found.append(
            line(
                [tensor(dtype, image), tensor(dtype, taps), tensor(dtype, [taps[2]])],
                f"ops.conv2d_transpose({', '.join(['x', 'y', *extra])})",
            )
        )
    for _ in range(50):
        c = draw.choice([4, 3, "c"])
        image = [draw.choice([1, "b"]), draw.choice([5, "d"]), 8, draw.choice([9, "w"]), c]
        taps = [2, 3, draw.choice([3, 1]), c if draw.random() < 0.85 else 2, draw.choice([6, "f"])]
        extra = draw.some(
            [
                "stride=(2, 1, 1)",
                "dilation=(1, 2, 1)",
                "padding=(1, 1, 0, 2, 0, 0)",
                "stride=2",
                "groups=2",
                "bias=z",
                "padding=(1, 1)",
                "padding=(1, 1, 1)",
            ],
            draw.choice([0, 0, 1, 2]),
        )
        dtype = draw.choice(["f32", "bf16", "f32"])
        found.append(
            line(
                [tensor(dtype, image), tensor(dtype, taps), tensor(dtype, taps[-1:])],
                f"ops.conv3d({', '.join(['x', 'y', *extra])})",
            )
        )
    layouts = [
        "input_layout=graph.type.ConvInputLayout.NCHW",
        "filter_layout=graph.type.FilterLayout.FCRS",
        "input_layout='NCHW'",
        "filter_layout='FCRS'",
        "filter_layout=graph.type.FilterLayout.QRSCF",
        "input_layout=None",
        "filter_layout=None",
    ]
    for name in ("conv2d", "conv2d_transpose"):
        for layout in layouts:
            found.append(line("f32[1, 4, 8, 8]; f32[6, 4, 3, 3]", f"ops.{name}(x, y, {layout})"))
            found.append(
                line(
                    "f32[1, 4, 8, 8]; f32[6, 4, 3, 3]",
                    f"ops.{name}(x, y, {layout}, filter_layout=graph.type.FilterLayout.FCRS)"
                    if layout.startswith("input")
                    else f"ops.{name}(x, y, input_layout=graph.type.ConvInputLayout.NCHW, {layout})",
                )
            )
        for arguments in (
            "x",
            "x, 1.0",
            "x, np.ones((3, 3, 4, 6), np.float32)",
            "x=x, filter=y",
            "input=x, filter=y",
            "x, y, (1, 1), (1, 1), (0, 0, 0, 0)",
            "x, y, None",
            "x, y, groups=0",
            "x, y, groups=3",
            "x, y, groups=-1",
            "x, y, stride='a'",
            "x, y, (1.0, 1.0)",
        ):
            found.append(line("f32[1, 8, 8, 4]; f32[3, 3, 4, 6]", f"ops.{name}({arguments})"))
    return found


def windows(draw: Draw) -> list[str]:
    found = []
    for name in ("avg_pool2d", "max_pool2d"):
        for _ in range(60):
            image = [
                draw.choice([1, "b"]),
                draw.choice([8, 7, "h"]),
                draw.choice([9, "w"]),
                draw.choice([3, "c"]),
            ]
            if draw.random() < 0.08:
                image = image[1:]
            kernel = draw.choice(
                [
                    "(2, 2)",
                    "(3, 2)",
                    "2",
                    "(1, 9)",
                    "(9, 9)",
                    "(0, 1)",
                    "kernel_size=(2, 2)",
                    "(2, 2, 2)",
                    "(Dim(2), 2)",
                    "('k', 2)",
                    "(-1, 2)",
                ]
                if draw.random() < 0.5
                else ["(2, 2)", "(3, 3)"]
            )
            extra = draw.some(
                [
                    "stride=2",
                    "stride=(2, 1)",
                    "dilation=2",
                    "dilation=(1, 2)",
                    "padding=1",
                    "padding=(1, 0)",
                    "ceil_mode=True",
                    "stride=0",
                    "padding=-1",
                    "padding=3",
                    "padding=(1, 1, 1, 1)",
                ],
                draw.choice([0, 1, 2]),
            )
            if name == "avg_pool2d" and draw.random() < 0.3:
                extra.append("count_boundary=False")
            dtype = draw.choice(["f32", "bf16", "f32", "si32", "f64"])
            found.append(
                line(tensor(dtype, image), f"ops.{name}({', '.join(['x', kernel, *extra])})")
            )
    for size in (
        "[1, 3, 16, 16]",
        "(1, 3, 4, 20)",
        "[1, 3, 'h2', 8]",
        "[2, 3, 8, 8]",
        "[16, 16]",
        "[1, 3, 0, 4]",
        "[1, 3, -1, 4]",
        "[1, 5, 8, 8]",
        "None",
        "x.shape",
        "[1.0, 3, 8, 8]",
        "[1, 3, 16, Dim('w') * 2]",
        "8",
    ):
        for mode in (
            "",
            ", ops.InterpolationMode.BICUBIC",
            ", interpolation=ops.InterpolationMode.NEAREST",
            ", ops.InterpolationMode.BILINEAR",
            ", 'bicubic'",
            ", None",
        ):
            given = tensor(
                draw.choice(["f32", "bf16", "si32", "f32"]),
                draw.choice([[1, 3, 8, 8], [1, 3, "h", "w"], [3, 8, 8], ["b", 3, 8, "w"]]),
            )
            found.append(line(given, f"ops.resize(x, {size}{mode})"))
    for _ in range(80):
        c, k = draw.choice([2, 3, "c"]), draw.choice([(2, 2), (3, 1)])
        blocks = draw.choice([9, 6, 16, "l"])
        middle = (
            c * k[0] * k[1]
            if isinstance(c, int) and draw.random() < 0.85
            else draw.choice(["c", 7])
        )
        size = draw.choice(
            [
                "(4, 4)",
                "(5, 2)",
                "(4, 'w')",
                "('h', 'w')",
                "(Dim('l'), 4)",
                "output_size=(4, 4)",
                "4",
                "(4, 4, 4)",
            ]
        )
        extra = draw.some(
            ["stride=2", "stride=(1, 2)", "dilation=2", "padding=1", "padding=(1, 0)", "stride=0"],
            draw.choice([0, 0, 1, 2]),
        )
        image = [draw.choice([1, "b"]), middle, blocks]
        kernel = f"kernel_size={k}" if "=" in size or draw.random() < 0.2 else f"{k}"
        if draw.random() < 0.06:
            image = image[1:]
        found.append(
            line(
                tensor(draw.choice(["f32", "bf16", "f32"]), image),
                f"ops.fold({', '.join(['x', size, kernel, *extra])})",
            )
        )
    for arguments in (
        "x",
        "x, 6",
        "x, n=6",
        "x, axis=0",
        "x, axis=1",
        "x, axis=-2",
        "x, 0",
        "x, -1",
        "x, 6, 1",
        "x, normalization='ortho'",
        "x, normalization='forward'",
        "x, normalization='none'",
        "x, input_is_complex=True",
        "x, 6, -1, 'backward', True",
        "x, n=7, input_is_complex=True",
        "x, n=2.0",
        "x, buffer_size_mb=16",
        "x, axis=5",
        "x, None",
        "input_tensor=x",
        "x, n='n'",
    ):
        for shape in ([3, 4], ["a", 4], [3, 4, 2], [5], ["a", "b"], [2, "a", 2], []):
            found.append(
                line(
                    tensor(draw.choice(["f32", "f32", "bf16", "si32"]), shape),
                    f"ops.irfft({arguments})",
                )
            )
    return found


def programs(seed: int) -> list[str]:
    draw = Draw(seed)
    return [*convolutions(draw), *windows(draw)]


FAMILY = family(programs)
