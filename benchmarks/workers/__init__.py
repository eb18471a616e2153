"""The engines under measurement, each run in a process of its own (see `benchmarks.runner`)."""
