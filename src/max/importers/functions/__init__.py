"""Functions of tensors that the graph API lacks, composed of its ops. All importers share them."""
