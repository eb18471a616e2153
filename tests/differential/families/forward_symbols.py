"""New symbols in the shapes of results, over all ops that take a shape, a size or a name of one."""

from __future__ import annotations

from tests.differential.families._graph import Draw, family, line

#: Ops; ``<S>`` is a shape, ``<D>`` a dim.
OPS = (
    "ops.broadcast_to(ops.constant(1, f32, CPU), <S>)",
    "ops.constant(1, f32, CPU).broadcast_to(<S>)",
    "ops.broadcast_to(x, <S>)",
    "ops.tile(y, <S>)",
    "ops.random.set_seed(1); ops.random.uniform(TensorType(f32, <S>, CPU))",
    "ops.random.set_seed(1); ops.random.gaussian(TensorType(si64, <S>, CPU))",
    "ops.random.set_seed(1); ops.random.normal(TensorType(f32, <S>, CPU))",
    "ops.range(0, <D>, 1, dtype=si64, device=CPU)",
    "ops.range(0, 5, 1, <D>, dtype=si64, device=CPU)",
    "ops.shape_to_tensor(<S>)",
    "ops.buffer_create(BufferType(f32, <S>, CPU))",
    "ops.buffer_load(ops.buffer_create(BufferType(f32, <S>, CPU)))",
    "ops.rebind(x, [<D>])",
    "ops.nonzero(x, <D>)",
    "ops.masked_scatter(x, x > 0, x, <D>)",
    "x[(slice(1, None), <D>),]",
    "ops.repeat_interleave(x, ops.constant([2], si64, CPU), 0, <D>)",
    "ops.constant_external('w', TensorType(f32, <S>, CPU))",
    "ops.broadcast_to(x, ops.shape_to_tensor([3, 4]), [<D>, 4])",
    "ops.hann_window(<D>, CPU)",
)
#: Afterwards, in half of the programs: other ops on the result, and an op that binds the symbol.
AFTER = ("{} + 1", "[{}, ops.rebind(x, ['n'])]", "[{}, ops.nonzero(x, 'n')]")


def programs(seed: int) -> list[str]:
    draw = Draw(seed)
    lines: list[str] = []
    for op in OPS:
        for _ in range(12):
            rank = 2 if "tile" in op else draw.randint(1, 3)
            dims = [repr(d) for d in draw.shape(rank, (1, 3, "n", "n", "m", "new"))]
            shape = f"[{', '.join(draw.choice([d, f'Dim({d})']) for d in dims)}]"
            dim = draw.choice(["'n'", "'m'", "'new'", "Dim('n')", "3"])
            text = op.replace("<S>", shape).replace("<D>", dim)
            if ";" not in text and draw.random() < 0.4:
                text = draw.choice(AFTER).format(text)
            lines.append(line("f32[m]; f32[1, 3]", text))
    return list(dict.fromkeys(lines))


FAMILY = family(programs)
