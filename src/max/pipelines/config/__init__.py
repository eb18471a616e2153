"""What a user asks of a pipeline: its options, their parts, and the checks of their values."""
