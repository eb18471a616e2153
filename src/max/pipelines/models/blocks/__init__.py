"""The blocks of decoders: forms of mixers, feed-forward layers and norms, and their layers."""
