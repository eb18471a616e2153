"""Encoders: what each family differs in from the base in `max.pipelines.encoders`."""
