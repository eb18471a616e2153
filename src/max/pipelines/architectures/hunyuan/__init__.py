"""Hunyuan, of Tencent."""
