"""Ops of several devices: transfers, collectives, launches."""
