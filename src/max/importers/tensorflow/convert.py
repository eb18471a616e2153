"""A model of TensorFlow as the bytes of an ONNX file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from max._config import process_environment
from max.importers.archives import check_entries
from max.importers.errors import ImportFailure, ModelFileError

__all__ = ["kind_of", "onnx_of"]

_VARIABLES = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "KERAS_BACKEND": "tensorflow",
    "CUDA_VISIBLE_DEVICES": "-1",
}
_SECONDS = 1800
_MOST_FILES = 10_000
_MEMORY, _MEMORY_PER_CPU, _MEMORY_PER_BYTE = 6 << 30, 64 << 20, 16
"""The memory that the converter may allocate: for TensorFlow, its threads, and for each byte of the model."""
_MOST_BYTES = (2 << 30) - (1 << 20)
"""The largest message that protobuf reads."""


def kind_of(path: Path) -> str | None:
    """What a path holds: "saved_model", "keras", "tflite"; None: nothing of TensorFlow."""
    if path.is_dir():
        return "saved_model" if (path / "saved_model.pb").is_file() else None
    if path.name == "saved_model.pb":
        return "saved_model"
    return {".keras": "keras", ".tflite": "tflite"}.get(path.suffix.lower())


def onnx_of(path: str | os.PathLike[str], exported_name: str = "serving_default") -> bytes:
    """The model of a SavedModel's folder, or of a ``.keras`` or ``.tflite`` file.

    Args:
        path: The model.
        exported_name: The signature of a SavedModel.

    Raises:
        ImportError: TensorFlow or tf2onnx is not installed.
        ModelFileError: It is no such model, or it is damaged.
        ImportFailure: The model cannot be converted.
    """
    file = Path(path)
    kind = kind_of(file)
    if kind is None:
        raise ModelFileError(
            f"{file} is no model of TensorFlow: expected a folder with saved_model.pb, a .keras or a .tflite file"
        )
    file = file.parent if file.name == "saved_model.pb" else file
    size = (file / "saved_model.pb" if kind == "saved_model" else file).stat().st_size
    if size > _MOST_BYTES:
        raise ModelFileError(f"{file} has {size} bytes, more than {_MOST_BYTES}")
    if kind == "keras":
        _check_archive(file)
    with tempfile.TemporaryDirectory(prefix="max-tensorflow-") as folder:
        output = Path(folder) / "model.onnx"
        _convert(kind, file, exported_name, output)
        return output.read_bytes()


def _check_archive(file: Path) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            check_entries(file, archive)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ModelFileError(f"{file} is no archive of Keras 3: {error}") from error


def bytes_of(file_format: str, file: Path) -> int:
    """The size of a model's files.

    Raises:
        ModelFileError: A SavedModel's folder has a link out of it, or very many files.
    """
    if file_format != "saved_model":
        return file.stat().st_size
    total = count = 0
    root = file.resolve()
    for folder, _, names in os.walk(file):
        for name in names:
            path = Path(folder, name)
            count += 1
            if count > _MOST_FILES:
                raise ModelFileError(f"{file} has more than {_MOST_FILES} files")
            if not path.resolve().is_relative_to(root):
                raise ModelFileError(f"{path} is a link out of the model's folder")
            total += path.lstat().st_size
    return total


def _convert(file_format: str, file: Path, exported_name: str, output: Path) -> None:
    # TensorFlow ends the process on some damaged files, and its memory is given back this way
    command = [
        sys.executable,
        "-m",
        f"{__package__}.worker",
        file_format,
        str(file),
        exported_name,
        str(output),
        str(
            _MEMORY
            + _MEMORY_PER_CPU * (os.cpu_count() or 1)
            + _MEMORY_PER_BYTE * bytes_of(file_format, file)
        ),
    ]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
            env={**process_environment(), **_VARIABLES},
        )
    except subprocess.TimeoutExpired as error:
        raise ImportFailure(f"{file}: the conversion took more than {_SECONDS} seconds") from error
    try:
        result = json.loads(done.stdout)
    except ValueError:
        result = {
            "problem": f"the converter ended with {done.returncode}: {_last_line(done.stderr)}"
        }
    if "missing" in result:
        raise ImportError(
            f'{file} is read with TensorFlow and tf2onnx ({result["missing"]}): pip install "supremum[tensorflow]"'
        )
    if result["problem"] is not None:
        raise ImportFailure(f"{file} cannot be converted: {result['problem']}")
    if not output.is_file():
        raise ImportFailure(f"{file} cannot be converted: the converter wrote nothing")


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1][:400] if lines else "it printed nothing"
