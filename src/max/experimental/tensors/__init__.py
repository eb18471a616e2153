"""What tensors can do: operations, indexing, conversions, writes, control flow."""
