"""One step of a batch: its inputs, the tokens that it gives, and several steps in one call."""
