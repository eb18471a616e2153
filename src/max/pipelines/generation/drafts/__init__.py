"""Drafted tokens: guesses of the next tokens of requests by several kinds of drafters, and their verification."""
