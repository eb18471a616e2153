"""The options of a pipeline, and the checks of their values."""
