"""Encoders: the differences of each family from the base in `max.pipelines.encoders`."""
