"""SavedModels, Keras and TFLite files against TensorFlow; errors where it is absent, or a model accesses files."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

import max.importers.tensorflow.convert as convert
from max.engine import InferenceSession
from max.importers.errors import ImportFailure, ModelFileError
from max.tensorflow import from_tensorflow

HAS = find_spec("tensorflow") is not None and find_spec("tf2onnx") is not None

WRITE = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np, tensorflow as tf, keras
folder = sys.argv[1]
keras.utils.set_random_seed(0)
image = keras.Input((16, 16, 3), name="image")
x = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(image)
x = keras.layers.MaxPooling2D()(keras.layers.BatchNormalization()(x))
a, b = keras.layers.GlobalAveragePooling2D()(x), keras.layers.Flatten()(x)
net = keras.Model(image, {"logits": keras.layers.Dense(5)(a), "flat": keras.layers.Dense(3)(b)})
net.save(f"{folder}/net.keras")
net.export(f"{folder}/net", verbose=False)
open(f"{folder}/net.tflite", "wb").write(tf.lite.TFLiteConverter.from_keras_model(net).convert())
steps = keras.Sequential([keras.Input((5, 4)), keras.layers.LSTM(6, return_sequences=True), keras.layers.GRU(3)])
steps.save(f"{folder}/steps.keras")
reads = tf.Module()
reads.read = tf.function(lambda p: {"x": tf.io.read_file(p)}, input_signature=[tf.TensorSpec([], tf.string)])
tf.saved_model.save(reads, f"{folder}/reads", signatures={"serving_default": reads.read})
x, y = np.random.rand(2, 16, 16, 3).astype("f"), np.random.rand(2, 5, 4).astype("f")
results = net(x, training=False)
np.savez(f"{folder}/expected.npz", x=x, y=y, logits=results["logits"], flat=results["flat"], steps=steps(y))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tensorflow")
    subprocess.run([sys.executable, "-c", WRITE, str(path)], check=True, timeout=600)
    return path


@pytest.mark.parametrize("name", ["net.keras", "net", "net.tflite", "steps.keras"])
@pytest.mark.long
@pytest.mark.skipif(not HAS, reason="tensorflow and tf2onnx are not installed")
def test_results_are_those_of_tensorflow(folder, name):
    expected = np.load(folder / "expected.npz")
    is_net = name.startswith("net")
    results = InferenceSession().load(folder / name).execute(expected["x" if is_net else "y"])
    wanted = [expected["flat"], expected["logits"]] if is_net else [expected["steps"]]
    for want in wanted:
        (got,) = [r.to_numpy() for r in results if tuple(r.shape) == want.shape]
        np.testing.assert_allclose(got, want, 1e-4, 1e-5)


@pytest.mark.long
@pytest.mark.skipif(not HAS, reason="tensorflow and tf2onnx are not installed")
def test_what_is_not_converted(folder):
    with pytest.raises(ImportFailure, match="access files or run Python: ReadFile"):
        from_tensorflow(folder / "reads")
    with pytest.raises(ImportFailure, match="it has the signatures serving_default, not 'other'"):
        from_tensorflow(folder / "net", exported_name="other")
    data = bytearray((folder / "net" / "saved_model.pb").read_bytes())
    data[::97] = bytes(len(data[::97]))
    (folder / "net" / "saved_model.pb").write_bytes(bytes(data))
    with pytest.raises(ImportFailure, match="cannot be converted"):
        from_tensorflow(folder / "net")


@pytest.mark.skipif(HAS, reason="TensorFlow is installed")
def test_an_absent_package_is_named(tmp_path):
    (tmp_path / "saved_model.pb").write_bytes(b"")
    with pytest.raises(ImportError, match=r"supremum\[tensorflow\]"):
        InferenceSession().load(tmp_path)


def test_paths_and_sizes_are_checked(tmp_path, monkeypatch):
    with pytest.raises(ModelFileError, match="no model of TensorFlow"):
        from_tensorflow(tmp_path)
    (tmp_path / "m.tflite").write_bytes(b"12345")
    monkeypatch.setattr(convert, "_MOST_BYTES", 4)
    with pytest.raises(ModelFileError, match="has 5 bytes, more than 4"):
        from_tensorflow(tmp_path / "m.tflite")


def test_a_converter_that_dies_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "m.tflite").write_bytes(b"12345")
    monkeypatch.setattr(convert.sys, "executable", "/bin/false")
    with pytest.raises(ImportFailure, match="the converter ended with 1: it printed nothing"):
        from_tensorflow(tmp_path / "m.tflite")
