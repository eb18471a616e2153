"""Programs on plain graphs: search, data frames, recurrences, training."""

from __future__ import annotations

import numpy as np

import max.graph as g
from max import driver, engine
from max.driver import CPU, Accelerator, Tensor, accelerator_count
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, Shape, TensorType, TensorValue, ops

rng = np.random.default_rng(3)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def cosine_search() -> None:
    """Finds the nearest rows of a corpus; graphs are functions given as ``forward``."""
    device = DeviceRef.CPU()

    def forward(query, corpus):
        def unit(x, axis=1):
            length = ops.sqrt(ops.sum(ops.mul(x, x), axis=axis))
            tiny = ops.constant(1e-8, DType.float32, device=DeviceRef.CPU())
            return ops.div(x, ops.add(length, tiny))

        return ops.matmul(unit(query), ops.transpose(unit(corpus), axis_1=0, axis_2=1))

    graph = g.Graph(
        name="search",
        forward=forward,
        input_types=[
            TensorType(DType.float32, [1, 24], device),
            TensorType(DType.float32, [50, 24], device),
        ],
    )
    model = InferenceSession(devices=[CPU()]).load(graph)
    query, corpus = normal(1, 24), normal(50, 24)
    result = model.execute(query, corpus)
    assert len(result) == 1 and tuple(result[0].shape) == (1, 50)
    want = (query @ corpus.T) / np.linalg.norm(query) / np.linalg.norm(corpus, axis=1)
    np.testing.assert_allclose(result[0].to_numpy(), want, rtol=1e-4, atol=1e-6)


def frame_of_columns() -> None:
    """Arithmetic and filters on a column that shares the caller's memory."""
    device = driver.Accelerator() if driver.accelerator_count() > 0 else driver.CPU()
    ref = DeviceRef.GPU(0) if isinstance(device, driver.Accelerator) else DeviceRef.CPU()
    column = np.frombuffer(normal(1000).tobytes(), dtype=np.float32)  # read-only, as Arrow's
    values = driver.Tensor.from_numpy(column.copy())
    if isinstance(device, driver.Accelerator):
        values = values.to(device)

    class Scaled:
        def __call__(self, x):
            five = ops.constant(5.0, dtype=DType.float32, device=ref)
            ten = ops.constant(10.0, dtype=DType.float32, device=ref)
            return ops.add(ops.mul(x, five), ten)

    class Kept:
        def __init__(self, threshold: float) -> None:
            self.threshold = threshold

        def __call__(self, x):
            threshold = ops.constant(self.threshold, dtype=DType.float32, device=ref)
            zero = ops.constant(0.0, dtype=DType.float32, device=ref)
            return ops.where(ops.greater(x, threshold), x, zero)

    session = engine.InferenceSession(devices=[device])
    types = [TensorType(DType.float32, values.shape, ref)]
    scaled = session.load(Graph("scaled", Scaled(), input_types=types)).execute(values)[0]
    kept = session.load(Graph("kept", Kept(0.5), input_types=types)).execute(values)[0]
    np.testing.assert_allclose(scaled.to(CPU()).to_numpy(), column * 5 + 10, rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(
        kept.copy(device=driver.CPU()).to_numpy(), np.where(column > 0.5, column, 0)
    )
    assert "cuda" not in str(values) or accelerator_count()


def frame_without_gaps() -> None:
    """Rows that pass a filter, counted and compacted by prefix sums."""
    ref = DeviceRef.CPU()
    dates = rng.integers(0, 100, 300).astype(np.int32)
    session = engine.InferenceSession(devices=[driver.CPU()])
    types = [TensorType(DType.int32, [300], ref)]

    class Mask:
        def __call__(self, x):
            return ops.greater_equal(ops.constant(60, dtype=DType.int32, device=ref), x)

    class Count:
        def __call__(self, mask):
            return ops.sum(ops.cast(mask, DType.int32))

    mask = session.load(Graph("mask", Mask(), input_types=types)).execute(Tensor.from_numpy(dates))[
        0
    ]
    assert mask.dtype == DType.bool
    counting = Graph("count", Count(), input_types=[TensorType(DType.bool, mask.shape, ref)])
    count = int(session.load(counting).execute(mask)[0].to_numpy()[0])
    assert count == int((dates <= 60).sum())

    class Places:
        def __call__(self, mask):
            return ops.cumsum(ops.cast(mask, DType.int32), axis=0, exclusive=True)

    places = Graph("places", Places(), input_types=[TensorType(DType.bool, [300], ref)])
    place = session.load(places).execute(mask)[0].to_numpy()
    rows = np.full(count, -1, np.int64)
    rows[place[dates <= 60]] = np.flatnonzero(dates <= 60)

    class Gathered:
        def __call__(self, x, rows):
            return ops.gather(x, rows, axis=0)

    gathering = Graph(
        "gathered", Gathered(), input_types=[*types, TensorType(DType.int64, [count], ref)]
    )
    got = session.load(gathering).execute(Tensor.from_numpy(dates), Tensor.from_numpy(rows))[0]
    np.testing.assert_array_equal(got.to_numpy(), dates[dates <= 60])


def group_totals() -> None:
    """Sums by group: products of one-hot rows with values."""
    ref = DeviceRef.CPU()
    keys, values = rng.integers(0, 5, 200).astype(np.int32), normal(200)

    def totals(keys, values):
        names = ops.range(0, 5, 1, dtype=DType.int32, device=ref)
        same = ops.equal(ops.unsqueeze(keys, 1), ops.unsqueeze(names, 0))
        return ops.matmul(ops.unsqueeze(values, 0), ops.cast(same, DType.float32))

    graph = Graph(
        "totals",
        totals,
        input_types=[
            TensorType(DType.int32, ["rows"], ref),
            TensorType(DType.float32, ["rows"], ref),
        ],
    )
    got = InferenceSession(devices=[CPU()]).load(graph).execute(keys, values)[0].to_numpy()
    want = np.bincount(keys, weights=values, minlength=5)
    np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-5)


def recurrence() -> None:
    """An Elman network unrolled over its steps, on ``DeviceRef("cpu")``."""
    device = DeviceRef("cpu")
    wx, wh, bias = normal(3, 8), normal(8, 8) * 0.3, normal(8)
    with Graph(
        "rnn", input_types=[TensorType(DType.float32, shape=[1, 6, 3], device=device)]
    ) as graph:
        x = graph.inputs[0].tensor
        state = ops.constant(np.zeros((1, 8), np.float32), dtype=DType.float32, device=device)
        wx_, wh_, bias_ = (
            ops.constant(w, dtype=DType.float32, device=device) for w in (wx, wh, bias)
        )
        for step in range(6):
            state = ops.tanh(ops.matmul(x[:, step, :], wx_) + ops.matmul(state, wh_) + bias_)
        graph.output(state)
    model = InferenceSession(devices=[CPU()]).load(graph)
    x = normal(1, 6, 3)
    state = np.zeros((1, 8), np.float32)
    for step in range(6):
        state = np.tanh(x[:, step] @ wx + state @ wh + bias)
    got = model.execute(Tensor.from_numpy(x).to(CPU()))[0].to_numpy()
    np.testing.assert_allclose(got, state, rtol=1e-4, atol=1e-5)


def training_in_place() -> None:
    """Gradient steps whose weights are buffers that the graph updates."""
    ref = DeviceRef.CPU()
    types = [
        TensorType(DType.float32, [16, 4], ref),
        TensorType(DType.float32, [16, 1], ref),
        BufferType(DType.float32, [4, 1], ref),
    ]
    with Graph("step", input_types=types) as graph:
        x, y, weight = graph.inputs
        x, y = x.tensor, y.tensor
        w = weight.buffer[...]
        error = ops.sub(ops.matmul(x, w), y)
        rate = ops.constant(0.02, dtype=DType.float32, device=ref)
        gradient = ops.matmul(ops.transpose(x, 0, 1), error)
        weight.buffer[...] = ops.sub(w, ops.mul(rate, gradient))
        graph.output(ops.mean(ops.pow(error, 2), axis=0))
    model = InferenceSession(devices=[CPU()]).load(graph)
    true = np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)
    x = normal(16, 4)
    weight = Tensor.from_numpy(np.zeros((4, 1), np.float32))
    losses = [
        float(
            model.execute(Tensor.from_numpy(x), Tensor.from_numpy(x @ true), weight)[0].to_numpy()[
                0, 0
            ]
        )
        for _ in range(200)
    ]
    assert losses[-1] < 1e-3 * losses[0]
    np.testing.assert_allclose(weight.to_numpy(), true, atol=0.1)


def state_space_pieces() -> None:
    """Selective state spaces: new axes, negative axes, splits by computed sizes."""
    ref = DeviceRef.CPU()

    def forward(x, a):
        batch, length, width = x.shape
        half = (width - 2) // 2
        gate, rest, tail = ops.split(x, [half, half, 2], axis=-1)
        decay = -ops.exp(ops.log(a))
        spread = decay[..., None].broadcast_to((a.shape[0], 3))
        steps = ops.cumsum(rest, axis=-2)
        mixed = ops.silu(gate) * steps[:, :length, :]
        first = x[:, 0, :][:, None, ...]
        return mixed, spread, first, tail.transpose(1, 2)

    types = [TensorType(DType.float32, (2, 5, 10), ref), TensorType(DType.float32, (4,), ref)]
    model = InferenceSession(devices=[CPU()]).load(Graph("mixer", forward, input_types=types))
    x, a = normal(2, 5, 10), np.abs(normal(4)) + 1
    mixed, spread, first, tail = (t.to_numpy() for t in model.execute(x, a))
    gate, rest = x[..., :4], x[..., 4:8]
    np.testing.assert_allclose(
        mixed, gate / (1 + np.exp(-gate)) * np.cumsum(rest, 1), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(spread, np.repeat(-a[:, None], 3, 1), rtol=1e-5)
    np.testing.assert_array_equal(first, x[:, :1])
    np.testing.assert_array_equal(tail, x[..., 8:].swapaxes(1, 2))


def eager_frontend() -> None:
    """The uses of the graph API by a library of eager arrays on top of it."""
    cpu = CPU()
    ref = DeviceRef.from_device(cpu)
    assert np.dtype(DType.to_numpy(DType.float32)) == np.float32
    scalar = Tensor.from_numpy(np.array(2.5, dtype=DType.to_numpy(DType.float32))).to(cpu)
    assert scalar.to_numpy() == 2.5 and tuple(scalar.shape) == ()

    with Graph("eager", input_types=[TensorType(DType.float32, (), ref)]) as graph:
        ops.random.set_seed(0)
        kind = TensorType(DType.float32, (4, 5), ref)
        drawn = ops.random.normal(kind, mean=1.0, std=0.5)
        flat = ops.random.uniform(kind, range=(2.0, 3.0))
        steps = ops.range(start=0, stop=6, step=2, dtype=DType.float32, device=ref)
        graph.output(drawn, flat, steps, ops.broadcast_to(graph.inputs[0].tensor, (2, 3)))
    drawn, flat, steps, wide = (
        t.to_numpy() for t in InferenceSession(devices=[cpu]).load(graph).execute(scalar)
    )
    assert drawn.shape == (4, 5) and abs(drawn.mean() - 1) < 0.5
    assert flat.min() >= 2 and flat.max() < 3
    assert steps.tolist() == [0, 2, 4] and (wide == 2.5).all()


def tracing_backend() -> None:
    """A backend that enters a graph explicitly, defines its own symbols, and returns dims."""
    import operator

    import max.graph.value
    from max.graph import KernelLibrary
    from max.graph import ops as max_ops

    types = [
        max.graph.value.TensorType(dtype=DType.float32, shape=["s0", 4], device=DeviceRef.CPU()),
        max.graph.value.TensorType(dtype=DType.float32, shape=[4, 3], device=DeviceRef.CPU()),
    ]
    graph = Graph("traced", input_types=types, kernel_library=KernelLibrary()).__enter__()
    try:
        x, w = graph.inputs
        rows = x.shape[0]
        assert isinstance(rows, max.graph.Dim)
        y = operator.matmul(x, w)
        y = operator.truediv(operator.add(y, 1), 2)
        low = max_ops.max(max_ops.min(y, 1.0), -1.0)
        top = max_ops.squeeze(max_ops.max(y, axis=1), axis=1)
        graph.output(low, top, rows)
    finally:
        graph.__exit__(None, None, None)
    x, w = normal(6, 4), normal(4, 3)
    low, top, rows = InferenceSession(devices=[CPU()]).load(graph).execute(x, w)
    want = (x @ w + 1) / 2
    np.testing.assert_allclose(low.to_numpy(), np.clip(want, -1, 1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(top.to_numpy(), want.max(1), rtol=1e-5, atol=1e-6)
    assert int(rows.to_numpy()) == 6


def image_pipeline() -> None:
    """A filter chain as a context manager around a graph."""

    class Pipeline:
        def __init__(self, name: str, shape: Shape, dtype: DType, device: driver.Device) -> None:
            self.dtype, self.device = dtype, device
            kind = TensorType(DType.uint8, shape=shape, device=DeviceRef.from_device(device))
            self.graph = Graph(name, input_types=[kind])

        def __enter__(self):
            self.graph = self.graph.__enter__()
            self.image = ops.cast(self.graph.inputs[0].tensor, self.dtype) / 255.0
            return self

        def __exit__(self, *exc) -> None:
            if hasattr(self, "result"):
                self.graph.output(ops.cast(ops.round(self.result * 255.0), DType.uint8))
            self.graph.__exit__(*exc)

        def __call__(self, image: Tensor) -> Tensor:
            model = InferenceSession(devices=[self.device]).load(self.graph)
            return model.execute(image)[0]

    def luminance(image: TensorValue) -> TensorValue:
        dims = image.shape.static_dims
        dims[-1] = 1
        parts = ops.constant(
            np.array([0.25, 0.5, 0.25], np.float32), dtype=image.dtype, device=image.device
        )
        gray = ops.sum(image * parts, axis=-1)
        assert gray.shape == Shape(dims)
        return gray

    def threshold(image: TensorValue, value: float) -> TensorValue:
        limit = ops.constant(value, dtype=image.dtype, device=image.device)
        return ops.cast(ops.greater(image, limit), image.dtype)

    device = CPU() if accelerator_count() == 0 else Accelerator()
    with Pipeline("threshold", Shape([7, 9, 3]), DType.float32, device) as pipeline:
        gray = threshold(luminance(pipeline.image), 0.5)
        pipeline.result = gray.broadcast_to(Shape([7, 9, 3]))
    image = rng.integers(0, 256, (7, 9, 3)).astype(np.uint8)
    got = pipeline(Tensor.from_numpy(image).to(device)).to(CPU()).to_numpy()
    want = (image / np.float32(255) @ np.array([0.25, 0.5, 0.25], np.float32)) > 0.5
    np.testing.assert_array_equal(got, np.repeat(want[..., None] * 255, 3, -1))


def lazy_arrays() -> None:
    """Lazy arrays that stage a graph when a value is read, and cache compiled models by their expression."""
    models: dict[str, object] = {}

    class Array:
        def __init__(self, shape, dtype=DType.float32, device=None, data=None) -> None:
            self.shape, self.dtype, self.device = shape, dtype, device or CPU()
            self.data, self.args, self.rule, self.value = data, (), None, None

        @classmethod
        def of(cls, data: Tensor) -> Array:
            return cls(data.shape, data.dtype, data.device, data)

        def numpy(self) -> np.ndarray:
            realize(self)
            return self.data.to(CPU()).to_numpy()

    def node(rule, shape, *args) -> Array:
        made = Array(shape, args[0].dtype)
        made.rule, made.args = rule, args
        return made

    def realize(output: Array) -> None:
        if output.data is not None:
            return
        trace: list[Array] = []

        def visit(array: Array) -> None:
            for arg in array.args if array.data is None else ():
                visit(arg)
            if array not in trace:
                trace.append(array)

        visit(output)
        leaves = [array for array in trace if array.data is not None]
        key = "-".join(f"{a.shape}{a.dtype}{a.rule and a.rule.__name__}" for a in trace)
        if key not in models:
            types = [
                TensorType(dtype=a.dtype, shape=a.shape, device=DeviceRef.from_device(a.device))
                for a in leaves
            ]
            devices = []
            for array in leaves:
                if array.device not in devices:
                    devices.append(array.device)
            with Graph("lazy", input_types=types) as graph:
                for array, value in zip(leaves, graph.inputs, strict=True):
                    array.value = value
                for array in trace:
                    if array.data is None:
                        array.value = array.rule(*(arg.value for arg in array.args))
                graph.output(output.value)
            models[key] = InferenceSession(devices=devices).load(graph)
        output.data = models[key].execute(*(array.data for array in leaves))[0]

    def multiply(x, y):
        return x * y

    empty = Tensor(DType.float32, (3, 4), device=CPU())
    assert tuple(empty.shape) == (3, 4) and empty.dtype == DType.float32
    for _ in range(2):
        a, b = normal(3, 3), normal(3, 3)
        x, y = Array.of(Tensor.from_numpy(a)), Array.of(Tensor.from_numpy(b))
        product = node(multiply, (3, 3), x, y)
        for _ in range(5):
            product = node(ops.matmul, (3, 3), product, y)
        want = a * b
        for _ in range(5):
            want = want @ b
        np.testing.assert_allclose(product.numpy(), want, rtol=1e-3, atol=1e-3)
    assert len(models) == 1


PROGRAMS = [
    cosine_search, frame_of_columns, frame_without_gaps, group_totals, recurrence,
    training_in_place, state_space_pieces, eager_frontend, tracing_backend, image_pipeline,
    lazy_arrays,
]  # fmt: skip
