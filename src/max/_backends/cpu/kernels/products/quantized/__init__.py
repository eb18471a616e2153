"""Matrix products with quantized weights, and the conversion of quantized blocks."""
