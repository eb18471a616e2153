"""Exported programs as graphs: symbols, shared weights, changed buffers, reports of what is not supported."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

torch = pytest.importorskip("torch")

from torch.export import Dim, export  # noqa: E402

import max.torch  # noqa: E402
from max import _interpreter  # noqa: E402
from max.engine import InferenceSession  # noqa: E402
from max.importers.errors import UnsupportedOpsError  # noqa: E402


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def agree(function, inputs, dynamic=None, others=()):
    """Engine and interpreter give torch's results, for the example's inputs and other ones."""
    module = function if isinstance(function, torch.nn.Module) else Function(function)
    specs = None if dynamic is None else (dynamic,)
    if dynamic is not None and isinstance(function, torch.nn.Module):
        specs = dynamic
    with torch.no_grad():
        graph = max.torch.from_exported(export(module.eval(), inputs, dynamic_shapes=specs))
        model = InferenceSession().load(graph)
        for values in (inputs, *others):
            expected = module(*values)
            expected = expected if isinstance(expected, tuple) else (expected,)
            arrays = [value.numpy() for value in values]
            compiled = [result.to_numpy() for result in model.execute(*arrays)]
            for results in (compiled, _interpreter.run(graph, arrays)):
                assert len(results) == len(expected)
                for got, want in zip(results, expected, strict=True):
                    want = torch.as_tensor(want).numpy()
                    assert np.shape(got) == want.shape
                    np.testing.assert_allclose(got, want, 1e-4, 1e-5)
    return graph


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.linear = torch.nn.Linear(8, 5)

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        y = y + self.attention(y, y, y, need_weights=False)[0]
        return self.linear(y.mean(1)).softmax(-1)


def test_net_of_any_batch_and_height():
    inputs = [(torch.rand(b, 3, h, 6),) for b, h in ((2, 7), (3, 5), (5, 9))]
    dynamic = {"x": {0: Dim("batch"), 2: Dim("height")}}
    agree(Net(), inputs[0], dynamic, inputs[1:])


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(64, 192)

    def forward(self, x, *mask):
        heads = [
            part.reshape(*x.shape[:2], 4, 16).transpose(1, 2)
            for part in self.project(x).chunk(3, -1)
        ]
        y = torch.nn.functional.scaled_dot_product_attention(*heads, *mask)
        return y.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_attention_is_one_launch(kind):
    """Also where rows whose keys are all masked give 0."""
    inputs = [torch.randn(2, 20, 64)]
    if kind != "none":
        mask = torch.rand(20, 20) > 0.5
        mask[3] = False
        inputs.append(mask if kind == "bool" else torch.where(mask, 0.0, -torch.inf))
    model = InferenceSession().load(agree(Attention(), tuple(inputs)))
    with model.profile() as profile:
        model.execute(*[value.numpy() for value in inputs])
    kernels = [kernel["name"] for kernel in profile.to_dict()["kernels"]]
    assert sum(name.startswith("attention") for name in kernels) == 1, kernels
    assert not any("softmax" in name for name in kernels), kernels


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x[: y.shape[0]] * x.shape[0],
        lambda x, y: x.reshape(x.shape[0] * 3 // 3, -1).sum(-1) + y.sum(),
        lambda x, y: torch.cat([x, x[1:], -x]).repeat(2, 1),
        lambda x, y: torch.arange(x.shape[0] + 2) + x.shape[0] * 2 - 1,
        lambda x, y: torch.full((x.shape[0], y.shape[0]), 2.0) + y,
        lambda x, y: (x.unsqueeze(0).expand(y.shape[0], -1, -1).mean(0), x.shape[0]),
        lambda x, y: x[-2:] + x[x.shape[0] - 1],
        lambda x, y: (x @ x.T).tril(1) + torch.ones(x.shape[0]),
        lambda x, y: x[y.to(torch.int64) % x.shape[0]],
    ],
)
def test_arithmetic_of_sizes(function):
    inputs = [(torch.rand(n, 4), torch.rand(m)) for n, m in ((5, 4), (7, 6), (9, 3))]
    batch, length = Dim("n", min=4), Dim("m", min=3)
    agree(function, inputs[0], ({0: batch}, {0: length}), inputs[1:])


def test_mask_whose_count_a_run_knows():
    agree(lambda x: x[x > 0.5].sum(), (torch.rand(4, 5),))


def chosen(x):
    """Sorts and picks of the rows whose first element is positive, of which only a run knows the number."""
    rows = x[x[:, 0] > 0]
    scores = rows[:, 1]
    order = torch.sort(scores, stable=True, descending=True)
    picks = torch.topk(scores, min(4, scores.shape[0]))
    low = torch.topk(rows[:, :2], 2, dim=0, largest=False)
    return (*order, *picks, *low, torch.sort(rows, dim=0)[0], torch.sort(rows, dim=1)[1])


def test_sorts_and_picks_of_a_size_that_a_run_knows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, generator=generator)
    inputs = [(x[:n].clone(),) for n in (30, 9, 5)]
    # torch says nothing of the order of equal elements, so that there are none; 4 and 2 rows at least
    inputs[1][0][:4, 0] = torch.tensor([1.5, 1.25, 2.5, 0.5])
    inputs[2][0][:, 0] = torch.tensor([1.0, 1.5, -1.0, -2.0, -3.0])
    agree(chosen, inputs[0], ({0: Dim("n", min=3, max=99)},), inputs[1:])


def test_a_pick_of_more_than_there_are_is_an_error():
    module = Function(lambda x: torch.topk(x[x > 0], 3)[0])
    x = torch.tensor([1.0, 2.0, -1.0, 4.0])
    model = InferenceSession().load(max.torch.from_exported(export(module, (x,))))
    np.testing.assert_array_equal(model.execute(x.numpy())[0].to_numpy(), [4.0, 2.0, 1.0])
    with pytest.raises(ValueError, match="3"):
        model.execute(-x.numpy())


def test_weights_share_the_memory_of_the_program():
    module = torch.nn.Linear(300, 200)
    program = export(module, (torch.rand(2, 300),))
    before = module.weight.detach().clone()
    graph = max.torch.from_exported(program)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.zero_()
    x = np.ones((2, 300), np.float32)
    results = InferenceSession().load(graph).execute(x)
    module.weight.data = before
    assert not np.any(results[0].to_numpy())


def test_changed_buffers_are_inputs_and_outputs():
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(3))
            self.register_buffer("scale", torch.full((3,), 2.0))

        def forward(self, x):
            self.total.add_(x)
            return self.total * self.scale

    graph = max.torch.from_exported(export(Counter(), (torch.ones(3),)))
    model = InferenceSession().load(graph)
    total = np.array([1, 2, 3], np.float32)
    result, total = model.execute(np.ones(3, np.float32), total)
    np.testing.assert_array_equal(result.to_numpy(), [4, 6, 8])
    np.testing.assert_array_equal(total.to_numpy(), [2, 3, 4])


def test_all_unsupported_ops_are_reported_with_their_lines():
    class Unknown(torch.nn.Module):
        def forward(self, x):
            y = torch.linalg.det(x)
            return torch.linalg.eigvalsh(x) + y, torch.linalg.qr(x)[0]

    program = export(Unknown(), (torch.rand(3, 3),))
    with pytest.raises(UnsupportedOpsError) as failure:
        max.torch.from_exported(program)
    found = failure.value.problems
    assert len(found) == 3
    assert all("test_torch_programs.py:" in problem.node for problem in found)


def test_import_of_max_torch_leaves_the_importer():
    code = (
        "import sys, max.torch; sys.exit(any(m.startswith('max.importers') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x[x[:, 0] > 0][:3] + 1, x[torch.nonzero(x[:, 1] > 0)[:, 0]][-2:]),
        lambda x: (x[x[:, 0] > 0][1:4].sum(0), (rows := x[x[:, 1] > 0])[:2] * rows[:2, :1]),
    ],
)
def test_slices_end_at_the_tensor(function):
    """Bounds beyond a size that only a run knows."""
    inputs = [(torch.randn(n, 3),) for n in (5, 3, 9, 6)]
    agree(function, inputs[0], ({0: Dim("n", min=3, max=99)},), inputs[1:])


def test_branch_on_a_size():
    def function(x):
        return torch.cond(x.shape[0] > 4, lambda x: x.sum(0) + 1, lambda x: x.sum(0) - 1, (x,))

    inputs = [(torch.rand(n, 3),) for n in (5, 4, 2)]
    agree(function, inputs[0], ({0: Dim("n", min=2, max=99)},), inputs[1:])


class Branches(torch.nn.Module):
    """A branch in a branch, with a parameter, a constant, and a value of the enclosing graph."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(3, 3))

    def forward(self, x):
        scale = x.abs().max() + 1

        def upper(x):
            return torch.cond(
                x.sum() > 9,
                lambda x: x @ self.weight,
                lambda x: x * 2.0 / scale,
                (x,),
            )

        return torch.cond(x.sum() > 0, upper, lambda x: x.cos() - self.weight.sum(), (x,)) + scale


def test_branches_depend_on_elements():
    x = torch.rand(2, 3) + 0.1
    agree(Branches(), (x,), None, [(x * 9 + 2,), (-x,)])


class Flag(torch.nn.Module):
    """A branch that a buffer chooses, before the run."""

    def __init__(self, flag):
        super().__init__()
        self.register_buffer("flag", torch.tensor(flag))

    def forward(self, x):
        return torch.cond(self.flag, lambda x: x.sin() + 1, lambda x: x.cos() - 1, (x,))


@pytest.mark.parametrize("flag", [True, False])
def test_branch_of_a_known_condition_is_the_graph(flag):
    graph = agree(Flag(flag), (torch.rand(2, 3),))
    assert "mo.if" not in str(graph)


class Loop(torch.nn.Module):
    """Powers of a matrix until a number that is data."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(3, 3))

    def forward(self, x, count):
        from torch._higher_order_ops.while_loop import while_loop

        def keeps(i, y):
            return i < count.min()

        def body(i, y):
            return i + 1, y @ self.weight + 1

        number, result = while_loop(keeps, body, (torch.zeros((), dtype=torch.int64), x * 2))
        return result, number * 3


def test_loop_runs_as_often_as_data_says():
    x = torch.rand(2, 3)
    counts = [torch.tensor([n, 7]) for n in (3, 0, 1)]
    agree(Loop(), (x, counts[0]), None, [(x, count) for count in counts[1:]])
