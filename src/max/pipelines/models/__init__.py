"""Base classes of models: the interface that pipelines require, and the loading of a model."""
