"""The CPU: its backend, its runtime, its passes and the kernels of its regions."""
