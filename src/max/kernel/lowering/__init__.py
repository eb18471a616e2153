"""Lowering of kernel IR to LLVM IR text."""
