"""Quantized tensors: their ops, and products and convolutions of codes as integers.

The modules are imported where they are used: those of convolutions and products use the second one.
"""
