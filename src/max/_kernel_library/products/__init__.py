"""Matrix products: what dense, quantised and int8 weights share."""
