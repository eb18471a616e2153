"""Products of matrices, also of quantized weights, convolutions and Fourier transforms."""
