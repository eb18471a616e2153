"""Convolutions and transposed convolutions over images and volumes."""
