"""Structured output: grammars, and masks of the tokens they allow, by llguidance (extra ``serve``)."""
