"""ONNX: reads `.onnx` files with the package `onnx`, and stages their ops. `max.onnx` is its public face."""
