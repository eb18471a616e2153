"""From launches of graphs to one program: calls inlined, memory planned, everything as plain data."""
