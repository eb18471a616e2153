"""The ops of quantized tensors."""
