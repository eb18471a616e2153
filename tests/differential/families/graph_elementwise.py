"""Element-wise ops and operators: promotion, broadcasting, scalars, arrays, casts, constants."""

from __future__ import annotations

from tests.differential.families._graph import ALL, Draw, family, line, tensor

UNARY = (
    "abs acos atanh cos erf exp floor gelu is_inf is_nan log log1p logical_not negate relu round rsqrt "
    "sigmoid silu sin sqrt tanh trunc"
).split()
UNARY_OPERATORS = ["-x", "~x", "abs(x)", "round(x)", "+x", "x.T", "bool(x)", "float(x)"]
BINARY = (
    "add sub mul div floor_div mod pow max min equal not_equal greater greater_equal logical_and logical_or logical_xor"
).split()
OPERATORS = [
    "+",
    "-",
    "*",
    "/",
    "//",
    "%",
    "**",
    "==",
    "!=",
    "<",
    "<=",
    ">",
    ">=",
    "&",
    "|",
    "^",
    "@",
]
SCALARS = [
    "1", "2", "-1", "0", "300", "-129", "2**31", "2**40", "2**63", "-2**63", "2**64", "1.0", "0.5", "-2.5", "1e30",
    "1e300", "float('inf')", "float('nan')",
    "True", "False", "None", "'a'", "1j", "[1, 2]", "(1.0, 2.0)", "[]", "np.float32(1.5)", "np.float64(0.1)",
    "np.float16(3)", "np.int8(3)", "np.int64(300)", "np.uint8(7)",
    "np.bool_(True)", "np.ones(4, np.float32)", "np.ones(4, np.float64)", "np.ones(4, np.int32)",
    "np.ones((1, 4), np.int64)", "np.ones(3, np.float32)", "np.ones((), np.float32)",
    "np.ones(4, bool)", "Dim(3)", "Dim('a')", "Dim('a') * 2", "Shape([4])", "x.shape", "x.shape[0]", "f32",
    "object()", "CPU",
]  # fmt: skip
WRONG_UNARY = [
    "'a'",
    "None",
    "[1, 2]",
    "np.ones(3, np.float32)",
    "2",
    "2.5",
    "True",
    "Dim(3)",
    "Dim('a')",
    "x.shape",
    "x, x",
    "",
    "x=x",
    "input=x",
    "y=x",
    "x.type",
]


def pair(draw: Draw) -> tuple[list[object], list[object]]:
    """Two shapes, most of which broadcast."""
    first = draw.shape(draw.randint(0, 4), (1, 2, 3, "a", "b"))
    second = list(first)
    for axis in range(len(second)):
        kind = draw.random()
        if kind < 0.3:
            second[axis] = 1
        elif kind < 0.4:
            second[axis] = draw.choice([1, 2, 3, 5, "a", "b", "c"])
    second = second[draw.randint(0, len(second)) if draw.random() < 0.4 else 0 :]
    return (first, second) if draw.random() < 0.5 else (second, first)


def programs(seed: int) -> list[str]:
    draw = Draw(seed)
    found = []
    for name in UNARY:
        for dtype in ALL:
            found.append(line(tensor(dtype, draw.shape()), f"ops.{name}(x)"))
        for argument in draw.some(WRONG_UNARY, 7):
            found.append(line(tensor("f32", draw.shape(2)), f"ops.{name}({argument})"))
        found.append(line("buffer f32[a, 4]", f"ops.{name}(x)"))
        found.append(line("f32[a, 4] gpu:0", f"ops.{name}(x)"))
    for approximate in ("'none'", "'tanh'", "'quick'", "'fast'", "None", "3"):
        found.append(line("bf16[a, 4]", f"ops.gelu(x, {approximate})"))
        found.append(line("si32[a, 4]", f"ops.gelu(x, approximate={approximate})"))
    for operator in UNARY_OPERATORS:
        found += [line(tensor(d, draw.shape()), operator) for d in draw.some(ALL, 7)]
    binary = [f"ops.{n}({{0}}, {{1}})" for n in BINARY] + [f"{{0}} {o} {{1}}" for o in OPERATORS]
    binary += [
        "divmod({0}, {1})",
        "ops.add(lhs={0}, rhs={1})",
        "ops.max(x={0}, y={1})",
        "ops.where({0}, {1}, {1})",
    ]
    for form in binary:
        for _ in range(12):
            shapes = pair(draw)
            first = draw.choice(ALL)
            second = first if draw.random() < 0.4 else draw.choice(ALL)
            found.append(
                line([tensor(first, shapes[0]), tensor(second, shapes[1])], form.format("x", "y"))
            )
        for scalar in draw.some(SCALARS, 14):
            given = tensor(draw.choice(["f32", "si32", "bf16", "ui8", "bool", "si64"]), ["a", 4])
            ends = ("x", scalar) if draw.random() < 0.7 else (scalar, "x")
            found.append(line(given, form.format(*ends)))
        found.append(line("f32[4]; f32[4] gpu:0", form.format("x", "y")))
        found.append(line("f32[4]; buffer f32[4]", form.format("x", "y")))
    for dtype in ALL:
        for scalar in draw.some(SCALARS, 10):
            found.append(line(tensor(dtype, [2, 4]), f"x + {scalar}"))
        for to in draw.some(ALL, 4):
            found.append(line(tensor(dtype, draw.shape()), f"x.cast({to})"))
            found.append(line(tensor(dtype, draw.shape()), f"ops.cast(x, dtype={to})"))
    for wrong in ("'float32'", "None", "np.float32", "float", "3"):
        found.append(line("f32[2]", f"x.cast({wrong})"))
    for dtype in ALL:
        for scalar in draw.some(SCALARS, 14):
            found.append(line("f32[a, b]", f"ops.constant({scalar}, {dtype}, CPU)"))
    for scalar in SCALARS:
        for form in (
            "ops.constant({0})",
            "ops.constant({0}, device=CPU)",
            "ops.constant({0}, f32)",
            "ops.constant({0}, dtype=f32, device=GPU)",
            "ops.constant({0}, None, CPU)",
        ):
            found.append(line("f32[a, b]", form.format(scalar)))
    for values in (
        "[[1, 2], [3]]",
        "[[1.5, 2], [3, 4]]",
        "[True, False]",
        "[1, 2.5]",
        "[300, 1]",
        "np.zeros((0, 3), np.float32)",
        "np.arange(3) * 1.5",
        "range(3)",
        "[x, x]",
        "['a']",
    ):
        for dtype in ("f32", "ui8", "bf16", "bool", "None"):
            found.append(line("f32[a, b]", f"ops.constant({values}, {dtype}, CPU)"))
    for _ in range(60):
        shapes = [*pair(draw), draw.choice(pair(draw))]
        dtypes = [
            "bool" if draw.random() < 0.8 else draw.choice(ALL),
            draw.choice(ALL),
            draw.choice(ALL),
        ]
        if draw.random() < 0.5:
            dtypes[2] = dtypes[1]
        given = [
            tensor(d, s)
            for d, s in zip(
                dtypes,
                [shapes[0], shapes[1], shapes[0] if draw.random() < 0.6 else shapes[2]],
                strict=True,
            )
        ]
        found.append(line(given, "ops.where(x, y, z)"))
    for arguments in (
        "x, 1, 0",
        "x, 1.0, 0",
        "x, y, 0",
        "x, 0.5, y",
        "x, y, None",
        "condition=x, x=y, y=y",
        "True, y, y",
        "x, y",
        "x, 300, y",
    ):
        for dtype in ("f32", "si32", "ui8"):
            found.append(line(f"bool[a]; {dtype}[a]", f"ops.where({arguments})"))
    return found


FAMILY = family(programs)
