"""Matrix products; the files here are shared by products with dense, quantised and int8 weights."""
