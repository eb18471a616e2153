"""Structured output: grammars, and the tokens that each leaves, by llguidance (extra ``serve``)."""
