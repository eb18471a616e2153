"""Low-rank adapters (LoRA): their files, their places in a model, and those that a server has loaded."""
