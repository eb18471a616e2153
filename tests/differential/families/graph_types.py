"""`Dim`, `Shape`, `TensorType`, `BufferType`, `DeviceRef` and what values say of themselves."""

from __future__ import annotations

from tests.differential.families._graph import Draw, family, line

DIMS = [
    "3",
    "0",
    "-1",
    "'a'",
    "Dim('a')",
    "Dim(4)",
    "np.int64(5)",
    "2.5",
    "None",
    "True",
    "'1x'",
    "''",
    "'a b'",
    "Dim('a') + 1",
    "10**20",
]
DIM_FORMS = [
    "Dim({0})", "Dim(Dim({0}))", "Dim({0}) == {1}", "Dim({0}) == Dim({1})", "Dim({0}) + {1}", "{0} + Dim({1})",
    "Dim({0}) - {1}",
    "{0} - Dim({1})", "Dim({0}) * {1}", "{0} * Dim({1})", "Dim({0}) // {1}", "{0} // Dim({1})", "-Dim({0})",
    "int(Dim({0}))",
    "hash(Dim({0})) == hash(Dim({0}))", "Dim({0}) < {1}", "Dim({0}) >= Dim({1})", "Dim({0}) / {1}", "Dim({0}) % {1}",
    "isinstance(Dim({0}), graph.StaticDim)", "isinstance(Dim({0}), graph.SymbolicDim)", "Dim({0}).dim", "Dim({0}).name",
    "bool(Dim({0}))", "list(range(Dim({0})))", "[10, 20, 30, 40, 50][Dim({0})]", "graph.StaticDim({0})",
    "graph.SymbolicDim({0})",
    "Dim({0}) ** 2", "Dim({0}) in [{1}]",
]  # fmt: skip
SHAPES = [
    "[]",
    "[2, 3]",
    "['a', 4]",
    "('a', 'b', 2)",
    "[-1, 2]",
    "[2, 0]",
    "3",
    "None",
    "'ab'",
    "[None]",
    "[2.0]",
    "Shape([1, 'a'])",
    "[Dim('a') * 2]",
    "range(3)",
]
SHAPE_FORMS = [
    "Shape({0})", "len(Shape({0}))", "Shape({0})[0]", "Shape({0})[-1]", "Shape({0})[7]", "Shape({0})[:1]",
    "Shape({0})[1:]",
    "Shape({0}).rank", "Shape({0}).static_dims", "Shape({0}).is_static", "Shape({0}) == {0}",
    "Shape({0}) == Shape({1})",
    "Shape({0}) + Shape({1})", "Shape({0}) + {1}", "[*Shape({0})]", "[int(d) for d in Shape({0})]",
    "hash(Shape({0})) is not None",
    "Shape({0}).symbolic_dims", "isinstance(Shape({0}), list)", "Shape({0}) * 2",
]  # fmt: skip
TYPE_FORMS = [
    "TensorType({t}, {s}, CPU)", "TensorType({t}, {s}, device=CPU)", "TensorType(dtype={t}, shape={s}, device=CPU)",
    "TensorType({t}, {s})",
    "TensorType({t}, {s}, CPU).rank", "TensorType({t}, {s}, CPU).shape", "TensorType({t}, {s}, CPU).dtype",
    "TensorType({t}, {s}, CPU).device",
    "TensorType({t}, {s}, CPU).num_elements()", "TensorType({t}, {s}, CPU) == TensorType({t}, {s}, CPU)",
    "TensorType({t}, {s}, CPU) == BufferType({t}, {s}, CPU)",
    "TensorType({t}, {s}, CPU).as_buffer()", "BufferType({t}, {s}, CPU)", "BufferType({t}, {s}, CPU).as_tensor()",
    "BufferType({t}, {s}, device=DeviceRef.GPU())",
    "TensorType({t}, {s}, 'cpu')", "TensorType({t}, {s}, None)", "hash(TensorType({t}, {s}, CPU)) is not None",
    "TensorType({s}, {t}, CPU)",
    "TensorType({t}, {s}, CPU).cast(f16)", "TensorType({t}, {s}, DeviceRef.CPU(1))",
    "TensorType({t}, {s}, CPU) in {{TensorType({t}, {s}, CPU)}}",
    "Graph('h', input_types=[TensorType({t}, {s}, CPU)]).inputs[0]",
    "Graph('h', input_types=[BufferType({t}, {s}, CPU)]).inputs[0]",
]  # fmt: skip
DEVICES = [
    "DeviceRef.CPU()", "DeviceRef.GPU()", "DeviceRef.CPU(1)", "DeviceRef.GPU(3)", "DeviceRef('cpu', 0)",
    "DeviceRef('gpu', 1)", "DeviceRef('tpu')",
    "DeviceRef('cpu')", "DeviceRef.CPU(-1)", "DeviceRef.CPU() == DeviceRef.CPU(0)",
    "DeviceRef.CPU() == DeviceRef.GPU()", "DeviceRef.CPU().is_cpu()",
    "DeviceRef.GPU().is_cpu()", "DeviceRef.GPU().is_gpu()", "DeviceRef.CPU().id", "str(DeviceRef.GPU(2))",
    "hash(DeviceRef.CPU()) == hash(DeviceRef.CPU(0))",
    "DeviceRef.CPU('x')", "DeviceRef.from_device(DeviceRef.GPU(1))", "DeviceRef.from_device('cpu')",
    "DeviceRef.CPU().device_type.value", "DeviceRef()",
]  # fmt: skip
VALUES = [
    "{v}.shape", "{v}.dtype", "{v}.device", "{v}.rank", "{v}.type", "{v}.shape[0]", "{v}.shape[-1]", "{v}.shape[5]",
    "len({v}.shape)", "{v}.shape == [2, 'a']",
    "{v}.tensor", "{v}.buffer", "{v}.opaque", "len({v})", "bool({v})", "iter({v})", "{v} == {v}",
    "hash({v}) is not None", "{v}.nothing", "{v} is {v}", "{v} in [{v}]",
    "TensorValue({v})", "TensorValue(3)", "TensorValue(2.5)", "TensorValue(Dim('a'))", "TensorValue(Dim(3))",
    "TensorValue({v}.shape)", "TensorValue('x')", "TensorValue(None)",
    "TensorValue(np.ones((2, 3), np.float32))", "TensorValue([1, 2])", "int({v})", "float({v})", "{v}.stype", "{v}.T",
    "{v}.argmax()", "{v}.max()", "{v}.min()", "{v}.sum()",
    "{v}.mean()", "{v}.stdev()", "{v}.var()",
]  # fmt: skip


def programs(seed: int) -> list[str]:
    draw = Draw(seed)
    found = []
    for form in DIM_FORMS:
        for first in DIMS:
            for second in draw.some(DIMS, 3 if "{1}" in form else 1):
                found.append(line("f32[a, b]", form.format(first, second)))
    for form in SHAPE_FORMS:
        for first in SHAPES:
            found.append(line("f32[a, b]", form.format(first, draw.choice(SHAPES))))
    for form in TYPE_FORMS:
        for shape in SHAPES:
            dtype = draw.choice(["f32", "bool", "si64", "bf16", "ui8"])
            found.append(line("f32[a, b]", form.format(t=dtype, s=shape)))
        for dtype in ("'float32'", "None", "np.float32", "3"):
            found.append(line("none", form.format(t=dtype, s="[2]")))
    found += [line("none", d) for d in DEVICES]
    for value in ("f32[2, a]", "si64[]", "bf16[1, 2, 3]", "buffer f32[2, a]", "buffer si32[]"):
        found += [line(value, form.format(v="x")) for form in VALUES]
    return found


FAMILY = family(programs)
