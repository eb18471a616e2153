"""Matrix products with dense packed weights."""
