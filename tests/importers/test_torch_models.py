"""Models of torchvision from random weights, exported and imported: the results are those of torch."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

torch = pytest.importorskip("torch")
models = pytest.importorskip("torchvision.models", exc_type=ImportError)

import max.torch  # noqa: E402
from max.engine import InferenceSession  # noqa: E402

NAMES = ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_0", "mnasnet0_5"]
NAMES += ["efficientnet_b0", "regnet_y_400mf", "densenet121"]


def randomized(model):
    """Weights that are all zero, and statistics of norms, at random, so that the results depend on all layers."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.05)
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize("name", NAMES)
def test_model_equals_torch(name):
    torch.manual_seed(0)
    model = randomized(models.get_model(name, weights=None))
    x = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(x).numpy()
        graph = max.torch.from_exported(torch.export.export(model, (x,)))
    result = InferenceSession().load(graph).execute(x.numpy())[0].to_numpy()
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
