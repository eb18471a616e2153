"""One step of a batch: its inputs, the tokens that it gives, drafts, and several steps in one call."""
