"""Qwen, of Alibaba."""
