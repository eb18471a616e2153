"""Bodies of requests: their types, limits and schemas."""
