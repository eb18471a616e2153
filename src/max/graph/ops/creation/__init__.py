"""Ops that make tensors from nothing but sizes: constants, sequences, windows."""
