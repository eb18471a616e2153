"""torch.compile(backend="max"): graph breaks, sizes, threads, changed weights, what stays in torch."""

from __future__ import annotations

import threading
import warnings

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

torch = pytest.importorskip("torch")

import max.torch.backend as backend  # noqa: E402
from max.torch import compiled, explain  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.linear = torch.nn.Linear(8, 5)

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x)))
        return self.linear(y.mean((2, 3))).softmax(-1), x.shape[0] * 2


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_sizes_and_changed_weights():
    model = Net().eval()
    fast = torch.compile(model, backend="max")
    with torch.no_grad():
        for batch in (2, 3, 5, 8):
            x = torch.rand(batch, 3, 6, 7)
            close(fast(x), model(x))
        model.linear.weight.mul_(3)
        close(fast(x), model(x))
        close(fast(x.transpose(2, 3)), model(x.transpose(2, 3)))


def test_graph_breaks_and_unknown_ops_run_in_torch():
    def function(x):
        y = torch.linalg.det(x.exp()) * 2
        torch._dynamo.graph_break()
        return x.sin() + y

    x = torch.rand(4, 3, 3, dtype=torch.float64)
    x = x.sum(0)
    with torch.no_grad():
        close(torch.compile(function, backend="max")(x), function(x))
        found = explain(function, x)
    assert found.graphs == 3
    assert len(found.breaks) == 1
    assert [(op, "test_compile.py" in where) for op, where, _ in found.left] == [
        ("aten._linalg_det.default", True)
    ]
    assert "1 ops in torch" in str(found)


def test_changed_inputs_and_buffers():
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x):
            self.total.add_(x)
            x.mul_(2)
            return self.total + x

    one, two = Counter(), Counter()
    fast = torch.compile(one, backend="max")
    with torch.no_grad():
        for _ in range(3):
            a = torch.rand(3)
            b = a.clone()
            close(fast(a), two(b))
            close(a, b)
            close(one.total, two.total)


def test_gradients_run_in_torch_with_one_warning():
    backend._warn_of_gradients.cache_clear()
    model = torch.nn.Linear(3, 2)
    fast = torch.compile(model, backend="max")
    x = torch.rand(4, 3)
    with pytest.warns(UserWarning, match="compiles for inference"):
        fast(x).sum().backward()
    assert model.weight.grad is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.compile(torch.nn.Linear(3, 4), backend="max")(x)


def test_a_wrong_flag_is_an_error(monkeypatch):
    """No reason to run in torch."""
    monkeypatch.setenv("MAX_CHECK", "most")
    with torch.no_grad(), pytest.raises(Exception, match="MAX_CHECK=most: expected"):
        torch.compile(Net().eval(), backend="max")(torch.rand(1, 3, 6, 6))


def test_a_graph_that_is_not_compiled_runs_in_torch_with_a_warning(monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("a reason")

    monkeypatch.setattr(compiled.InferenceSession, "compile", refuse)
    net, x = Net().eval(), torch.rand(2, 3, 6, 6)
    with torch.no_grad():
        with pytest.warns(
            UserWarning, match="run in torch, as their graph cannot be compiled: a reason"
        ):
            got, _ = torch.compile(net, backend="max")(x)
        close(got, net(x)[0])


def test_threads():
    model = Net().eval()
    fast = torch.compile(model, backend="max")
    inputs = [torch.rand(4, 3, 5, 5) for _ in range(4)]
    wrong: list[BaseException] = []

    def work(x):
        try:
            with torch.no_grad():
                for _ in range(5):
                    close(fast(x), model(x))
        except BaseException as error:
            wrong.append(error)

    with torch.no_grad():
        fast(inputs[0])
    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_entry_point_names_the_backend():
    import tomllib
    from pathlib import Path

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    points = tomllib.loads(text)["project"]["entry-points"]["torch_dynamo_backends"]
    assert points == {"max": f"{backend.__name__}:{backend.max_backend.__name__}"}
