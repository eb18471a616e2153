"""What users start: the command line `max`, and `LLM`."""
