"""ONNX files with random weights, as exporters write them: convolutional networks, transformers, recurrent layers, trees.

``python -m benchmarks.imported_models FOLDER [MODEL …]`` writes the files that are missing; it needs
the packages of the peer `exporters` (torch, torchvision, transformers, ONNX Runtime's quantizer, LightGBM and its converter, silero-vad).
"""

from __future__ import annotations

import argparse
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.imported import inputs_of

TREES, FEATURES = 500, 30


def _export(net: Any, name: str, folder: Path) -> None:
    """Writes a module of torch; the batch size stays open."""
    import torch

    example = inputs_of(name, 2)
    axes: Any = {key: {_batch_axis(name, key): torch.export.Dim("batch")} for key in example}
    torch.onnx.export(
        net,
        tuple(torch.from_numpy(value) for value in example.values()),
        folder / f"{name}.onnx",
        input_names=list(example),
        output_names=["y"],
        dynamic_shapes=tuple(axes.values()),
        external_data=False,
        verbose=False,
    )


def _batch_axis(name: str, key: str) -> int:
    return 0


def _vision(make: str) -> Callable[[], Any]:
    def build() -> Any:
        from torchvision import models

        from benchmarks.imported_networks import with_statistics

        return with_statistics(getattr(models, make)(weights=None))

    return build


def _network(make: str, *arguments: Any) -> Callable[[], Any]:
    """A network of `benchmarks.imported_networks`, which needs torch."""

    def build() -> Any:
        from benchmarks import imported_networks

        return getattr(imported_networks, make)(*arguments)

    return build


def _unet() -> Any:
    import torch
    from torch import nn

    class Double(nn.Sequential):
        def __init__(self, inputs: int, outputs: int) -> None:
            layers: list[nn.Module] = []
            for size in (inputs, outputs):
                layers += [
                    nn.Conv2d(size, outputs, 3, padding=1, bias=False),
                    nn.BatchNorm2d(outputs),
                    nn.ReLU(),
                ]
            super().__init__(*layers)

    class UNet(nn.Module):
        """Four levels down, four up, 32 to 512 channels."""

        def __init__(self) -> None:
            super().__init__()
            sizes = [32, 64, 128, 256, 512]
            self.down = nn.ModuleList(
                [Double(a, b) for a, b in zip([3, *sizes[:-1]], sizes, strict=True)]
            )
            self.widen = nn.ModuleList(
                [nn.ConvTranspose2d(2 * s, s, 2, 2) for s in reversed(sizes[:-1])]
            )
            self.up = nn.ModuleList([Double(2 * s, s) for s in reversed(sizes[:-1])])
            self.head = nn.Conv2d(32, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept: list[torch.Tensor] = []
            for i, block in enumerate(self.down):
                x = block(x if not i else nn.functional.max_pool2d(x, 2))
                kept.append(x)
            for widen, block, skip in zip(self.widen, self.up, reversed(kept[:-1]), strict=True):
                x = block(torch.cat([skip, widen(x)], 1))
            return self.head(x)

    return UNet()


def _transformer(kind: str) -> Callable[[], Any]:
    """An encoder of transformers whose attention is exported as products and a softmax."""

    def build() -> Any:
        import torch
        import transformers
        from torch import nn

        common = {"attn_implementation": "eager"}
        if kind == "whisper":
            config = transformers.WhisperConfig(**common)
            inner: Any = transformers.WhisperModel(config).encoder
        elif kind == "distilbert":
            inner = transformers.DistilBertModel(transformers.DistilBertConfig(**common))
        elif kind == "t5":
            inner = transformers.T5EncoderModel(transformers.T5Config(d_model=512, **common))
        else:
            inner = transformers.BertModel(
                transformers.BertConfig(**common), add_pooling_layer=False
            )

        class Encoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
                result = self.inner(x) if mask is None else self.inner(x, attention_mask=mask)
                return result.last_hidden_state

        return Encoder()

    return build


def _recurrent(kind: str) -> Callable[[], Any]:
    def build() -> Any:
        import torch
        from torch import nn

        class Layers(nn.Module):
            """Two layers that read in both directions, and a linear one."""

            def __init__(self) -> None:
                super().__init__()
                self.inner = getattr(nn, kind)(128, 256, 2, batch_first=True, bidirectional=True)
                self.head = nn.Linear(512, 64)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.head(self.inner(x)[0])

        return Layers()

    return build


def _crnn() -> Any:
    import torch
    from torch import nn

    class Crnn(nn.Module):
        """Lines of text: convolutions that halve the height, then two LSTMs over the width."""

        def __init__(self) -> None:
            super().__init__()
            layers: list[nn.Module] = []
            last = 1
            for size, pool in (
                (64, (2, 2)),
                (128, (2, 2)),
                (256, (1, 1)),
                (256, (2, 1)),
                (512, (1, 1)),
                (512, (2, 1)),
            ):
                layers += [
                    nn.Conv2d(last, size, 3, padding=1),
                    nn.BatchNorm2d(size),
                    nn.ReLU(),
                    nn.MaxPool2d(pool, pool),
                ]
                last = size
            self.features = nn.Sequential(*layers, nn.Conv2d(512, 512, (2, 1)), nn.ReLU())
            self.inner = nn.LSTM(512, 256, 2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(512, 96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.features(x).squeeze(2).permute(0, 2, 1)
            return self.head(self.inner(y)[0])

    return Crnn()


def _mlp() -> Any:
    from torch import nn

    sizes = (784, 1024, 1024, 1024, 10)
    layers: list[nn.Module] = []
    for a, b in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


NETWORKS: dict[str, Callable[[], Any]] = {
    "resnet-50": _vision("resnet50"),
    "mobilenet-v3": _vision("mobilenet_v3_large"),
    "efficientnet-b0": _vision("efficientnet_b0"),
    "convnext-t": _vision("convnext_tiny"),
    "regnet-y-1.6gf": _vision("regnet_y_1_6gf"),
    "vit-b-16": _vision("vit_b_16"),
    "swin-t": _vision("swin_t"),
    "u-net": _unet,
    "yolo-n": _network("yolo", 0.25),
    "yolo-s": _network("yolo", 0.5),
    "detr": _network("detr"),
    "deeplab": _network("deeplab"),
    "bert": _transformer("bert"),
    "distilbert": _transformer("distilbert"),
    "t5-encoder": _transformer("t5"),
    "whisper-encoder": _transformer("whisper"),
    "wav2vec": _network("wav2vec"),
    "crnn": _crnn,
    "lstm": _recurrent("LSTM"),
    "gru": _recurrent("GRU"),
    "mlp": _mlp,
}
"""What torch exports."""


def _quantized(source: str) -> Callable[[str, Path], None]:
    """A file of ONNX Runtime's static quantizer: u8 activations, i8 weights a channel, as pairs of Q and DQ."""

    def write(name: str, folder: Path) -> None:
        from onnxruntime.quantization import (
            CalibrationDataReader,
            QuantFormat,
            QuantType,
            quantize_static,
        )
        from onnxruntime.quantization.shape_inference import quant_pre_process

        class Reader(CalibrationDataReader):
            def __init__(self) -> None:
                self.left = [inputs_of(source, 2)]

            def get_next(self) -> Any:
                return self.left.pop() if self.left else None

        prepared = folder / f"{name}.prepared.onnx"
        quant_pre_process(folder / f"{source}.onnx", prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared, folder / f"{name}.onnx", Reader(), QuantFormat.QDQ, per_channel=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        )  # fmt: skip
        prepared.unlink()

    return write


def _trees(name: str, folder: Path) -> None:
    """Gradient-boosted trees of LightGBM; it keeps the booster's own file for LightGBM as a peer."""
    import lightgbm
    from onnxmltools import convert_lightgbm
    from onnxmltools.convert.common.data_types import FloatTensorType

    rng = np.random.default_rng(0)
    x = rng.standard_normal((5000, FEATURES)).astype(np.float32)
    y = (np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + rng.standard_normal(5000)).astype(np.float32)
    settings = {
        "objective": "regression",
        "num_leaves": 31,
        "verbose": -1,
        "seed": 0,
        "num_threads": 2,
    }
    booster = lightgbm.train(settings, lightgbm.Dataset(x, y), TREES)
    booster.save_model(folder / f"{name}.txt")
    model = convert_lightgbm(
        booster, initial_types=[("x", FloatTensorType([None, FEATURES]))], target_opset=15
    )
    (folder / f"{name}.onnx").write_bytes(model.SerializeToString())


def _silero(name: str, folder: Path) -> None:
    """The file of the package."""
    import silero_vad

    source = Path(silero_vad.__file__).parent / "data" / "silero_vad.onnx"
    shutil.copyfile(source, folder / f"{name}.onnx")


FILES: dict[str, Callable[[str, Path], None]] = {
    "resnet-50-qdq": _quantized("resnet-50"),
    "bert-qdq": _quantized("bert"),
    "trees": _trees,
    "silero-vad": _silero,
}
"""What other tools write."""


def network(name: str) -> Any:
    """The module of torch that a file is exported from, for inference; each call draws the same weights."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        return NETWORKS[name]().eval()


def write(name: str, folder: Path) -> None:
    """Writes a model where it is not there."""
    if (folder / f"{name}.onnx").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if name in FILES:
        FILES[name](name, folder)
        return
    import torch

    with torch.no_grad():
        _export(network(name), name, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", default=[*NETWORKS, *FILES])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    for name in args.models:
        write(name, args.folder)
        print(name, (args.folder / f"{name}.onnx").stat().st_size, flush=True)


if __name__ == "__main__":
    main()
