"""TensorFlow's models: converted to ONNX by tf2onnx in a process of its own, then read as such."""
