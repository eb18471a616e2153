"""Attention, the paged KV cache and rotary position embedding."""
