"""Convolution, pooling, folding and resizing over images and volumes."""
