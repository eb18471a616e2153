"""Tensor views and tiles at compile time, their methods, and the IR of loads and stores."""
