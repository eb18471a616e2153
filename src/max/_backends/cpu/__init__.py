"""The CPU: its backend, its runtime, its passes, its library kernels and the kernels of its regions."""
