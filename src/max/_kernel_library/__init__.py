"""Library kernels, written in the kernel language."""
