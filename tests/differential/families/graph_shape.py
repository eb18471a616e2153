"""Ops that move elements: reshapes, transposes, joins, splits, broadcasts, pads, masks, ranges, random numbers."""

from __future__ import annotations

from tests.differential.families._graph import ALL, Draw, family, line, tensor

AXES = ["0", "1", "-1", "-2", "2", "3", "-4", "7", "None", "1.0", "'a'", "True", "np.int64(0)"]


def reshapes(draw: Draw) -> list[str]:
    found = []
    for given, shapes in {
        "f32[2, 3, 4]": ["[6, 4]", "[-1]", "[2, -1]", "[-1, -1]", "[5, -1]", "[24]", "[25]", "(2, 12)", "24",
            "[2, 3, 4, 1]", "[0, -1]", "[-2, 12]", "['a', 24]", "[Dim(6), 4]", "None", "'ab'", "[2.0, 12]", "x.shape",
            "[]", "Shape([24])", "np.array([6, 4])"],
        "f32[a, 4]": ["['a', 2, 2]", "[-1]", "[4, 'a']", "[-1, 2]", "['b', 4]", "[Dim('a') * 4]", "[Dim('a') * 2, 2]",
            "[Dim('a') // 2, 8]", "[2, -1]", "[3, -1]", "[8, -1]", "['a', -1]", "[8]", "[-1, 'a']", "x.shape",
            "[1, 'a', 1, 4]"],
        "f32[a, b]": ["[Dim('a') * 'b']", "[-1]", "['b', 'a']", "['b', -1]", "['a', -1]", "[2, -1]", "['c', -1]",
            "[Dim('a') * Dim('b'), 1]"],
        "f32[]": ["[1]", "[-1]", "[]", "[2]", "[1, 1]"],
        "f32[0, 3]": ["[0]", "[3, 0]", "[-1]", "[0, -1]", "[-1, 3]", "[1]"],
        "buffer f32[4]": ["[2, 2]"], "bool[4]": ["[2, 2]", "[-1, 2]"],
    }.items():  # fmt: skip
        for shape in shapes:
            found += [line(given, f"ops.reshape(x, {shape})"), line(given, f"x.reshape({shape})")]
    for shape in ([], [3], [2, "a"], [2, "a", "b", 3]):
        for ends in (
            "",
            "0",
            "1",
            "1, 2",
            "0, -1",
            "-2, -1",
            "2, 1",
            "5",
            "0, 9",
            "start_dim=1",
            "end_dim=0",
            "start_dim=-3, end_dim=-2",
            "None",
            "1.0",
        ):
            found.append(line(tensor("f32", shape), f"ops.flatten(x{', ' + ends if ends else ''})"))
            if draw.random() < 0.4:
                found.append(line(tensor("bf16", shape), f"x.flatten({ends})"))
    for name in ("squeeze", "unsqueeze"):
        for axis in AXES:
            for shape in ([], [1], [1, "a"], ["a", 1, 3]):
                found.append(line(tensor(draw.choice(ALL), shape), f"ops.{name}(x, {axis})"))
    for shape in ([], [3], [2, "a"], [2, "a", 3]):
        for axes in (
            "0, 1",
            "-1, -2",
            "1, 1",
            "0, 5",
            "-4, 0",
            "0",
            "None, 1",
            "0, 1.0",
            "axis_1=0, axis_2=1",
            "'a', 0",
        ):
            found.append(line(tensor(draw.choice(ALL), shape), f"ops.transpose(x, {axes})"))
            if draw.random() < 0.5:
                found.append(line(tensor("f32", shape), f"x.transpose({axes})"))
        for axes in (
            "[0]",
            "[1, 0]",
            "[2, 0, 1]",
            "[-1, 0, 1]",
            "[0, 0]",
            "[0, 1]",
            "(1, 0)",
            "[0, 5]",
            "[]",
            "None",
            "[0, 1, 2, 3]",
            "[1.0, 0]",
            "dims=[1, 0]",
        ):
            found.append(line(tensor(draw.choice(ALL), shape), f"ops.permute(x, {axes})"))
            if draw.random() < 0.4:
                found.append(line(tensor("f32", shape), f"x.permute({axes})"))
        found.append(line(tensor("f32", shape), "x.T"))
    for given in ("f32[4, a]", "f32[n, 4]", "f32[]"):
        for shape in (
            "[4, 4]",
            "['b', 4]",
            "['n', 2]",
            "[4, 'a']",
            "[4]",
            "[]",
            "[4, 7], 'a message'",
            "[4, 4], message='m'",
            "[Dim('n') * 2, 4]",
            "None",
            "[-1, 4]",
            "shape=[4, 5]",
            "['x1', 'x2']",
        ):
            found += [line(given, f"ops.rebind(x, {shape})"), line(given, f"x.rebind({shape})")]
    return found


def broadcasts(draw: Draw) -> list[str]:
    found = []
    for given in (
        "f32[]",
        "f32[1]",
        "f32[3]",
        "f32[1, 4]",
        "f32[a, 1]",
        "f32[2, 1, b]",
        "bool[1, 3]",
        "buffer f32[1]",
    ):
        for shape in (
            "[3]",
            "[2, 3]",
            "['a', 4]",
            "[2, 'a', 'b']",
            "['a', 'b']",
            "[]",
            "[1]",
            "[-1]",
            "[0]",
            "(2, 1, 'b')",
            "x.shape",
            "3",
            "None",
            "'a'",
            "[5, *x.shape]",
            "[2.0]",
            "[Dim('a') * 2, 4]",
            "['q', 3]",
        ):
            found.append(line(given, f"ops.broadcast_to(x, {shape})"))
            if draw.random() < 0.3:
                found.append(line(given, f"x.broadcast_to({shape})"))
    for given in (
        "f32[1, 4]; si64[2]",
        "f32[4]; si64[2]",
        "f32[1, 4]; si32[2]",
        "f32[1, 4]; si64[n]",
        "f32[1, 4]; f32[2]",
        "f32[1, 4]; si64[]",
        "f32[1, 4]; si64[2, 1]",
        "f32[4, 4]; si64[1]",
    ):
        for extra in (
            "",
            ", out_dims=['r', 4]",
            ", out_dims=[3, 4]",
            ", ['r', 's']",
            ", out_dims=['r']",
            ", out_dims=[]",
            ", out_dims=[2, 'r', 4]",
            ", out_dims=None",
            ", out_dims=3",
        ):
            found.append(line(given, f"ops.broadcast_to(x, y{extra})"))
    for _ in range(70):
        count = draw.choice([1, 2, 2, 2, 3])
        rank = draw.randint(0, 3)
        shape = draw.shape(rank, (2, 3, "a"))
        axis = draw.randint(0, max(rank - 1, 0))
        given = []
        for _ in range(count):
            own = list(shape)
            if rank and draw.random() < 0.6:
                own[axis] = draw.choice([1, 2, 4, "a", "b"])
            if draw.random() < 0.08:
                own = draw.shape(draw.randint(0, 3))
            given.append(tensor("f32" if draw.random() < 0.85 else draw.choice(ALL), own))
        names = ", ".join("xyzw"[:count])
        at = axis if draw.random() < 0.7 else draw.choice([axis - rank, rank, -rank - 1, 5])
        form = draw.choice(
            [
                "ops.concat([{0}], {1})",
                "ops.concat(({0},), axis={1})",
                "ops.stack([{0}], {1})",
                "ops.stack([{0}], axis={1})",
            ]
        )
        found.append(line(given, form.format(names, at)))
    for argument in (
        "[]",
        "[x]",
        "x",
        "None",
        "[x, 1]",
        "[x, 1.0]",
        "[x, np.ones((2, 3), np.float32)]",
        "[x, None]",
        "[x, x.shape]",
        "(v for v in [x, x])",
        "[x, x], None",
        "[x, x], 1.0",
        "[x, x], axis='a'",
        "original_vals=[x, x]",
        "values=[x, x]",
        "[x, x], 0, 1",
    ):
        found += [line("f32[2, 3]", f"ops.{n}({argument})") for n in ("concat", "stack")]
    for shape in ([6], [6, "a"], ["a", 6], [7], ["a"], []):
        for sizes in (
            "[2, 4]",
            "[6]",
            "[1, 2, 3]",
            "[2, 3]",
            "[]",
            "[-1, 7]",
            "[0, 6]",
            "['a', 3]",
            "['a']",
            "2",
            "None",
            "[2.0, 4]",
            "[Dim('a')]",
            "[2, Dim(4)]",
        ):
            found.append(
                line(
                    tensor("f32", shape),
                    f"ops.split(x, {sizes}, {draw.choice(['0', '1', '-1', '5', 'axis=0'])})",
                )
            )
            found.append(line(tensor("f32", shape), f"ops.split(x, {sizes})"))
        for chunks in ("1", "2", "3", "4", "0", "-1", "7", "2.0", "None", "'a'", "Dim(2)"):
            found.append(line(tensor("f32", shape), f"ops.chunk(x, {chunks})"))
            found.append(
                line(
                    tensor("f32", shape),
                    f"ops.chunk(x, {chunks}, {draw.choice(['0', '1', '-1', '5', 'axis=-1'])})",
                )
            )
    return found


def copies(draw: Draw) -> list[str]:
    found = []
    for shape in ([], [3], [2, "a"], ["a", "b", 1]):
        for repeats in (
            "[2]",
            "[2, 3]",
            "[1, 1, 2]",
            "[0]",
            "[-1]",
            "['n']",
            "[2, 'a']",
            "[Dim(2), 2]",
            "2",
            "None",
            "[]",
            "[2.0]",
            "(2, 1)",
            "[2, 2, 2, 2]",
            "repeats=[2, 2]",
        ):
            found.append(line(tensor(draw.choice(ALL), shape), f"ops.tile(x, {repeats})"))
        for repeats in (
            "2",
            "1",
            "0",
            "-1",
            "y",
            "2.0",
            "None",
            "[1, 2]",
            "Dim('n')",
            "'n'",
            "np.int64(3)",
            "True",
            "np.array([1, 2])",
        ):
            for extra in (
                "",
                ", 0",
                ", axis=-1",
                ", axis=5",
                ", axis=0, out_dim='q'",
                ", out_dim='q'",
                ", axis=1, out_dim=7",
            ):
                if draw.random() < 0.5:
                    given = draw.choice(
                        ["si64[3]", "si64[]", "si32[1]", "f32[3]", "si64[a]", "si64[2, 2]"]
                    )
                    found.append(
                        line(
                            [tensor("f32", shape), given],
                            f"ops.repeat_interleave(x, {repeats}{extra})",
                        )
                    )
        for paddings in (
            "[0, 0]",
            "[1, 2]",
            "[1, 2, 3, 4]",
            "[-1, 0]",
            "[0, 0, 0, 0, 1, 1]",
            "[]",
            "3",
            "None",
            "[1]",
            "['a', 1]",
            "[1.0, 2]",
            "((1, 2),)",
            "[Dim('a'), 1, 0, 0]",
        ):
            for extra in (
                "",
                ", value=1",
                ", mode='constant', value=0.5",
                ", mode='reflect'",
                ", 'edge'",
                ", value=None",
                ", value=y",
            ):
                if draw.random() < 0.5:
                    found.append(
                        line(
                            [tensor(draw.choice(["f32", "si32", "bool", "bf16"]), shape), "f32[]"],
                            f"ops.pad(x, {paddings}{extra})",
                        )
                    )
        for bounds in (
            "",
            "0, 0",
            "1",
            "num_upper=1",
            "-1, 0",
            "num_lower=-2",
            "1, 1, True",
            "exclude=True",
            "None, None",
            "9, 9",
            "num_lower=2, num_upper=-1",
            "1.5, 0",
            "3, 3",
            "2, 3",
        ):
            for own in (shape, [3, 4], [2, 4, 3]):
                found.append(
                    line(
                        tensor(draw.choice(["f32", "si32", "bool", "bf16"]), own),
                        f"ops.band_part(x{', ' + bounds if bounds else ''})",
                    )
                )
    for shape in (
        "x.shape",
        "[2, 3]",
        "['a', 2]",
        "[Dim('a') * 2]",
        "[]",
        "3",
        "None",
        "[2.5]",
        "Shape(['a'])",
        "['q']",
        "x",
    ):
        found.append(line("f32[a, b]", f"ops.shape_to_tensor({shape})"))
    for shape in ([4], [3, 2], ["a", 4], ["a", 3], [], ["a"], [3, "a"], [2, 0]):
        found.append(line(tensor("f32", shape), "ops.as_interleaved_complex(x)"))
    return found


def makers(draw: Draw) -> list[str]:
    found = []
    for arguments in (
        "0, 10, 2, dtype=si64, device=CPU", "0, 10, dtype=si64, device=CPU", "0, 10, 3, dtype=si32, device=CPU",
        "0, 1, 0.25, dtype=f32, device=CPU", "10, 0, -1, dtype=si32, device=CPU",
        "0, 10, -1, dtype=si32, device=CPU", "0, 10, 0, dtype=si32, device=CPU", "0, 10, 2", "0, 10, 2, dtype=si32",
        "10, dtype=si32, device=CPU", "0, x, 1, dtype=si64, device=CPU", "0, x, 1, out_dim='n', dtype=si64, device=CPU",
        "0, x, 1, 'n', dtype=si64, device=CPU", "0, x, out_dim='n', dtype=si64, device=CPU",
        "0, x, 1, 7, dtype=si64, device=CPU", "0, 10, 1, out_dim=10, dtype=si64, device=CPU",
        "0, 10, 1, out_dim=9, dtype=si64, device=CPU", "0, 10, 1, out_dim='n', dtype=si64, device=CPU",
        "0, Dim('a'), 1, dtype=si64, device=CPU", "0, Dim('a'), dtype=si64, device=CPU",
        "0, Dim('a'), 1, out_dim='a', dtype=si64, device=CPU", "0, Dim('a'), 2, dtype=si32, device=CPU",
        "1, Dim('a') + 1, dtype=si64, device=CPU",
        "0, 5, 1, dtype=bool, device=CPU", "0, 5, 1, dtype=bf16, device=CPU", "0, 5, 1, dtype=f16, device=CPU",
        "0, 5.5, 1, dtype=si32, device=CPU", "'a', 5, 1, dtype=si32, device=CPU",
        "0, y, 1, out_dim='n', dtype=si32, device=CPU", "0, 5, y, out_dim='n', dtype=f32, device=CPU",
        "0, 300, 1, dtype=ui8, device=CPU", "-1, 5, 1, dtype=ui8, device=CPU", "0, 5, 1, dtype=f32, device=GPU",
        "0, 1, 0.1, dtype=f64, device=CPU", "None, 5, 1, dtype=f32, device=CPU",
        "0, z, 1, out_dim='n', dtype=f32, device=CPU", "0, z, 1, out_dim='n', dtype=si64, device=CPU",
        "start=0, stop=4, step=1, dtype=f32, device=CPU",
        "0, x, 1, out_dim=None, dtype=si64, device=CPU",
        "np.int64(0), np.int64(5), np.int64(1), dtype=si64, device=CPU", "0, 5, 1, None, dtype='float32', device=CPU",
        "0, w, 1, out_dim='n', dtype=si64, device=CPU", "0, 5, dtype=si64, device='cpu'",
    ):  # fmt: skip
        found.append(line("si64[]; si32[]; f32[]; si64[a]", f"ops.range({arguments})"))
    for name in ("uniform", "normal", "gaussian"):
        for dtype in ALL:
            found.append(
                line(
                    "f32[a, b]",
                    f"ops.random.set_seed(3); ops.random.{name}(TensorType({dtype}, [2, 3], CPU))",
                )
            )
        for shape in ("['a', 2]", "['q']", "[Dim('a') * 2]", "[]", "[0]"):
            found.append(
                line(
                    "f32[a, b]",
                    f"ops.random.set_seed(3); ops.random.{name}(TensorType(f32, {shape}, CPU))",
                )
            )
            found.append(
                line(
                    "si64[]",
                    f"ops.random.set_seed(3); ops.random.{name}(TensorType(f32, {shape}, CPU))",
                )
            )
        for extra in (
            "(0, 2)",
            "range=(0, 2)",
            "(2, 0)",
            "0, 2",
            "mean=1.0, std=2.0",
            "std=-1.0",
            "1, 2",
            "x",
            "mean=x",
            "range=(x, 1)",
            "None",
            "'a'",
            "range=(1,)",
            "mean=None",
        ):
            found.append(
                line(
                    "f32[]",
                    f"ops.random.set_seed(3); ops.random.{name}(TensorType(f32, [4], CPU), {extra})",
                )
            )
        found += [
            line("f32[]", f"ops.random.{name}(TensorType(f32, [4], CPU))"),
            line("f32[]", f"ops.random.set_seed(1); ops.random.{name}([4])"),
            line("f32[]", f"ops.random.set_seed(1); ops.random.{name}()"),
            line(
                "f32[]",
                f"ops.random.set_seed(1); ops.random.{name}(like=TensorType(f32, [4], CPU))",
            ),
            line("f32[]", f"ops.random.set_seed(1); ops.random.{name}(x)"),
        ]
    for seed in (
        "0",
        "3",
        "-1",
        "2**40",
        "2**70",
        "None",
        "1.5",
        "'a'",
        "x",
        "y",
        "z",
        "w",
        "True",
        "np.int64(3)",
    ):
        found.append(
            line(
                "si64[]; si64[1]; f32[]; ui64[]",
                f"ops.random.set_seed({seed}); ops.random.uniform(TensorType(f32, [4], CPU))",
            )
        )
    for arguments in (
        "4, CPU",
        "0, CPU",
        "1, CPU",
        "-1, CPU",
        "2.5, CPU",
        "4",
        "4, CPU, False",
        "4, CPU, periodic=False, dtype=f64",
        "4, CPU, dtype=si32",
        "4, CPU, dtype=bf16",
        "'a', CPU",
        "4, device=GPU",
        "4, None",
        "True, CPU",
        "np.int64(4), CPU",
        "window_length=3, device=CPU",
        "Dim(4), CPU",
    ):
        found.append(line("none", f"ops.hann_window({arguments})"))
    return found


def programs(seed: int) -> list[str]:
    draw = Draw(seed)
    return [*reshapes(draw), *broadcasts(draw), *copies(draw), *makers(draw)]


FAMILY = family(programs)
