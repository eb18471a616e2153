"""The kernel IR: its nodes, its text, and the rules that it obeys."""
