"""Ops that 26.x has and 25.7 has not: scatter reductions, selections, norms, resizes, regions and boxes."""

from __future__ import annotations

from tests.differential.families._graph import Draw, family, line, tensor

REDUCTIONS = ("add", "max", "min", "mul")


def scatters(draw: Draw) -> list[str]:
    lines: list[str] = []
    for _ in range(70):
        op = f"scatter_{draw.choice(REDUCTIONS)}"
        dtype = draw.choice(["f32", "bf16", "si32", "si64", "ui8", "f32", "bool"])
        other = dtype if draw.random() < 0.85 else "f64"
        indices = draw.choice(["si64", "si32", "si64", "si32", "ui8", "f32", "bool"])
        count = draw.choice([2, 3, "n"])
        axis = draw.choice([0, 1, -1, -2, 2, -3])
        shape = [draw.choice([4, "a"]), draw.choice([5, "b"])]
        updates = list(shape)
        if axis in (-2, -1, 0, 1):
            updates[axis] = count
        if draw.random() < 0.08:
            updates = updates[:1]
        types = [tensor(dtype, shape), tensor(other, updates), tensor(indices, updates)]
        lines.append(line(types, f"ops.{op}(x, y, z, axis={axis})"))
    for _ in range(60):
        op = f"scatter_nd_{draw.choice(REDUCTIONS)}"
        dtype = draw.choice(["f32", "bf16", "si32", "si64", "f32", "bool"])
        other = dtype if draw.random() < 0.85 else "f64"
        indices = draw.choice(["si64", "si32", "si64", "f32"])
        shape = [draw.choice([4, "a"]), draw.choice([5, "b"]), 2]
        depth = draw.choice([1, 2, 3])
        lead = draw.choice([[3], ["n"], ["n", 2]])
        types = [
            tensor(dtype, shape),
            tensor(other, [*lead, *shape[depth:]]),
            tensor(indices, [*lead, depth]),
        ]
        lines.append(line(types, f"ops.{op}(x, y, z)"))
    return lines


def selections(draw: Draw) -> list[str]:
    lines: list[str] = []
    for _ in range(50):
        dtype = draw.choice(["f32", "f64", "bf16", "si32", "ui8", "si64", "bool"])
        shape = draw.choice([[4, 5], ["a", 5], [7], [2, "b", 4], []])
        axis = draw.choice([0, -1, 1, 3])
        if draw.random() < 0.5:
            lines.append(line([tensor(dtype, shape)], f"ops.prod(x, {axis})"))
        else:
            k = draw.choice([1, 2, 4, 9, 0, -1])
            lines.append(line([tensor(dtype, shape)], f"ops.bottom_k(x, {k}, axis={axis})"))
    lines += [line("f32[4, 5]", "ops.prod(x)"), line("f32[4, 5]", "ops.bottom_k(x, 2)")]
    for dtype in ("f32", "f64", "f16", "bf16", "si32", "bool"):
        lines.append(line([tensor(dtype, ["a", 3])], "ops.ceil(x)"))
    return lines


def norms(draw: Draw) -> list[str]:
    lines: list[str] = []
    for _ in range(40):
        dtype = draw.choice(["f32", "f32", "bf16", "f16", "si32"])
        channels = draw.choice([6, 6, 4, 12])
        rest = draw.choice([[], [5], [4, 5], ["h", "w"], [2, 3, 4]])
        groups = draw.choice([1, 2, 3, 0, -1, 5])
        width = channels if draw.random() < 0.9 else 5
        vector = tensor("f32", [width])
        types = [tensor(dtype, [draw.choice([2, "n"]), channels, *rest]), vector, vector]
        lines.append(line(types, f"ops.group_norm(x, y, z, {groups}, 1e-5)"))
    lines.append(line("f32[6]; f32[6]; f32[6]", "ops.group_norm(x, y, z, 3, 1e-5)"))
    return lines


def resizes(draw: Draw) -> list[str]:
    lines: list[str] = []
    for _ in range(80):
        dtype = draw.choice(["f32", "f32", "bf16", "f64", "si32", "ui8"])
        shape = draw.choice([[1, 3, 4, 5], ["n", 3, "h", "w"], [4, 5], [7], [1, 2, 3, 4, 5]])
        size: list[object] = list(shape)
        for axis in draw.some(range(len(shape)), min(len(shape), 2)):
            size[axis] = draw.choice([1, 2, 7, 9])
        if draw.random() < 0.1:
            size = size[1:]
        op = draw.choice(["resize_linear", "resize_nearest", "resize_bicubic"])
        extra = ""
        if op != "resize_bicubic" and draw.random() < 0.7:
            extra = f", coordinate_transform_mode={draw.choice([0, 1, 2, 3, 4, -1])}"
        if op == "resize_nearest" and draw.random() < 0.5:
            extra += f", round_mode={draw.choice([0, 1, 2, 3, 4])}"
        if op == "resize_linear" and draw.random() < 0.3:
            extra += ", antialias=True"
        lines.append(line([tensor(dtype, shape)], f"ops.{op}(x, {size!r}{extra})"))
    return lines


def detections(draw: Draw) -> list[str]:
    lines: list[str] = []
    for _ in range(50):
        dtype = draw.choice(["f32", "f32", "f16", "si32"])
        image = draw.choice([[2, 8, 10, 3], ["n", "h", "w", "c"], [8, 10, 3]])
        rois = draw.choice([[7, 5], ["m", 5], [7, 4], [2, 7, 5]])
        extra = draw.some(
            ["spatial_scale=0.5", "sampling_ratio=2", "aligned=True", "mode='MAX'", "mode='avg'"],
            draw.choice([0, 1, 2]),
        )
        height = draw.choice([4, 1, 0])
        program = f"ops.roi_align({', '.join(['x', 'y', str(height), '6', *extra])})"
        lines.append(line([tensor(dtype, image), tensor(dtype, rois)], program))
    limits = "si64[]; f32[]"
    for _ in range(30):
        dtype = draw.choice(["f32", "f32", "f16", "si32"])
        boxes = draw.choice([["b", 9, 4], [2, 9, 4], [2, "n", 4], [2, 9, 5], [9, 4]])
        scores = draw.choice([[boxes[0], 3, boxes[1]], [boxes[0], "c", boxes[1]], [2, 3, 8]])
        types = f"{tensor(dtype, boxes)}; {tensor(dtype, scores)}; {limits}"
        extra = draw.choice(["", ", out_dim='m'", ", 7"])
        lines.append(line(types, f"ops.non_maximum_suppression(x, y, z, w, w{extra})"))
    lines.append(
        line("f32[2, 9, 4]; f32[2, 3, 9]", "ops.non_maximum_suppression(x, y, 5, 0.5, 0.1)")
    )
    return lines


def graph_forms(draw: Draw) -> list[str]:
    return [
        line("none", program)
        for program in (
            "Dim('a').substitute({'a': 3})",
            "(Dim('a') * 2 + 1).substitute({'a': Dim(3)})",
            "(Dim('a') * 2 + Dim('b')).substitute({'a': 'c'})",
            "Dim(3).substitute({})",
            "Dim('a').substitute({'b': 3})",
            "list(TensorType(f32, ['a', 3, Dim('b') * 2], CPU).parameters)",
            "list(BufferType(f32, [3], CPU).parameters)",
            "BufferType(f32, ['a', 3], CPU).cast(si8)",
            "ops.buffer_create(BufferType(f32, [2, 3], CPU), init_value=1.0)",
            "ops.buffer_create(BufferType(si32, [2, 3], CPU), 7)",
            "ops.constant_external('w', TensorType(f32, [2, 3], CPU), align=64)",
        )
    ]


def launches(draw: Draw) -> list[str]:
    """Shards, streams and functions for each launch."""
    lines: list[str] = []
    for _ in range(30):
        shape = draw.choice([[4, 6], [6], [3, 4, 2], ["a", 6]])
        other = shape if draw.random() < 0.9 else [*shape[:-1], 8]
        kind = "f32" if draw.random() < 0.9 else "si32"
        count, axis = draw.choice([1, 2, 2, 3, 4, 0]), draw.choice([0, -1, 1, 0, 5])
        types = [tensor("f32", shape), tensor(kind, other)]
        lines.append(line(types, f"ops.shard_and_stack([x, y], [CPU] * {count}, axis={axis})"))
    bodies = [
        "lambda a: a + a", "lambda a: ops.silu(a)", "lambda a: [a, a]", "lambda a: a > a", "lambda a: 3",
        "lambda a, b: a + b", "lambda a: []",
    ]  # fmt: skip
    for body in bodies:
        given = "[x, y]" if "b:" in body else "[x]"
        results = "[x.type] * 2" if "a, a]" in body and draw.random() < 0.5 else "[x.type]"
        lines.append(
            line(
                "f32[a, 4]; f32[a, 4]", f"ops.side_stream({given}, {body}, result_types={results})"
            )
        )
        bundles = "[[x, y]] * 2" if "b:" in body else "[[x, y]]"
        lines.append(
            line(
                "f32[a, 4]; f32[a, 4]",
                f"ops.parallel({bundles}, {body}, result_types=[[x.type, y.type]])",
            )
        )
    fixed = [
        "ops.shard_and_stack([], [CPU])", "ops.parallel([], lambda: [], result_types=[])",
        "ops.parallel([[x, y], [x]], lambda a, b: a, result_types=[[x.type, y.type]])",
        "ops.side_stream([x], lambda a: a, result_types=[x.type], stream_id=0)",
        "ops.side_stream([x], lambda a: a, result_types=[x.type], stream_id=-1)",
    ]  # fmt: skip
    return lines + [line("f32[a, 4]; f32[a, 4]", program) for program in fixed]


def kernels_of_layers(draw: Draw) -> list[str]:
    """Functions of `max.nn.kernels`, which are staged on the CPU too."""
    programs = {
        "f32[b, 70]; si32[b, 3]": ["apply_packed_bitmask(x, y)", "apply_packed_bitmask(x, y, -5.0)"],
        "bf16[b, 2, 70]; si32[b, 2, 3]": ["apply_packed_bitmask(x, y)"],
        "f32[b, 70]; si64[b, 3]": ["apply_packed_bitmask(x, y)"],
        "f32[70]; si32[3]": ["apply_packed_bitmask(x, y)"],
        "bf16[b, 2, 3]": ["row_mean_of_squares(x)"],
        "f16[4]": ["row_mean_of_squares(x)"],
        "f32[b, 3]; f32[b, 2]": ["row_mean_of_squares_qk(x, y)"],
        "f32[b, 3]; bf16[b, 2]": ["row_mean_of_squares_qk(x, y)"],
        "bf16[b, 3]; bf16[b, 2]; f32[b, 2]; f32[3]": ["apply_qk_rms_norm(x, y, z, w, z[0], 1e-6)"],
        "ui64[b, 3]": ["ceildiv(Dim(7), Dim(3))", "ceildiv(Dim('b'), Dim(3))"],
        "f32[5, 3]; f32[n, 3]; si64[n, 1]": ["scatter_nd_skip_oob_indices(x, y, z)"],
        "f32[n, 3]; f32[n, 3]; si64[1]": ["sliced_add(x, y, z)"],
        "f32[r, 7]; si64[r]": ["top_k_per_row(x, y, 3)", "top_k_per_row(x, y, 8)", "top_k_per_row(x, y, -1)"],
        "f32[r, 7]; si32[r]": ["top_k_per_row(x, y, 3)"],
        "bf16[12, 5]; ui32[12]; f32[4, 3]": ["moe_finalize(x, y, z, bf16)", "moe_finalize(x, y, z, f32)"],
        "f32[t, 16]; f32[16]": [
            "moe_router_group_limited(x, y, 16, 2, 4, 2, True, 2.0)",
            "moe_router_group_limited(x, y, 16, 2, 1, 1, False, 1.0)",
        ],
        "f32[t, 34]; f32[t, 34]; f32[34]": ["mtp_eh_norm(x, y, z, z, 1e-6)"],
        "f32[t, 34]; f32[u, 34]; f32[34]": ["mtp_eh_norm(x, y, z, z, 1e-6)"],
        "buffer f32[3, 4]; f32[3, 4]": ["inplace_memcpy(x, y)"],
        "buffer f32[3, 4]; f32[4, 4]": ["inplace_memcpy(x, y)"],
        "buffer f32[3, 4]; bf16[3, 4]": ["inplace_memcpy(x, y)"],
        "f32[t, 4, 8]; ui32[b1]; ui32[b]; f32[64, 8]": [
            "rope_ragged(x, y, z, w)", "rope_ragged(x, y, z, w, interleaved=False, output_dtype=bf16)",
        ],
        "f32[t, 4, 8]; f32[64, 8]; ui32[t]": ["rope_ragged_with_position_ids(x, y, z)"],
        "f32[t, 4, 8]; f32[64, 8]; si64[t]": ["rope_ragged_with_position_ids(x, y, z)"],
    }  # fmt: skip
    return [
        line(given, f"kernels.{program}")
        for given, listed in programs.items()
        for program in listed
    ]


def programs(seed: int) -> list[str]:
    draw = Draw(seed)
    parts = (
        scatters,
        selections,
        norms,
        resizes,
        detections,
        graph_forms,
        launches,
        kernels_of_layers,
    )
    return list(dict.fromkeys(text for part in parts for text in part(draw)))


FAMILY = family(programs)
