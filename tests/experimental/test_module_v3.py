"""`max.nn.module_v3`: trees of modules, and well-known models, eager and compiled, against torch and transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from max.driver import CPU
from max.dtype import DType
from max.experimental import Tensor
from max.experimental.programs.programs import compiled_programs
from max.graph import DeviceRef, TensorType
from max.nn.module_v3 import Embedding, LayerNorm, Linear, Module, Sequential, module_dataclass
from tests.experimental.models import GPT2, LSTM, ResNet18, UNet

F32, I64, HOST = DType.float32, DType.int64, DeviceRef.CPU()


@module_dataclass
class Pair(Module):
    first: Linear
    second: Sequential
    scale: Tensor
    name: str = "pair"

    def __call__(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale


def pair() -> Pair:
    return Pair(
        Linear(2, 3), Sequential(LayerNorm(3), Linear(3, 4, bias=False)), Tensor.constant(2.0)
    )


def test_the_tree() -> None:
    model = pair()
    assert [name for name, _ in model.children] == ["first", "second"]
    assert [name for name, _ in model.descendants] == ["first", "second", "second.0", "second.1"]
    names = [
        "scale",
        "first.weight",
        "first.bias",
        "second.0.weight",
        "second.0.bias",
        "second.1.weight",
    ]
    assert [name for name, _ in model.parameters] == names
    assert [name for name, _ in model.local_parameters] == ["scale"]
    assert repr(Linear(2, 3)) == "Linear(in_dim=Dim(2), out_dim=Dim(3))"
    assert repr(Sequential(Linear(2, 3), Linear(3, 4))) == (
        "Sequential(\n    Linear(in_dim=Dim(2), out_dim=Dim(3)),\n    Linear(in_dim=Dim(3), out_dim=Dim(4))\n)"
    )
    assert repr(model).startswith(
        "Pair(\n    first=Linear(in_dim=Dim(2), out_dim=Dim(3)),\n    second=Sequential("
    )
    assert Linear(2, 3, bias=False).bias == 0
    with pytest.raises(NotImplementedError):
        Module()(1)
    with pytest.raises(TypeError, match="not a subclass of Module"):
        module_dataclass(int)


def test_parameters_are_replaced() -> None:
    model = pair()
    doubled = model.map_parameters(lambda name, t: t * 2 if name == "scale" else t)
    assert (model.scale.item(), doubled.scale.item()) == (2.0, 4.0)
    assert doubled.first is not model.first and doubled.first.weight is model.first.weight
    model.apply_to_parameters(
        lambda name, t: Tensor.zeros_like(t.type) if name.startswith("first") else t
    )
    assert not model.first.weight.to_numpy().any() and doubled.first.weight.to_numpy().any()
    model.first.apply_to_local_parameters(lambda name, t: t + 1)
    assert model.first.bias.to_numpy().tolist() == [1, 1, 1]
    assert model.to(CPU()) is model
    state = {
        name: np.full([int(d) for d in t.shape], 3, np.float32) for name, t in model.parameters
    }
    model.load_state_dict(state)
    assert all((t.to_numpy() == 3).all() for _, t in model.parameters)
    for wrong, error, words in [
        ({k: v for k, v in state.items() if k != "scale"}, KeyError, "scale"),
        (state | {"extra": np.zeros(1, np.float32)}, ValueError, "extra"),
        (state | {"scale": np.zeros(2, np.float32)}, ValueError, r"scale has shape \[2\]"),
        (state | {"scale": np.zeros((), np.float64)}, ValueError, "float64"),
    ]:
        with pytest.raises(error, match=words):
            model.load_state_dict(wrong)
    model.load_state_dict(state | {"extra": np.zeros(1, np.float32)}, strict=False)


def test_embedding() -> None:
    table = Embedding(10, dims=[2, 3])
    rows = table(Tensor.constant([[1, 9]], dtype=DType.uint64))
    np.testing.assert_array_equal(rows.to_numpy(), table.weight.to_numpy()[[[1, 9]]])
    assert table.vocab_size == 10 and list(table.dims) == [2, 3] and Embedding(4, dim=5).dim == 5
    for wrong in [lambda: table.dim, lambda: Embedding(3), lambda: Embedding(3, dim=1, dims=[1])]:
        with pytest.raises(TypeError):
            wrong()


def test_compile() -> None:
    model = pair()
    compiled = model.compile(TensorType(F32, ["n", 2], HOST))
    for rows in (1, 5):
        x = np.random.default_rng(rows).standard_normal((rows, 2)).astype(np.float32)
        np.testing.assert_allclose(
            compiled(x).to_numpy(), model(Tensor.from_dlpack(x)).to_numpy(), rtol=1e-6
        )
    # the parameters are eager again
    assert model.scale.item() == 2.0

    class Many(Module):
        def __call__(self, x: Tensor) -> dict[str, object]:
            return {"sum": x + 1, "parts": (x * 2, [x * 3])}

    many = Many().compile(TensorType(F32, [2], HOST))(Tensor.ones([2]))
    assert many["sum"].to_numpy().tolist() == [2, 2] and many["parts"][1][
        0
    ].to_numpy().tolist() == [3, 3]
    with pytest.raises(TypeError, match="give a type for each argument"):
        model.compile()

    class Branches(Module):
        def __call__(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > 0 else -x

    with pytest.raises(TypeError, match="no elements yet"):
        Branches().compile(TensorType(F32, [2], HOST))


def test_gpt2_equals_transformers() -> None:
    config = transformers.GPT2Config(
        vocab_size=101,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    reference = transformers.GPT2LMHeadModel(config).eval()
    model = GPT2(101, 64, 32, 4, 2)
    state = reference.transformer.state_dict()
    model.load_state_dict({name: state[name].numpy() for name, _ in model.parameters})
    prompt = [5, 17, 99, 3, 42]
    tokens, past, position = prompt, None, 0
    produced = []
    before = compiled_programs()
    for _ in range(24):
        positions = Tensor.constant(list(range(position, position + len(tokens))), dtype=I64)
        logits, past = model(Tensor.constant(tokens, dtype=I64), positions, past)
        position += len(tokens)
        tokens = [int(logits[-1].argmax().item())]
        produced += tokens
    # the prompt, two separate steps, and one program for all other steps
    assert compiled_programs() - before <= 6
    with torch.no_grad():
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        all_logits = reference(torch.tensor([prompt])).logits[0].numpy()
    assert produced == expected[0, len(prompt) :].tolist()
    compiled = model.compile(TensorType(I64, ["t"], HOST), TensorType(I64, ["t"], HOST))
    np.testing.assert_allclose(
        compiled(np.array(prompt), np.arange(5))[0].to_numpy(), all_logits, rtol=1e-4, atol=1e-4
    )


def resnet_name(name: str) -> str:
    """transformers' name of a parameter of torchvision's resnet18."""
    parts = {
        "conv1": "0.convolution",
        "bn1": "0.normalization",
        "conv2": "1.convolution",
        "bn2": "1.normalization",
    }
    match name.split("."):
        case ["fc", leaf]:
            return f"classifier.1.{leaf}"
        case [layer, leaf]:
            return f"resnet.embedder.embedder{parts[layer][1:]}.{leaf}"
        case [stage, block, "downsample", index, leaf]:
            part = ("convolution", "normalization")[int(index)]
            return (
                f"resnet.encoder.stages.{int(stage[-1]) - 1}.layers.{block}.shortcut.{part}.{leaf}"
            )
        case [stage, block, layer, leaf]:
            return f"resnet.encoder.stages.{int(stage[-1]) - 1}.layers.{block}.layer.{parts[layer]}.{leaf}"
    raise AssertionError(name)


def test_resnet18_equals_transformers() -> None:
    torch.manual_seed(1)
    config = transformers.ResNetConfig(
        embedding_size=64,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=10,
    )
    reference = transformers.ResNetForImageClassification(config).eval()
    for module in reference.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    model = ResNet18(10)
    state = reference.state_dict()
    model.load_state(lambda name: state[resnet_name(name)].detach().numpy())
    x = torch.randn(2, 3, 64, 64)
    images = x.permute(0, 2, 3, 1).contiguous().numpy()
    with torch.no_grad():
        expected = reference(x).logits.numpy()
    eager = model(Tensor.from_dlpack(images)).to_numpy()
    scale = np.abs(expected).max()
    np.testing.assert_allclose(eager, expected, atol=2e-4 * scale)
    compiled = model.compile(TensorType(F32, [2, 64, 64, 3], HOST))
    np.testing.assert_allclose(compiled(images).to_numpy(), expected, atol=2e-4 * scale)


def test_lstm_equals_torch() -> None:
    torch.manual_seed(2)
    reference = torch.nn.LSTM(5, 7).eval()
    model = LSTM(5, 7)
    model.load_state_dict({name: t.detach().numpy() for name, t in reference.state_dict().items()})
    for time in (1, 6, 9):
        x = torch.randn(time, 5)
        with torch.no_grad():
            expected = reference(x)[0].numpy()
        np.testing.assert_allclose(model(Tensor.from_dlpack(x)).to_numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(
        model.compile(TensorType(F32, [9, 5], HOST))(x).to_numpy(), expected, atol=1e-5
    )


def test_a_diffusion_step_eager_and_compiled() -> None:
    model = UNet(8)
    compiled = model.compile(
        TensorType(F32, [1, 8, 8, 1], HOST), TensorType(F32, [1, 1, 1, 8], HOST)
    )
    image = np.random.default_rng(0).standard_normal((1, 8, 8, 1)).astype(np.float32)
    x, y = Tensor.from_dlpack(image), Tensor.from_dlpack(image)
    before = compiled_programs()
    for step in range(6):
        time = Tensor.full([1, 1, 1, 8], step / 6)
        noise, same = model(x, time), compiled(y, time)
        np.testing.assert_allclose(
            noise.to_numpy(), same.to_numpy(), rtol=2e-3, atol=2e-3 * np.abs(same.to_numpy()).max()
        )
        x = x - noise * 0.001
        y = y - same * 0.001
    assert compiled_programs() - before <= 6

    class Torch(torch.nn.Module):
        def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            p = {name: torch.from_numpy(t.to_numpy()) for name, t in model.parameters}
            f = torch.nn.functional
            t = f.linear(
                f.linear(time, p["time.0.weight"], p["time.0.bias"]),
                p["time.1.weight"],
                p["time.1.bias"],
            )
            high = f.silu(f.conv2d(x, p["enter.weight"], padding=1)) + t[..., None, None]
            low = f.silu(
                f.conv2d(
                    f.silu(f.conv2d(high, p["down.weight"], stride=2, padding=1)),
                    p["middle.weight"],
                    padding=1,
                )
            )
            return f.conv2d(
                torch.cat([high, f.interpolate(low, scale_factor=2)], 1),
                p["leave.weight"],
                padding=1,
            )

    t = np.full((1, 8), 0.5, np.float32)
    expected = (
        Torch()(torch.from_numpy(image.transpose(0, 3, 1, 2)), torch.from_numpy(t))
        .numpy()
        .transpose(0, 2, 3, 1)
    )
    got = model(Tensor.from_dlpack(image), Tensor.from_dlpack(t.reshape(1, 1, 1, 8))).to_numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
