"""The visitors of the syntax tree: expressions, calls, statements, loops."""
