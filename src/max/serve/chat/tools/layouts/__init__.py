"""Layouts of tool calls: recognized from a chat template, as grammars, and read from answers."""
