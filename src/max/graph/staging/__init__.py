"""What a graph under construction keeps: the current graph, chains, symbols, branches, weights."""
