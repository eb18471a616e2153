"""Matrix products; the files here are shared by products with dense, quantized and int8 weights."""
