"""Reductions and scans along an axis, sorts, norms, products."""

from __future__ import annotations

from tests.differential.families._graph import ALL, FLOATS, Draw, family, line, tensor

REDUCTIONS = "sum mean max min argmax argmin softmax logsoftmax cumsum".split()
METHODS = "argmax max min mean stdev var".split()
AXES = [
    "0",
    "1",
    "-1",
    "-2",
    "2",
    "-3",
    "3",
    "7",
    "-9",
    "None",
    "1.0",
    "'a'",
    "True",
    "[0]",
    "(0, 1)",
    "np.int64(1)",
    "Dim(1)",
]

EPSILONS = [
    "1e-5",
    "epsilon=1e-6",
    "0",
    "1",
    "None",
    "weight_offset=1.0, epsilon=1e-5",
    "1e-5, 1.0, False",
]


def programs(seed: int) -> list[str]:
    draw = Draw(seed)
    found = []
    for name in REDUCTIONS:
        for dtype in ALL:
            found.append(line(tensor(dtype, draw.shape(draw.randint(1, 3))), f"ops.{name}(x)"))
        for axis in AXES:
            given = tensor(draw.choice(["f32", "bf16", "si32"]), draw.shape(draw.randint(0, 4)))
            found.append(
                line(
                    given,
                    f"ops.{name}(x, {axis})"
                    if draw.random() < 0.3
                    else f"ops.{name}(x, axis={axis})",
                )
            )
            found.append(line(tensor("f32", draw.shape(3)), f"ops.{name}(x, axis={axis})"))
        for wrong in (
            "3",
            "2.5",
            "None",
            "[1.0, 2.0]",
            "np.ones((2, 3), np.float32)",
            "x.shape",
            "",
            "x, 0, 1",
            "x=x, axis=0",
            "value=x",
            "input=x",
        ):
            found.append(line("f32[2, a]", f"ops.{name}({wrong})"))
        for shape in ([], [0], [0, 3], [3, 0], [1], ["a"]):
            found.append(line(tensor("f32", shape), f"ops.{name}(x)"))
            found.append(line(tensor("si64", shape), f"ops.{name}(x, axis=0)"))
        found += [
            line("buffer f32[2, 3]", f"ops.{name}(x)"),
            line("f32[2, 3] gpu:0", f"ops.{name}(x)"),
        ]
    for name in METHODS:
        for dtype in ALL:
            found.append(line(tensor(dtype, draw.shape(draw.randint(1, 3))), f"x.{name}()"))
        for axis in AXES:
            found.append(
                line(
                    tensor(draw.choice(["f32", "bf16"]), draw.shape(draw.randint(0, 3))),
                    f"x.{name}({axis})",
                )
            )
    for arguments in (
        "exclusive=True",
        "reverse=True",
        "exclusive=1",
        "reverse=True, exclusive=True",
        "axis=1, reverse=None",
        "0, True, True",
    ):
        for dtype in ("f32", "si32", "bool", "bf16"):
            found.append(line(tensor(dtype, [3, "a"]), f"ops.cumsum(x, {arguments})"))
    for dtype in ALL:
        found.append(line(tensor(dtype, [3, 5]), "ops.top_k(x, 2)"))
        found.append(line(tensor(dtype, [5]), "ops.argsort(x)"))
    for k in (
        "0",
        "1",
        "3",
        "5",
        "6",
        "-1",
        "2.0",
        "None",
        "True",
        "'k'",
        "Dim('k')",
        "Dim(2)",
        "np.int32(2)",
        "y",
    ):
        for axis in ("-1", "0", "2", "-2"):
            found.append(
                line(
                    [tensor("f32", draw.shape(draw.randint(0, 3), (3, 4, 5, "a"))), "si64[]"],
                    f"ops.top_k(x, {k}, {axis})",
                )
            )
        found.append(line("f32[a, 5]; si64[]", f"ops.top_k(input=x, k={k})"))
    for shape in ([], [0], ["a"], [3, 4], ["a", 2, 3]):
        for arguments in ("x", "x, False", "x, ascending=True", "x=x", "x, ascending=None"):
            found.append(
                line(tensor(draw.choice(["f32", "si32"]), shape), f"ops.argsort({arguments})")
            )
    for dtype in [*FLOATS, "si32", "bool"]:
        for _ in range(4):
            rank = draw.randint(0, 3)
            shape = draw.shape(rank, (2, 3, "a"))
            last = (
                shape[-1:]
                if draw.random() < 0.7
                else draw.shape(draw.randint(0, 2), (2, 3, "a", 1))
            )
            other = dtype if draw.random() < 0.6 else draw.choice(["f32", "bf16"])
            found.append(
                line(
                    [tensor(dtype, shape), tensor(other, last)],
                    f"ops.rms_norm(x, y, {draw.choice(EPSILONS)})",
                )
            )
            found.append(
                line(
                    [tensor(dtype, shape), tensor(other, last), tensor(other, last)],
                    f"ops.layer_norm(x, y, z, {draw.choice(['1e-5', 'epsilon=1e-6', '0', 'None'])})",
                )
            )
    for arguments in (
        "x, y",
        "x, y, z",
        "x, gamma=y, beta=z, epsilon=1e-5",
        "input=x, gamma=y, beta=z, epsilon=1e-5",
        "x, 1.0, 0.0, 1e-5",
        "x, y, z, 1e-5, 3",
    ):
        found.append(line("f32[a, 4]; f32[4]; f32[4]", f"ops.layer_norm({arguments})"))
    for arguments in (
        "x, y",
        "x, weight=y, epsilon=1e-5",
        "input=x, weight=y, epsilon=1e-5",
        "x, 1.0, 1e-5",
        "x, y, 1e-5, 0.0, True, 3",
        "x, y, 1e-5, weight_offset=y",
    ):
        found.append(line("f32[a, 4]; f32[4]", f"ops.rms_norm({arguments})"))
    for form in ("ops.matmul(x, y)", "x @ y", "ops.matmul(lhs=x, rhs=y)"):
        for _ in range(60):
            m, k, n = draw.choice([1, 2, "a"]), draw.choice([3, 4, "k"]), draw.choice([5, 1, "n"])
            batch = draw.shape(draw.randint(0, 2), (1, 2, "b"))
            left = [*batch, m, k][draw.choice([0, 0, 0, 1]) :]
            right = [
                *(
                    batch
                    if draw.random() < 0.5
                    else batch[1:]
                    if draw.random() < 0.5
                    else draw.shape(draw.randint(0, 2), (1, 2, "b"))
                ),
                k if draw.random() < 0.85 else 7,
                n,
            ]
            right = right[: len(right) - (draw.random() < 0.1)]
            first = draw.choice(ALL)
            second = first if draw.random() < 0.6 else draw.choice(ALL)
            found.append(line([tensor(first, left), tensor(second, right)], form))
    for arguments in (
        "x, 2",
        "2, x",
        "x, np.ones((4, 3), np.float32)",
        "np.ones((3, 2), np.float32), x",
        "x, np.ones((4, 3))",
        "x, None",
        "x",
    ):
        found.append(line("f32[2, 4]", f"ops.matmul({arguments})"))
    for _ in range(24):
        first = draw.choice(ALL)
        second = first if draw.random() < 0.6 else draw.choice(ALL)
        found.append(
            line(
                [
                    tensor(first, draw.shape(draw.choice([1, 1, 1, 0, 2]))),
                    tensor(second, draw.shape(draw.choice([1, 1, 1, 0, 2]))),
                ],
                "ops.outer(x, y)",
            )
        )
    return found


FAMILY = family(programs)
