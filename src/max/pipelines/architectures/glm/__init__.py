"""GLM and dots.llm1."""
