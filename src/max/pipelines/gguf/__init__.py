"""Models as GGUF files: the reader of metadata and tokenizers, and the writer."""
