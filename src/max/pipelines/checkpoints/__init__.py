"""The files of a model: on disk or on the hub, config.json, GGUF metadata, and the headers of weight files."""
