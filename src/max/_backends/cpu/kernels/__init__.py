"""The library kernels of the CPU, written in the kernel language."""
