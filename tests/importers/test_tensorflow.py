"""SavedModels, Keras and TFLite files against TensorFlow; errors where it is absent, or a model accesses files."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
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
    with pytest.raises(
        ImportFailure, match="it has the signatures (serve, )?serving_default, not 'other'"
    ):
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


def test_archives_of_keras_are_checked(tmp_path):
    path = tmp_path / "m.keras"
    path.write_bytes(b"PK no archive")
    with pytest.raises(ModelFileError, match="no archive of Keras 3"):
        from_tensorflow(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", bytes(30 << 20))
    with pytest.raises(ModelFileError, match="'config.json' unpacks to 31457280 bytes"):
        from_tensorflow(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../config.json", b"{}")
    with pytest.raises(ModelFileError, match="outside of the archive"):
        from_tensorflow(path)


def test_files_of_saved_models_lie_in_their_folder(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    (folder / "variables").mkdir(parents=True)
    (folder / "saved_model.pb").write_bytes(b"12345")
    (folder / "variables" / "variables.index").write_bytes(b"123")
    assert convert.bytes_of("saved_model", folder) == 8
    (tmp_path / "secret").write_text("s")
    link = folder / "variables" / "variables.data-00000-of-00001"
    link.symlink_to(tmp_path / "secret")
    with pytest.raises(ModelFileError, match="is a link out of the model's folder"):
        from_tensorflow(folder)
    link.unlink()
    monkeypatch.setattr(convert, "_MOST_FILES", 1)
    with pytest.raises(ModelFileError, match="more than 1 files"):
        from_tensorflow(folder)


def test_the_converter_may_allocate_so_much():
    code = "from max.importers.tensorflow.worker import limit_memory\nlimit_memory(300 << 20)\n"
    code += "try:\n    bytes(400 << 20)\nexcept MemoryError:\n    print(len(bytes(50 << 20)))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{50 << 20}\n", done.stderr


def hostile(rng, data):
    """A damaged copy: bytes changed, cut, repeated, or a length at the front made huge."""
    changed = bytearray(data)
    kind = int(rng.integers(4))
    if kind == 0:
        for place in rng.integers(0, len(data), 8):
            changed[place] = int(rng.integers(256))
    elif kind == 1:
        del changed[int(rng.integers(len(data))) :]
    elif kind == 2:
        place = int(rng.integers(len(data)))
        changed[place:place] = changed[place : place + 64] * int(rng.integers(1, 200))
    else:
        place = int(rng.integers(min(len(data), 400)))
        changed[place : place + 4] = b"\xff\xff\xff\x7f"
    return bytes(changed)


@pytest.mark.long
@pytest.mark.skipif(not HAS, reason="tensorflow and tf2onnx are not installed")
@pytest.mark.parametrize(
    "name", ["net.tflite", "net/saved_model.pb", "net.keras", "net/variables/variables.index"]
)
def test_hostile_files_end_in_an_error_or_a_model(folder, tmp_path, monkeypatch, name):
    monkeypatch.setattr(convert, "_SECONDS", 120)
    monkeypatch.setattr(convert, "_MEMORY", 3 << 30)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    target = tmp_path / name
    good = target.read_bytes()
    model = tmp_path / "net" if name.startswith("net/") else target
    for _ in range(int(os.environ.get("HOSTILE_FILES", "6"))):
        target.write_bytes(hostile(rng, good))
        with contextlib.suppress(ModelFileError, ImportFailure):
            from_tensorflow(model)


def test_a_converter_that_dies_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "m.tflite").write_bytes(b"12345")
    monkeypatch.setattr(convert.sys, "executable", "/bin/false")
    with pytest.raises(ImportFailure, match="the converter ended with 1: it printed nothing"):
        from_tensorflow(tmp_path / "m.tflite")
