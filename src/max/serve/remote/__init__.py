"""Engines in processes of other machines: a replica is an address."""
