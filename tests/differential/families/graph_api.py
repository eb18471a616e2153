"""`Graph`, `Weight`, control flow, calls, custom ops, external constants, subgraphs."""

from __future__ import annotations

from tests.differential.families._graph import Draw, family, line

T = "TensorType(f32, [2], CPU)"
GRAPHS = [
    "Graph('h')", "Graph()", "Graph('')", "Graph(3)", "Graph(None)", "Graph('h', input_types=[])",
    "Graph('h', input_types=None)", f"Graph('h', input_types=[{T}])", f"Graph('h', input_types=({T},))",
    f"Graph('h', input_types={T})",
    f"Graph('h', lambda x: x, [{T}])", f"Graph('h', lambda x: x + 1, input_types=[{T}]).output_types",
    f"Graph('h', forward=lambda x: (x, x), input_types=[{T}]).output_types", f"Graph('h', lambda: 1, [{T}])",
    f"Graph('h', lambda x: None, [{T}])", f"Graph('h', lambda x: 'a', [{T}])", f"Graph('h', lambda x: 1.0, [{T}])",
    f"Graph('h', None, [{T}]).inputs", "Graph('h').inputs", "Graph('h').output_types", "Graph('h').name",
    "Graph('h', [3])", "Graph('h', input_types=[f32])", "Graph('h', input_types=[None])",
    "Graph('h', input_types=['a'])", "Graph('h', path='/nowhere/graph.mo')", "Graph(path='/nowhere/graph.mo')",
    f"Graph('h', input_types=[{T}], output_types=[{T}])",
    f"Graph('h', lambda x: x, input_types=[{T}], output_types=[{T}])", "Graph('h', 3, [])",
    "Graph('h', is_subgraph=True)", "Graph('h', unknown=3)", "Graph('h', custom_extensions=[])",
    "Graph('h', custom_extensions=['/nowhere'])", "Graph('h', kernel_library=None)",
    "Graph('h', custom_extensions=None)",
    "Graph.current is g", "g.inputs", "g.inputs[0]", "len(g.inputs)", "g.name", "repr(g) != ''", "g.output()",
    "g.output(x); 1", "g.output(x, y); 1", "g.output([x]); 1", "g.output(None); 1", "g.output(1); 1",
    "g.output(x.shape[0]); 1", "g.output('a'); 1", "g.output(x); g.output(x)", "g.output(x); x + 1",
    "g.output(np.ones(2)); 1", "g.output(x.shape); 1", "g.output((x, y)); 1", "g.output(z); 1",
    "g.output(x, x); g.output_types",
    "g.output_types", "g.kernel_libraries_paths", "g.unknown", "h = Graph('h'); h.output(x)",
    f"h = Graph('h', input_types=[{T}]); x + h.inputs[0]",
    f"h = Graph('h', input_types=[{T}]); h.__enter__(); r = x + h.inputs[0]", "g.__enter__()",
    f"h = Graph('h', input_types=[{T}])\nwith h: h.output(h.inputs[0] + 1)\nh.output_types",
    f"h = Graph('h', input_types=[{T}])\nwith h: h.output(x)\n1",
    f"h = Graph('h', input_types=[{T}])\nwith h: pass\n1", "g.always_ready_chain",
]  # fmt: skip
WEIGHTS = [
    "Weight('w', f32, [2, 3], CPU)", "Weight('w', f32, [2, 3])", "Weight('w', f32, shape=[2, 'a'], device=CPU)",
    "Weight(name='w', dtype=f32, shape=[2], device=CPU)", "Weight('w', 'f32', [2], CPU)", "Weight('w')",
    "Weight('', f32, [2], CPU)", "Weight(3, f32, [2], CPU)", "Weight('w', f32, 3, CPU)",
    "Weight('w', f32, None, CPU)", "Weight('w', f32, [], CPU)", "Weight('w', f32, [-1], CPU)",
    "Weight('w', f32, [0], CPU)", "Weight('w', f32, [2], GPU)", "Weight('w', f32, [2], None)",
    "Weight('w', f32, [2], 'cpu')", "Weight('w', f32, [2.0], CPU)",
    "Weight('w', f32, [2], CPU, align=16)", "Weight('w', f32, [2], CPU, align=-1)",
    "Weight('w', f32, [2], CPU, quantization_encoding=None)", "Weight('w', f32, [2], CPU).shape",
    "Weight('w', f32, [2, 3], CPU).dtype", "Weight('w', f32, [2], CPU).device", "Weight('w', f32, [2], CPU).name",
    "Weight('w', f32, [2], CPU).rank", "Weight('w', f32, [2], CPU).type",
    "Weight('w', f32, [2], CPU).quantization_encoding", "Weight('w', f32, [2], CPU).align",
    "Weight('w', f32, [2], CPU).T", "Weight('w', f32, [2, 3], CPU).T", "Weight('w', f32, [2, 3], CPU)[0]",
    "Weight('w', f32, [2], CPU).shape_id", "Weight('w', f32, [2], CPU).original_dtype_and_shape",
    "Weight('w', f32, [2], CPU) + 1", "Weight('w', f32, [2], CPU) + x", "x * Weight('w', f32, [2], CPU)",
    "ops.add(Weight('w', f32, [2], CPU), x)", "Weight('w', f32, [2, 3], CPU) @ Weight('v', f32, [3, 2], CPU)",
    "w = Weight('w', f32, [2], CPU); w + w", "w = Weight('w', f32, [2], CPU); v = Weight('w', f32, [2], CPU); w + v",
    "w = Weight('w', f32, [2], CPU); v = Weight('w', f32, [3], CPU); (w + 1, v + 1)",
    "w = Weight('w', f32, [2], CPU); v = Weight('w', f16, [2], CPU); (w + 1, v + 1)",
    "g.add_weight(Weight('w', f32, [2], CPU))",
    "g.add_weight(Weight('w', f32, [2], CPU), force_initial_weight_on_host=False)",
    "g.add_weight(Weight('w', f32, [2], GPU))", "g.add_weight('w')", "g.add_weight(None)",
    "w = Weight('w', f32, [2], CPU); (g.add_weight(w), g.add_weight(w))",
    "(g.add_weight(Weight('w', f32, [2], CPU)), g.add_weight(Weight('w', f32, [2], CPU)))",
    "(g.add_weight(Weight('w', f32, [2], CPU)), g.add_weight(Weight('w', f32, [3], CPU)))", "g.add_weight(x)",
    "w = Weight('w', f32, [4, 2], CPU); w.shard(0, CPU)", "Weight('w', f32, [4, 2], CPU).sharding_strategy",
    "w = Weight('w', f32, [4, 2], CPU); w.shard([CPU, CPU])",
    "w = Weight('w', f32, [4, 2], CPU); w.sharding_strategy = graph.ShardingStrategy.rowwise(2); [s.shape for s in "
    "w.shard([CPU, DeviceRef.CPU(1)])]",
    "w = Weight('w', f32, [4, 2], CPU); w.sharding_strategy = graph.ShardingStrategy.columnwise(2); [s.shape for s in "
    "w.shard([CPU, DeviceRef.CPU(1)])]",
    "w = Weight('w', f32, [5, 2], CPU); w.sharding_strategy = graph.ShardingStrategy.rowwise(2); [s.shape for s in "
    "w.shard([CPU, DeviceRef.CPU(1)])]",
    "w = Weight('w', f32, [4, 2], CPU); w.sharding_strategy = graph.ShardingStrategy.replicate(2); [s.shape for s in "
    "w.shard([CPU, DeviceRef.CPU(1)])]",
    "w = Weight('w', f32, [4, 2], CPU); w.sharding_strategy = graph.ShardingStrategy.rowwise(2); [s.shape for s in "
    "w.shard([CPU])]",
    "ops.constant_external('w', TensorType(f32, [2], CPU))", "ops.constant_external('w', x.type)",
    "ops.constant_external('', x.type)", "ops.constant_external('w', z.type)", "ops.constant_external('w', f32)",
    "ops.constant_external('w')", "ops.constant_external(3, x.type)", "ops.constant_external(name='w', type=x.type)",
    "(ops.constant_external('w', x.type), ops.constant_external('w', x.type))",
    "(ops.constant_external('w', x.type), ops.constant_external('w', y.type))",
    "ops.constant_external('w', TensorType(f32, ['a'], CPU))", "ops.constant_external('w', TensorType(f32, [2], GPU))",
]  # fmt: skip
BRANCHES = [
    ("[T]", "lambda: x", "lambda: x + 1"), ("[T]", "lambda: [x]", "lambda: [x + 1]"),
    ("[T, T]", "lambda: (x, x)", "lambda: (x, x + 1)"), ("None", "lambda: None", "lambda: None"),
    ("[T]", "lambda: x", "lambda: None"), ("[T]", "lambda: x", "lambda: y"), ("None", "lambda: x", "lambda: x"),
    ("[]", "lambda: None", "lambda: None"), ("[]", "lambda: []", "lambda: []"),
    ("[T]", "lambda: x.cast(f16)", "lambda: x"), ("[T]", "lambda: 1.0", "lambda: x"),
    ("[T]", "lambda: x.shape", "lambda: x"), ("[T, T]", "lambda: x", "lambda: x"), ("[T]", "x", "x"),
    ("[T]", "None", "None"), ("T", "lambda: x", "lambda: x"), ("[f32]", "lambda: x", "lambda: x"),
    ("[T]", "lambda v: v", "lambda v: v"),
    ("[T]", "lambda: Weight('w', f32, [2], CPU) + x", "lambda: Weight('w', f32, [2], CPU) * x"),
    ("[T]", "lambda: g.add_weight(Weight('w', f32, [2], CPU))", "lambda: x"),
    ("None", "lambda: z.__setitem__(0, x[0])", "lambda: None"),
    ("[T]", "lambda: ops.cond(w, [T], lambda: x, lambda: x)[0]", "lambda: x"),
    ("[TensorType(f32, ['a'], CPU)]", "lambda: x", "lambda: x"), ("[T]", "lambda: [x, x]", "lambda: [x]"),
]  # fmt: skip
LOOPS = [
    ("x", "lambda v: v[0] < 3", "lambda v: v + 1"), ("[x]", "lambda v: v[0] < 3", "lambda v: [v + 1]"),
    ("(x, x)", "lambda a, b: a[0] < 3", "lambda a, b: (b, a)"), ("[]", "lambda: True", "lambda: []"),
    ("x", "lambda v: v < 3", "lambda v: v"), ("x", "lambda v: v[0]", "lambda v: v"),
    ("x", "lambda v: True", "lambda v: v"), ("x", "lambda v: v[0] < 3", "lambda v: v.cast(f16)"),
    ("x", "lambda v: v[0] < 3", "lambda v: [v, v]"), ("x", "lambda v: v[0] < 3", "lambda v: None"),
    ("x", "lambda v: v[0] < 3", "lambda v: 1.0"), ("x", "lambda: True", "lambda v: v"),
    ("x", "lambda v: v[0] < 3", "lambda v, u: v"), ("z", "lambda v: w", "lambda v: v"),
    ("3", "lambda v: v < 3", "lambda v: v + 1"), ("None", "lambda v: w", "lambda v: v"),
    ("y", "lambda v: w", "lambda v: ops.concat([v, v])"),
    ("x", "lambda v: v[0] < 3", "lambda v: ops.reshape(v, [1, 2])"), ("x", "None", "lambda v: v"),
    ("x", "lambda v: w", "lambda v: v + x"), ("[x, 1]", "lambda a, b: w", "lambda a, b: (a, b)"),
    ("x", "lambda v: [v[0] < 3]", "lambda v: v"), ("x.shape[0]", "lambda v: w", "lambda v: v"),
]  # fmt: skip
CALLS = [
    "h = Graph('h', lambda v: v + 1, [T]); ops.call(h, x)", "ops.call(g.add_subgraph('h', lambda v: v + 1, [T]), x)",
    "ops.call(g.add_subgraph('h', lambda v: (v, v), [T]), x)",
    "ops.call(g.add_subgraph('h', lambda v: v + 1, input_types=[T]), y)",
    "ops.call(g.add_subgraph('h', lambda v: v + 1, [T]))",
    "ops.call(g.add_subgraph('h', lambda v: v + 1, [T]), x, x)",
    "ops.call(g.add_subgraph('h', lambda v: v + 1, [T]), 1.0)",
    "ops.call(g.add_subgraph('h', lambda v: v + 1, [T]), x, prefix='p.')",
    "ops.call(g.add_subgraph('h', lambda v: v + Weight('w', f32, [2], CPU), [T]), x, prefix='p.')",
    "ops.call(None, x)", "ops.call('h', x)", "ops.call(g, x)", "g.add_subgraph('h')",
    "g.add_subgraph('h', input_types=[T])",
    "(g.add_subgraph('h', lambda v: v, [T]), g.add_subgraph('h', lambda v: v, [T]))",
    "g.add_subgraph(3, lambda v: v, [T])",
    "ops.call(g.add_subgraph('h', lambda v: v + Weight('w', f32, [2], CPU, _placeholder=True), [T]), x, prefix='p.')",
    "ops.call(g.add_subgraph('h', lambda v: v + 1, [TensorType(f32, ['k'], CPU)]), x)",
    "ops.call(g.add_subgraph('h', lambda v: v + 1, [TensorType(f32, ['a'], CPU)]), y)",
    "ops.call(g.add_subgraph('h', lambda v: v[0], [TensorType(f32, ['k'], CPU)]), y)",
    "ops.call(g.add_subgraph('h', lambda v: v + x, [T]), x)",
    "ops.custom('no_such_op', CPU, [x], [x.type])", "ops.custom('no_such_op', CPU, [], [x.type])",
    "ops.custom(name='no_such_op', values=[x], out_types=[x.type], device=CPU)",
    "ops.custom('no_such_op', [x], [x.type])", "ops.custom('', CPU, [x], [x.type])",
    "ops.custom(3, CPU, [x], [x.type])", "ops.custom('no_such_op', CPU, [x], [])",
    "ops.custom('no_such_op', CPU, [z], [x.type])", "ops.inplace_custom('no_such_op', CPU, [z])",
    "ops.inplace_custom('no_such_op', CPU, [x])", "ops.custom('no_such_op', CPU, [x], [x.type], parameters={'k': 1})",
    "ops.custom('no_such_op', CPU, [x], [x.type], parameters={'k': [1]})",
    "ops.custom('no_such_op', CPU, [x], [f32])", "ops.custom('no_such_op', CPU, [1.0], [x.type])",
    "ops.custom('no_such_op', None, [x], [x.type])",
    "ops.allgather([x], [])", "ops.allgather([], [])", "ops.allgather([x, x], [z, z])",
    "ops.dequantize(graph.quantization.QuantizationEncoding.Q4_0, x)",
    "ops.dequantize(graph.quantization.QuantizationEncoding.Q4_0, ops.constant(np.zeros((2, 18), np.uint8), ui8, CPU))",
    "ops.dequantize(graph.quantization.QuantizationEncoding.Q4_K, ops.constant(np.zeros((2, 144), np.uint8), ui8, "
    "CPU))",
    "ops.dequantize(graph.quantization.QuantizationEncoding.Q5_K, ops.constant(np.zeros((2, 176), np.uint8), ui8, "
    "CPU))",
    "ops.dequantize(graph.quantization.QuantizationEncoding.Q6_K, ops.constant(np.zeros((2, 210), np.uint8), ui8, "
    "CPU))",
    "ops.dequantize(graph.quantization.QuantizationEncoding.Q4_0, ops.constant(np.zeros((2, 17), np.uint8), ui8, CPU))",
    "ops.dequantize('Q4_0', x)",
    "ops.qmatmul(graph.quantization.QuantizationEncoding.Q4_0, None, ops.constant(np.zeros((3, 32), np.float32), f32, "
    "CPU), ops.constant(np.zeros((2, 18), np.uint8), ui8, CPU))",
    "ops.qmatmul(graph.quantization.QuantizationEncoding.Q4_0, None, x, x)",
    "ops.qmatmul(graph.quantization.QuantizationEncoding.Q4_0, None, ops.constant(np.zeros((3, 64), np.float32), f32, "
    "CPU), ops.constant(np.zeros((2, 18), np.uint8), ui8, CPU))",
    "ops.qmatmul(graph.quantization.QuantizationEncoding.Q4_K, None, ops.constant(np.zeros((3, 256), np.float32), f32, "
    "CPU), ops.constant(np.zeros((2, 144), np.uint8), ui8, CPU))",
    "ops.qmatmul('Q4_0', None, x, x)", "[e.name for e in graph.quantization.QuantizationEncoding]",
    "graph.quantization.QuantizationEncoding.Q4_0.block_size",
    "graph.quantization.QuantizationEncoding.Q4_K.elements_per_block",
    "graph.quantization.QuantizationEncoding.Q4_0.is_gguf", "graph.quantization.QuantizationEncoding.GPTQ.is_gguf",
    "graph.quantization.QuantizationEncoding('x')", "graph.quantization.QuantizationEncoding.Q4_0.value",
]  # fmt: skip
GIVEN = "f32[2]; f32[a]; buffer f32[2]; bool[]"


def programs(seed: int) -> list[str]:
    draw = Draw(seed)
    found = [line(GIVEN, p) for p in (*GRAPHS, *WEIGHTS)]
    for types, yes, no in BRANCHES:
        for form in (
            "ops.cond(w, {0}, {1}, {2})",
            "ops.cond(pred=w, out_types={0}, then_fn={1}, else_fn={2})",
        ):
            found.append(line(GIVEN, f"T = {T}; " + form.format(types, yes, no)))
    for predicate in (
        "x",
        "x[0] > 0",
        "True",
        "1",
        "None",
        "w.cast(si32)",
        "w.reshape([1])",
        "z",
        "Dim(1)",
    ):
        found.append(line(GIVEN, f"ops.cond({predicate}, [{T}], lambda: x, lambda: x)"))
    for start, test, body in LOOPS:
        found.append(line(GIVEN, f"ops.while_loop({start}, {test}, {body})"))
        if draw.random() < 0.4:
            found.append(
                line(
                    GIVEN, f"ops.while_loop(initial_values={start}, predicate={test}, body={body})"
                )
            )
    found += [line(GIVEN, f"T = {T}; {p}") for p in CALLS]
    return found


FAMILY = family(programs)
