"""The recorder of calls on eager tensors, and what calls it."""
