"""A classifier of `max.nn` layers that takes its weights from torch by name, and gives torch's answers. Needs torch."""

import numpy as np
import torch

from max import nn
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops

cpu = DeviceRef.CPU()


class Classifier(nn.Module):
    """Images `[batch, 784]` to logits `[batch, 10]`."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(784, 128, DType.float32, cpu, has_bias=True)
        self.head = nn.Linear(128, 10, DType.float32, cpu, has_bias=True)

    def __call__(self, x: TensorValue) -> TensorValue:
        return self.head(ops.relu(self.hidden(x)))


torch.manual_seed(0)
reference = torch.nn.Sequential()
reference.add_module("hidden", torch.nn.Linear(784, 128))
reference.add_module("relu", torch.nn.ReLU())
reference.add_module("head", torch.nn.Linear(128, 10))

network = Classifier()
network.load_state_dict({k: v.detach().numpy() for k, v in reference.state_dict().items()})
graph = Graph("mlp", network, [TensorType(DType.float32, ("batch", 784), cpu)])
model = InferenceSession(devices=[CPU()]).load(graph, weights_registry=network.state_dict())

images = torch.rand(32, 784)
with torch.no_grad():
    expected = reference(images).numpy()
logits = model.execute(images.numpy())[0].to_numpy()
print(logits.shape, "as torch:", np.allclose(logits, expected, atol=1e-5))

# prints: (32, 10) as torch: True
