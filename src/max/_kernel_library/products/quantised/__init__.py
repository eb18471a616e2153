"""Matrix products with quantised weights, and the conversion of quantised blocks."""
