"""Ollama's API at ``/api``: chat, generate, the list of models."""
