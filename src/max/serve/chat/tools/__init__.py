"""Tools: their definitions, the formats of their calls, the grammars and the parsers of these formats."""
