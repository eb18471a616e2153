# %% max.graph.ops.DeviceRef
from max.graph import DeviceRef

gpu_device = DeviceRef.GPU()
print(gpu_device)  # Outputs: gpu:0

## Create a CPU device with specific id
cpu_device = DeviceRef.CPU(id=1)
print(cpu_device)  # Outputs: cpu:1

# %% max.graph.ops.TensorType
from max.graph import TensorType
from max.dtype import DType

## Create a tensor type with float32 elements and static dimensions 2x3
tensor_type = TensorType(DType.float32, (2, 3))
print(tensor_type.dtype)  # Outputs: DType.float32
print(tensor_type.shape)  # Outputs: [2, 3]

# %% max.graph.ops.acos
def acos_graph():
    input_type = TensorType(dtype=DType.float32, shape=(3,), device=DeviceRef.CPU())

    with Graph("acos_graph", input_types=(input_type,)) as graph:
        x = graph.inputs[0]
        out = ops.acos(x)
        graph.output(out)
# check
    return graph
values = np.array([-1, 0.25, 1], np.float32)
np.testing.assert_allclose(run(acos_graph(), values), np.arccos(values), rtol=1e-5, atol=1e-6)

# %% max.graph.ops.cond
with Graph("cond", input_types=[TensorType(DType.bool, [], device=device)]) as graph:
    pred = graph.inputs[0]
    def then_fn():
        return ops.constant(1, DType.int32, device=DeviceRef.CPU())
    def else_fn():
        return ops.constant(0, DType.int32, device=DeviceRef.CPU())

    result = ops.cond(
        pred,
        [TensorType(DType.int32, [], device=device)],
        then_fn,
        else_fn
    )
    # check
    graph.output(*result)
assert run(graph, np.array(True)) == 1 and run(graph, np.array(False)) == 0

# %% max.graph.ops.cond
buffer_type = BufferType(DType.int32, [1], device=device)
with Graph("cond", input_types=[TensorType(DType.bool, [], device=device), buffer_type], custom_extensions=[counters]) as graph:
    pred, buffer = graph.inputs
    def then_fn():
        ops.inplace_custom("increment", device=buffer.device, values=[buffer])
    def else_fn():
        ops.inplace_custom("decrement", device=buffer.device, values=[buffer])

    ops.cond(pred, None, then_fn, else_fn)
    # check
    graph.output()
count = np.array([5], np.int32)
run(graph, np.array(True), count)
assert count == 6
run(graph, np.array(False), count)
assert count == 5

# %% max.graph.ops.gather_nd
input_shape = ["a", "b", "c", "d", "e"]
indices_shape = ["a", "f", 3]
input_type = TensorType(DType.bfloat16, input_shape)
indices_type = TensorType(DType.int32, indices_shape)
with Graph("gather_nd", input_types=[input_type, indices_type]) as graph:
    input, indices = graph.inputs
    gathered = ops.gather_nd(input, indices, batch_dims=1)
    print(gathered.type)
## Output: TensorType(dtype=DType.bfloat16, shape=["a", "f", "e"])
# check
assert gathered.type == TensorType(DType.bfloat16, ["a", "f", "e"])

# %% max.graph.ops.print
def add_tensors(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    input_type = TensorType(dtype=DType.float32, shape=(1,), device=DeviceRef.CPU())
    with Graph(
        "simple_add_graph", input_types=(input_type, input_type)
    ) as graph:
        lhs, rhs = graph.inputs
        out = ops.add(lhs, rhs)
        ops.print(out, label="addition_output")  # Pass the output tensor here

        graph.output(out)
        print("final graph:", graph)
# check
    return run(graph, a, b)
assert add_tensors(np.float32([1]), np.float32([2])) == 3

# %% max.graph.ops.repeat_interleave
from max.graph.ops import repeat_interleave
with Graph("repeat_interleave", input_types=[TensorType(DType.float32, (2, 2))]) as graph:
    x = graph.inputs[0]
    ## Input tensor with shape (2, 2)
    input = TensorValue(x)  # Contains [[1.0, 2.0], [3.0, 4.0]]

    ## Output tensor with shape (4, 2)
    output = repeat_interleave(input, repeats=2, axis=0)
    ## Contains [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0], [3.0, 4.0]]
    results = [output]

    ## Output tensor with shape (2, 4)
    output = repeat_interleave(input, repeats=2, axis=1)
    ## Contains [[1.0, 1.0, 2.0, 2.0], [3.0, 3.0, 4.0, 4.0]]
    results.append(output)

    repeat_value = TensorValue([2, 3])

    ## Output tensor with shape (5, 2)
    output = repeat_interleave(input, repeats=repeat_value, axis=0)
    ## Contains [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0], [3.0, 4.0], [3.0, 4.0]]
    results.append(output)

    ## Output tensor with shape (8,)
    output = repeat_interleave(input, repeats=2)  # axis = None
    ## Contains [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
    results.append(output)
    # check
    graph.output(*results)
data = np.array([[1, 2], [3, 4]], np.float32)
wanted = [data.repeat(2, 0), data.repeat(2, 1), data.repeat([2, 3], 0), data.repeat(2)]
for got, want in zip(run(graph, data), wanted):
    np.testing.assert_array_equal(got, want)

# %% max.graph.ops.shape_to_tensor
with Graph("stack") as graph:
    x = ops.constant(np.zeros((1,)), DType.int64, device=DeviceRef.CPU())
    result = ops.stack([
        x,
        ops.shape_to_tensor(x.shape),
    ])
    # check
    graph.output(result)
assert result.type == TensorType(DType.int64, [StaticDim(dim=2), StaticDim(dim=1)])
assert run(graph).tolist() == [[0], [1]]

# %% max.graph.ops.slice_tensor
from max.graph.ops import slice_tensor
with Graph("slices", input_types=[TensorType(DType.float32, ("n",)), TensorType(DType.float32, ("n", 3))]) as graph:
    x, y = graph.inputs
    ## Reverse a tensor.
    reverse = slice_tensor(x, [slice(None, None, -1)])
    ## Unsqueeze the second last dimension of a tensor.
    unsqueezed = slice_tensor(y, [..., None, slice(None)])
    # check
    graph.output(reverse, unsqueezed)
line, plane = rng.standard_normal(7).astype(np.float32), rng.standard_normal((7, 3)).astype(np.float32)
for got, want in zip(run(graph, line, plane), (line[::-1], plane[..., None, :])):
    np.testing.assert_array_equal(got, want)

# %% max.graph.ops.while_loop
from max.graph import Graph, ops
from max.dtype import DType

with Graph("while_loop_example") as g:
    x = ops.constant(0, dtype=DType.int32, device=DeviceRef.CPU())

    def pred(x):
        return x < 10

    def body(x):
        return x + 1

    result = ops.while_loop(x, pred, body)
    print(result)
    # check
    g.output(*result)
assert run(g) == 10

# %% max.graph.ops.while_loop
from max.graph import Graph, ops
from max.dtype import DType

with Graph("while_loop_example") as g:
    x = ops.constant(0, dtype=DType.int32, device=DeviceRef.CPU())
    y = ops.constant(5, dtype=DType.int32, device=DeviceRef.CPU())

    def pred(x, y):
        return ops.logical_and(x < 10, y < 15)

    def body(x, y):
        return [x + 1, y + 1]

    results = ops.while_loop((x, y), pred, body)
    print(results)
    # check
    g.output(*results)
assert [value.item() for value in run(g)] == [10, 15]
