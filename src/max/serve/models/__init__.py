"""The models of a server: loaded, unloaded, and how many requests they take."""
