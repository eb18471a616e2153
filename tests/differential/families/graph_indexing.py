"""Slices, gathers, scatters, masks, buffers and their slices."""

from __future__ import annotations

from tests.differential.families._graph import ALL, Draw, family, line, tensor

INDICES = [
    "0", "-1", "1", "4", "5", "-5", "-6", "100", ":", "1:", ":-1", "1:3", "::2", "::-1", "1:1", "3:1", ":100",
    "-100:", "::0", "None", "...", "..., 0", "0, ...", "..., None", "0, 0", ":, 1", "1:, :2",
    "0, 0, 0", "..., ...", "None, None", "1.0", "True", "'a'", "[0, 1]", "(0, 1)", "np.int64(1)", "Dim('a')",
    "Dim(1)", "Dim('a') - 1", ":Dim('a')", ":Dim(2)", "Dim('a'):", "1:Dim('a') - 1", "y", "y:", ":y", "y, 0",
    "(slice(y, None), 'n')", "(slice(0, y), 'n')",
    "(slice(0, y), 3)", "(slice(0, 2), 2)", "(slice(0, 2), 7)", "(slice(0, 2), 'n'), 0", "slice(None)",
    "slice(0, 2, 1)", "z", "x", "np.array([0, 1])", "2:0:-1", "::2, ::-1", "-2:", ":-2", "4:", "5:", "-1:", "...,",
    "", "()", "[]", "[slice(0, 1)]", "range(2)", "1, None, :", "slice(y, y)", "0:2:y", "::-2",
]  # fmt: skip


def slices(draw: Draw) -> list[str]:
    found = []
    for index in INDICES:
        for shape in (["a", 4], [5, "b"], [5], [], ["a", 3, "b"]):
            if draw.random() < 0.75:
                given = [
                    tensor(draw.choice(["f32", "si32", "bool"]), shape),
                    draw.choice(["si64[]", "si32[]", "si64[1]", "ui8[]"]),
                    "bool[5]",
                ]
                found.append(line(given, f"x[{index}]"))
        found.append(line("buffer f32[5, a]; si64[]; bool[5]", f"x[{index}]"))
        found.append(line("buffer f32[5, 4]; si64[]; f32[4]", f"x[{index}] = z"))
    for arguments in (
        "x, [0]",
        "x, (0,)",
        "x, [slice(None)]",
        "x, 0",
        "x, [..., None]",
        "x, indices=[1]",
        "x, None",
        "x",
        "x, [slice(0, 2), 1]",
        "x, 'a'",
    ):
        found.append(line("f32[5, a]", f"ops.slice_tensor({arguments})"))
    for value in (
        "z",
        "0.0",
        "1",
        "2",
        "z, 1",
        "None",
        "np.ones(4, np.float32)",
        "z[0]",
        "y",
        "'a'",
        "[1.0]",
    ):
        for index in ("...", "0", "1:3", ":, 0", "y"):
            found.append(line("buffer f32[5, 4]; si64[]; f32[4]", f"x[{index}] = {value}"))
    for arguments in (
        "x, z",
        "x, z, [0]",
        "x, z, [slice(0, 1)]",
        "x, z, [0, slice(None)]",
        "x, z, 0",
        "x, z, [...]",
        "x, z, [y]",
        "x, z, []",
        "x, 1.0, [0]",
        "x, z, [9]",
        "x, z, [0, 0]",
        "x, z, [(slice(y, None), 'n')]",
        "destination=x, source=z, indices=[0]",
    ):
        found.append(
            line("buffer f32[5, 4]; si64[]; f32[4]", f"ops.buffer_store_slice({arguments})")
        )
    for arguments in (
        "x, z",
        "x, 1.0",
        "x, 0",
        "x",
        "z, x",
        "x, np.ones((5, 4), np.float32)",
        "x, w",
        "destination=x, source=w",
        "x, x",
    ):
        found.append(
            line("buffer f32[5, 4]; si64[]; f32[4]; f32[5, 4]", f"ops.buffer_store({arguments})")
        )
        found.append(
            line("buffer si32[5, 4]; si64[]; f32[4]; f32[5, 4]", f"ops.buffer_store({arguments})")
        )
    for program in (
        "ops.buffer_load(x)",
        "ops.buffer_load(x=x)",
        "ops.buffer_load(y)",
        "ops.buffer_load(None)",
        "ops.buffer_create(x.type)",
        "ops.buffer_create(y.type)",
        "ops.buffer_create(BufferType(f32, [2], CPU))",
        "ops.buffer_create()",
        "x + 1",
        "x.print('a')",
        "ops.print(x)",
        "ops.print(y, 'b')",
        "ops.print('text')",
        "ops.print('text', label='a')",
        "ops.print(3)",
        "ops.print()",
        "y.print()",
        "x.T",
        "x.reshape([4])",
        "ops.cast(x, f16)",
        "x.cast(f16)",
        "ops.transfer_to(x, CPU)",
        "ops.transfer_to(y, CPU)",
        "ops.transfer_to(y, GPU)",
        "y.to(GPU)",
        "y.to(CPU)",
        "y.to('cpu')",
        "y.to(None)",
        "ops.transfer_to(y, DeviceRef.CPU(1))",
        "ops.transfer_to(y, device=GPU)",
        "ops.transfer_to(1.0, CPU)",
        "ops.assert_same_device(x, y)",
        "ops.assert_same_device(x, a=y)",
        "ops.assert_same_device(y, y.to(GPU))",
        "ops.assert_same_device()",
        "ops.assert_same_device(a=y, b=y.to(GPU))",
    ):
        found.append(line("buffer f32[5, 4]; f32[3]", program))
    return found


def gathers(draw: Draw) -> list[str]:
    found = []
    for _ in range(60):
        shape = draw.shape(draw.choice([0, 1, 2, 2, 3]))
        indices = draw.shape(draw.choice([0, 1, 1, 2]), (2, 3, "n", 1))
        dtype = draw.choice(["si64", "si32", "si64", "ui32", "ui8", "f32", "bool"])
        axis = draw.choice(["0", "1", "-1", "axis=0", "axis=-1", "2", "-5", "None", "1.0", "'a'"])
        found.append(
            line(
                [tensor(draw.choice(ALL), shape), tensor(dtype, indices)],
                f"ops.gather(x, y, {axis})",
            )
        )
    for arguments in (
        "x, y",
        "x, 0, 0",
        "x, [0, 1], 0",
        "x, np.array([0, 1]), 0",
        "x, np.array([0.5]), 0",
        "input=x, indices=y, axis=0",
        "x, -1, 0",
        "x, 100, 0",
        "x, np.array([9]), 0",
        "1, y, 0",
        "x, Dim('a'), 0",
        "x, x.shape, 0",
        "x, y, y",
    ):
        found.append(line("f32[4, a]; si64[n]", f"ops.gather({arguments})"))
    for _ in range(60):
        shape = draw.shape(draw.choice([1, 2, 3, 3]), (2, 3, "a"))
        batch = draw.choice([0, 0, 1, 2])
        indices = [
            *shape[:batch],
            *draw.shape(draw.choice([0, 1]), (5, "n")),
            draw.choice([1, 1, 2, 3, "k"]),
        ]
        dtype = draw.choice(["si64", "si64", "si32", "f32", "ui32"])
        form = draw.choice(
            ["x, y", f"x, y, {batch}", f"x, y, batch_dims={batch}", "x, y, -1", "x, y, 1.0"]
        )
        found.append(
            line(
                [tensor(draw.choice(["f32", "bool", "si32"]), shape), tensor(dtype, indices)],
                f"ops.gather_nd({form})",
            )
        )
    for _ in range(70):
        shape = draw.shape(draw.choice([1, 2, 2, 3]), (2, 3, "a"))
        updates = list(shape) if draw.random() < 0.7 else draw.shape(len(shape), (2, 3, "a"))
        indices = list(updates) if draw.random() < 0.8 else draw.shape(len(shape), (2, 3, "a"))
        dtype = draw.choice(["f32", "si32", "bool", "bf16"])
        other = dtype if draw.random() < 0.8 else draw.choice(ALL)
        axis = draw.choice(["", ", 0", ", -1", ", axis=1", ", axis=5", ", axis=None", ", 1.0"])
        given = [
            tensor(dtype, shape),
            tensor(other, updates),
            tensor(draw.choice(["si64", "si32", "si64", "f32"]), indices),
        ]
        found.append(line(given, f"ops.scatter(x, y, z{axis})"))
    for _ in range(60):
        shape = draw.shape(draw.choice([1, 2, 2, 3]), (2, 3, "a"))
        depth = draw.choice([1, 1, 2, 3, "k"])
        count = draw.choice([4, "n"])
        rest = shape[depth:] if isinstance(depth, int) else []
        dtype = draw.choice(["f32", "si32", "bool", "bf16"])
        other = dtype if draw.random() < 0.8 else draw.choice(ALL)
        updates = [count, *rest] if draw.random() < 0.8 else draw.shape(2)
        given = [
            tensor(dtype, shape),
            tensor(other, updates),
            tensor(draw.choice(["si64", "si32", "si64", "f32"]), [count, depth]),
        ]
        found.append(line(given, "ops.scatter_nd(x, y, z)"))
    for form in (
        "ops.scatter(x, {0}, y)",
        "ops.scatter_nd(x, {0}, z)",
        "ops.scatter(x, x, {0})",
        "ops.scatter(input=x, updates={0}, indices=y, axis=0)",
    ):
        for value in (
            "1.0",
            "0",
            "None",
            "np.ones((2, 3), np.float32)",
            "[1.0]",
            "x",
            "y",
            "np.zeros((2, 3), np.int64)",
            "'a'",
        ):
            found.append(line("f32[2, 3]; si64[2, 3]; si64[4, 1]", form.format(value)))
    for given in (
        "bool[a]; f32[a]",
        "bool[a, 3]; f32[3]",
        "f32[4]; f32[a]",
        "si32[2, 2]; f32[4]",
        "bool[]; f32[]",
        "ui8[3]; f32[3]",
    ):
        for out in (
            "'n'",
            "4",
            "0",
            "-1",
            "None",
            "Dim('n')",
            "Dim('a') * 2",
            "1.0",
            "out_dim='n'",
            "'a'",
        ):
            found.append(line(given, f"ops.nonzero(x, {out})"))
            found.append(line(["f32[a, 3]", given], f"ops.masked_scatter(x, y, z, {out})"))
    for arguments in (
        "x, y",
        "x, y, z",
        "x, y, 1.0, 'n'",
        "input=x, mask=y, updates=z, out_dim='n'",
        "x, True, z, 'n'",
        "1, y, z, 'n'",
    ):
        found.append(line("f32[a, 3]; bool[a, 3]; f32[n]", f"ops.masked_scatter({arguments})"))
    found += [
        line("bool[a]", f"ops.nonzero({a})")
        for a in ("x", "", "True, 'n'", "[1, 0], 'n'", "x=x, out_dim='n'")
    ]
    return found


def programs(seed: int) -> list[str]:
    draw = Draw(seed)
    return [*slices(draw), *gathers(draw)]


FAMILY = family(programs)
