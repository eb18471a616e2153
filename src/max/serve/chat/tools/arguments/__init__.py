"""Schemas of arguments in calls that are not JSON: as alternatives without combinations, and texts as patterns."""
