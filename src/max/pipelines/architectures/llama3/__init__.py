"""Llama and what shares its form: RMS norms, rotary positions, grouped heads, a gated MLP."""
