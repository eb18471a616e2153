"""Models that read a text in one step: embedders and rankers."""
