"""The layers of `max.nn`, one file per kind. Programs import them from `max.nn`, or from their documented modules."""
