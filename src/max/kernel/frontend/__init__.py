"""The frontend of the kernel language: compiles a syntax tree to kernel IR, for concrete argument types."""
