"""Command, of Cohere."""
