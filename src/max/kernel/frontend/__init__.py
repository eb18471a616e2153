"""From a syntax tree to kernel IR, for given argument types."""
