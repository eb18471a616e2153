"""Weights of torch.compile(backend="max"): prepared once, read again when they change, one program for equal layers."""

from __future__ import annotations

import gc

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

torch = pytest.importorskip("torch")

import max.torch.backend  # noqa: E402, F401
from max.torch import compiled  # noqa: E402


@pytest.fixture
def binds(monkeypatch):
    """The forms that read weights, in order, and their number of weights."""
    seen = []
    real = compiled._Form.bind

    def bind(form, args):
        seen.append((form, len(form.weights)))
        return real(form, args)

    monkeypatch.setattr(compiled._Form, "bind", bind)
    torch._dynamo.reset()
    return seen


def same(fast, model, x):
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def net():
    model = torch.nn.Sequential(torch.nn.Linear(9, 17), torch.nn.ReLU(), torch.nn.Linear(17, 5))
    return model.eval()


def test_weights_are_prepared_once(binds):
    model = net()
    fast = torch.compile(model, backend="max")
    for _ in range(5):
        same(fast, model, torch.rand(3, 9))
    assert [weights for _, weights in binds] == [4]


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.mul_(2),
        lambda w: w[1].fill_(3),
        lambda w: w.copy_(torch.rand_like(w)),
        lambda w: w.detach().zero_(),
        lambda w: setattr(w, "data", torch.rand(17, 9)),
        lambda w: setattr(w, "data", torch.rand(9, 17).T),
    ],
)
def test_a_changed_weight_is_read_again(binds, change):
    model = net()
    fast = torch.compile(model, backend="max")
    x = torch.rand(3, 9)
    same(fast, model, x)
    with torch.no_grad():
        change(model[0].weight)
    same(fast, model, x)
    same(fast, model, x)
    assert len(binds) == 2
    model[2].bias = torch.nn.Parameter(torch.rand(5))
    same(fast, model, x)


def test_loaded_weights_are_read(binds):
    model, other = net(), net()
    fast = torch.compile(model, backend="max")
    x = torch.rand(2, 9)
    same(fast, model, x)
    model.load_state_dict(other.state_dict())
    same(fast, other, x)


def test_equal_layers_share_a_program(binds):
    layers = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(4)).eval()

    def run(layer, x):
        return torch.relu(layer(x)) + x

    fast = torch.compile(run, backend="max")
    x = torch.rand(2, 7)
    with torch.no_grad():
        for _ in range(3):
            for layer in layers:
                torch.testing.assert_close(fast(layer, x), run(layer, x), rtol=1e-4, atol=1e-5)
    forms = {id(form) for form, _ in binds}
    assert len(forms) <= 2
    assert len(binds) <= 5


def test_models_of_dead_layers_are_dropped(binds):
    def run(layer, x):
        return layer(x) * 2

    fast = torch.compile(run, backend="max")
    x = torch.rand(2, 6)
    with torch.no_grad():
        for _ in range(4):
            fast(torch.nn.Linear(6, 6), x)
            gc.collect()
    assert all(len(form.models) <= 1 for form, _ in binds)


def test_a_weight_that_changes_at_each_call_becomes_an_input(binds):
    model = net()
    fast = torch.compile(model, backend="max")
    for _ in range(12):
        with torch.no_grad():
            model[0].weight.add_(0.1)
        same(fast, model, torch.rand(3, 9))
    assert binds[0][1] == 4
    assert binds[-1][1] == 3
    assert len(binds) < 8


def test_channels_last_weights_and_shared_storage(binds):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 3)
            self.linear = torch.nn.Linear(8, 8)
            self.linear.weight = torch.nn.Parameter(torch.rand(100)[5:69].view(8, 8))
            self.register_buffer("scale", torch.tensor(1.5))

        def forward(self, x):
            return self.linear(self.conv(x).mean((2, 3))) * self.scale

    model = Net().to(memory_format=torch.channels_last).eval()
    fast = torch.compile(model, backend="max")
    for size in (6, 9):
        same(fast, model, torch.rand(2, 3, size, 5))
    model.scale.fill_(0.25)
    same(fast, model, torch.rand(2, 3, 6, 5))


def test_inference_tensors_are_inputs(binds):
    with torch.inference_mode():
        model = net()
        fast = torch.compile(model, backend="max")
        for _ in range(2):
            x = torch.rand(3, 9)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        model[0].weight.mul_(3)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert all(weights == 0 for _, weights in binds)
