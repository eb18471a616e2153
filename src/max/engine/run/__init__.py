"""Runs a program that is linked: inputs, outputs, arenas, host steps, profiles."""
