"""The base of models: what a pipeline needs of a model, and how a model is loaded."""
