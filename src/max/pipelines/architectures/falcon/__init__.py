"""Falcon, of TII."""
