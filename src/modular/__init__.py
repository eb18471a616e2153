"""The Python API of 2023: `modular.engine`, which loads ONNX files."""
