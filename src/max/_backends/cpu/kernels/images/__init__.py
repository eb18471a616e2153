"""Pooling, resizing and folding of images."""
