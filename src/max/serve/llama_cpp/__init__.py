"""Routes of llama.cpp's server that no other API has."""
