"""Ops on images: pooling, resizing, regions."""
