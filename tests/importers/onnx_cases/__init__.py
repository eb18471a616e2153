"""A case for each op that the ONNX importer knows: a function that draws operands and attributes."""
