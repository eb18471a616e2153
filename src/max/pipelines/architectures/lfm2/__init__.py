"""LFM2, of Liquid AI."""
