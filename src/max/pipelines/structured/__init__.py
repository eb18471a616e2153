"""Structured output: grammars, and the tokens that they allow, by llguidance (extra ``serve``)."""
