"""The base of decoder-only models: config, weights, graph, and the model of pipelines."""
